"""What the training tests train with: a tiny target, chat files, and small trainings.

The target has the bundled tokenizer and chat template, so that chats are encoded as users' are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import reset_accelerator_state
from pairs import tiny_target
from safetensors.torch import load_file
from torch import Tensor

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.train import TrainConfig, TrainRequest, train
from eagle_fsd.train.training_folder import METRICS_FILE

#: The fixture ``train``.
Train = Callable[..., Path]
#: Seconds that a training in a subprocess may take on a busy machine.
TIMEOUT = 1200
#: A dozen steps on a handful of chats, without validation.
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

#: Options that train an EAGLE-3 head with about half of the target's vocabulary.
EAGLE3: dict[str, Any] = {"head_type": "eagle3", "unroll": 3, "draft_vocab_size": 500}

#: ``accelerate launch --cpu --num_processes 2`` starts one process if there is no mpirun.
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: The command line, killed after logging its eighth step, the third one of its second epoch.
KILLED_IN_MID_EPOCH = """
import os, signal
from eagle_fsd.train.training_folder import TrainingFolder
original = TrainingFolder.append_metrics
def append(folder, line):
    original(folder, line)
    if line["step"] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
TrainingFolder.append_metrics = append
from eagle_fsd.cli import main
main()
"""


def write_target(folder: Path, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Save a random target with the bundled tokenizer."""
    model = tiny_target(vocab_size=1024, bos_token_id=1, eos_token_id=2, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for file in BUNDLED_TARGET.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(BUNDLED_TARGET / "chat_template.jinja", folder)
    return folder


def make_chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    """A chat whose length varies with its number."""
    messages = []
    for turn in range(turns):
        question = f"What is {number} plus {turn}?" + " Please." * (number * 7 % 5)
        answer = f"It is {number + turn}." + f" Yes, {number}." * (number * 5 % 4)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def write_chats(path: Path, count: int = 10) -> Path:
    lines = [json.dumps({"messages": make_chat(number, 1 + number % 2)}) for number in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_rounds(path: Path, questions: Sequence[str]) -> Path:
    """Write a chat of up to three rounds for every three questions, some with a system turn."""
    with path.open("w") as file:
        for number in range(len(questions) // 3):
            turns = [{"role": "system", "content": "Count."}] if number % 3 == 1 else []
            for place in range(1 + number % 3):
                turns.append({"role": "user", "content": questions[3 * number + place]})
                turns.append({"role": "assistant", "content": f"Wrong {number} {place}."})
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def train_here(data: Path | None, out: Path, target: Path | None, **options: Any) -> Path:
    """Call :func:`train` in this process; options are fields of the config or of the request."""
    options = {**SMALL, **options}
    names = [name for name in options if name in TrainConfig.model_fields]
    config = TrainConfig.from_dict({name: options.pop(name) for name in names})
    if "features" not in options:
        options["data"] = data
    reset_accelerator_state()
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(out))
    request = TrainRequest(out=out, target=target, **options)
    folder = train(request, config, accelerator=accelerator)
    assert folder == out
    return out


def command(data: Path, out: Path, target: Path, *more: str, **changes: Any) -> list[str]:
    """Arguments of ``eagle-fsd train``."""
    arguments = ["train", "--data", data, "--out", out, "--target", target]
    for name, value in {**SMALL, **changes}.items():
        arguments += ["--" + name.replace("_", "-"), value]
    return [*map(str, arguments), *more]


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """The arguments without an option and its value."""
    at = arguments.index(option)
    return [*arguments[:at], *arguments[at + 2 :]]


def start(arguments: Sequence[str], launcher: Sequence[str] = (), **options: Any) -> Any:
    """Start the command line in a subprocess, on the CPU and on one thread."""
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


def run_process(
    arguments: Sequence[str], launcher: Sequence[str] = (), status: int | None = 0, **options: Any
) -> tuple[str, str]:
    """Run the command line in a subprocess; return its standard output and standard error.

    It must exit with ``status``, or for None with a failure that its launcher reports.
    """
    process = start(arguments, launcher, **options)
    printed, errors = process.communicate(timeout=TIMEOUT)
    failed = status is None and process.returncode not in (0, -signal.SIGKILL)
    assert failed or process.returncode == status, errors
    return printed, errors


def read_metrics(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def read_losses(folder: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in read_metrics(folder)], dtype=torch.float64)


def read_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether weights are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_training(one: Path, other: Path) -> bool:
    """Whether trainings in two folders have the same weights and losses bit for bit."""
    return same_weights(read_weights(one), read_weights(other)) and torch.equal(
        read_losses(one), read_losses(other)
    )


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


def replace_call(
    patch: Any, owner: Any, name: str, number: int, replacement: Callable[..., Any]
) -> None:
    """Replace the ``number``-th call (from 1) of ``owner.name``."""
    original, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return (replacement if calls == number else original)(*arguments, **options)

    patch.setattr(owner, name, counted)


@contextmanager
def killed(
    owner: Any, name: str, number: int, instead: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Kill what runs in this context after the ``number``-th call (from 1) of ``owner.name``.

    If ``instead`` is given, it is called in place of that call.
    """
    call = instead or getattr(owner, name)

    def last(*arguments: Any, **options: Any) -> None:
        call(*arguments, **options)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        replace_call(patch, owner, name, number, last)
        with pytest.raises(Killed):
            yield


def write_half(_: Any, path: str | Path) -> None:
    """Write half of a file, which is the model of a checkpoint if ``path`` is a folder."""
    path = Path(path)
    (path / "model.safetensors" if path.is_dir() else path).write_bytes(b"half")
