"""What the training tests train with: a tiny target in a folder, chat files, and the command.

The target has the bundled tokenizer and its chat template, so chats are encoded as users' are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerators import forget_accelerator
from pairs import tiny_target
from safetensors.torch import load_file
from torch import Tensor

from eagle_fsd.bundled import BUNDLED, BUNDLED_TARGET
from eagle_fsd.train.config import TrainRecipe
from eagle_fsd.train.run import train
from eagle_fsd.train.run_folder import METRICS_FILE

#: Seconds that a busy machine may take for any of the trainings here, its imports included.
PATIENCE = 1200
#: A dozen steps on a handful of chats, with nothing decoded in between.
SMALL: dict[str, Any] = {
    "max_steps": 12,
    "batch_size": 2,
    "max_length": 64,
    "warmup": 0,
    "lr": 1e-3,
    "validation": 0,
    "checkpoint_every": 3,
    "log_every": 1,
}

#: The command, killed for good once it has told its eighth step: the third of an epoch of five.
KILLED_IN_MID_EPOCH = """
import os, signal
from eagle_fsd.train.run_folder import RunFolder
whole = RunFolder.append_metrics
def append(folder, line):
    whole(folder, line)
    if line["step"] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
RunFolder.append_metrics = append
from eagle_fsd.cli import main
main()
"""


def write_target(folder: Path, **changes: Any) -> Path:
    """A random target under the bundled tokenizer."""
    tiny_target(vocab_size=1024, bos_token_id=1, eos_token_id=2, **changes).save_pretrained(folder)
    for file in BUNDLED.glob("target/*token*"):
        shutil.copy(file, folder)
    shutil.copy(BUNDLED_TARGET / "chat_template.jinja", folder)
    return folder


def chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    """A conversation in OpenAI's layout; its length grows with its number, up and down."""
    said = []
    for turn in range(turns):
        question = f"What is {number} plus {turn}?" + " Please." * (number * 7 % 5)
        answer = f"It is {number + turn}." + f" Yes, {number}." * (number * 5 % 4)
        said.append({"role": "user", "content": question})
        said.append({"role": "assistant", "content": answer})
    return said


def write_chats(path: Path, count: int = 10) -> Path:
    lines = [json.dumps({"messages": chat(number, 1 + number % 2)}) for number in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def train_here(data: Path, out: Path, target: Path, **changes: Any) -> Path:
    """:func:`train` in this process; arguments that are no recipe's are handed to it."""
    settings = {**SMALL, **changes}
    names = TrainRecipe().as_dict()
    others = {name: settings.pop(name) for name in list(settings) if name not in names}
    forget_accelerator()
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(out))
    if "features" not in others:
        others["data"] = data
    return train(
        TrainRecipe.from_dict(settings), out, target=target, accelerator=accelerator, **others
    )


def command(data: Path, out: Path, target: Path, *more: str, **changes: Any) -> list[str]:
    """Arguments of ``eagle-fsd train``."""
    arguments = ["train", "--data", data, "--out", out, "--target", target]
    for name, value in {**SMALL, **changes}.items():
        arguments += ["--" + name.replace("_", "-"), value]
    return [*map(str, arguments), *more]


def start(arguments: Sequence[str], launcher: Sequence[str] = (), **options: Any) -> Any:
    """The command in a process of its own, on the CPU and on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["HF_HUB_OFFLINE"] = "1"
    program = [sys.executable, *(launcher or ["-m", "eagle_fsd.cli"])]
    return subprocess.Popen(
        [*program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def metrics(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def losses(folder: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in metrics(folder)], dtype=torch.float64)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
