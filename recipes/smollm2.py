"""Train the heads of SmolLM2-135M-Instruct: ``python -m recipes.smollm2``.

``chats`` has the target write chats, and answer the training questions of GSM8K if they are there;
chats that share a question with a benchmark are left out. ``eagle2`` and ``eagle3`` train the heads
on them, ``tune`` and ``calibrate`` select their settings on chats that are not trained on, ``card``
measures them on questions of Spec-Bench and writes the model cards, and ``curve`` measures heads
trained on fewer tokens.

Every stage resumes: from its files in ``--work``, and without these from what is committed. The
chats are in ``smollm2_chats.jsonl.xz`` with their hash beside it, and a training starts from the
weights of the head in ``--out``, without the state of the optimizer. ``--tiny`` runs all of it on a
handful of chats.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import lzma
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.bundled import BUNDLED, SMOLLM2_HEADS
from eagle_fsd.train.chat_file import Chat
from eagle_fsd.train.config import (
    RegenerateConfig,
    RegenerateRequest,
    SynthesizeConfig,
    SynthesizeRequest,
    TrainConfig,
    TrainRequest,
)
from eagle_fsd.train.loaded_target import fastest_dtype
from eagle_fsd.train.record import read_record
from eagle_fsd.train.regenerate import regenerate
from eagle_fsd.train.run import BYTES_PER_TOKEN
from eagle_fsd.train.synthesize import synthesize
from eagle_fsd.train.training_folder import TrainingFolder
from eagle_fsd.utils.files import atomic_write
from recipes.measure import measure
from recipes.overlap import Overlaps, questions
from recipes.publish import describe_measurement, describe_tree, train_and_save, write_card

TARGET = "smollm2"
STAGES = ("chats", "eagle2", "eagle3", "tune", "calibrate", "card", "curve")
SHARED = Path("../shared/data")
#: Questions whose answers are written for training.
GSM8K = "gsm8k_train.jsonl"
#: Benchmarks whose questions are never trained on.
BENCHMARKS = (
    "mt_bench_question.jsonl",
    "spec_bench_question.jsonl",
    "ifeval_prompts.jsonl",
    "gsm8k_test.jsonl",
)
#: Chats at the end that are not trained on: their questions select the settings.
TUNING_CHATS = 64
#: Heads by stage. The target's projection has 49,152 rows, which every level of a draft tree reads;
#: an EAGLE-3 head contains its rows, and 16 MB hold 4,096.
CONFIGS = {
    "eagle2": TrainConfig(draft_vocab_size=8192, tokens_per_batch=4096, unroll=2),
    "eagle3": TrainConfig(
        head_type="eagle3",
        draft_vocab_size=4096,
        fc_norm=True,
        norm_output=True,
        tokens_per_batch=4096,
        unroll=5,
    ),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scale:
    """How much is written, trained on and measured; ``curve`` lists numbers of tokens."""

    chats: int = 12_000
    answers: int = 7_473
    max_new_tokens: int = 512
    batch_size: int = 32
    max_steps: int | None = None
    questions: int = 80
    curve: tuple[int, ...] = (100_000, 300_000, 1_000_000, 3_000_000)


TINY = Scale(
    chats=6, answers=2, max_new_tokens=96, batch_size=4, max_steps=2, questions=6, curve=(500, 1000)
)


@dataclass(frozen=True)
class Recipe:
    """The folders of a run: finished heads, committed data, and work files."""

    out: Path
    data: Path
    work: Path
    scale: Scale

    @property
    def packed(self) -> Path:
        """The compressed chats."""
        return self.data / "smollm2_chats.jsonl.xz"

    def head(self, stage: str) -> Path:
        """Return the folder of a finished head."""
        return self.out / SMOLLM2_HEADS[f"smollm2-{stage}"].name

    def run(self, stage: str) -> None:
        """Run a stage."""
        if stage == "chats":
            self.write_chats()
        elif stage in CONFIGS:
            self.train(stage, self.training_file(), self.work / stage, self.head(stage))
        elif stage in ("tune", "calibrate"):
            for name in CONFIGS:
                self.select_settings(stage, name)
        elif stage == "card":
            for name in CONFIGS:
                self.write_card(name)
        else:
            self.measure_curve()

    # -- chats -------------------------------------------------------------------------------------

    def write_chats(self) -> None:
        """Have the target write the chats, unless they are committed."""
        if self.packed.exists():
            log.info("%s holds %d chats", self.packed, len(read_chats(self.packed)))
            return
        written = self.work / "synthesized.jsonl"
        limit = self.scale.max_new_tokens
        config = SynthesizeConfig(
            max_new_tokens=limit, max_user_tokens=min(256, limit), batch_size=self.scale.batch_size
        )
        request = SynthesizeRequest(target=TARGET, out=written, count=self.scale.chats)
        chats = list(synthesize(request, config))
        chats = [*self._answer_questions(), *chats]
        if SHARED.is_dir():
            overlaps = Overlaps(item for name in BENCHMARKS for item in questions(SHARED / name))
            kept = [chat for chat in chats if overlaps.find(chat) is None]
            log.info("%d chats share a question with a benchmark", len(chats) - len(kept))
            chats = kept
        else:
            log.warning("%s is missing: the chats are not compared with benchmarks", SHARED)
        pack_chats(chats, self.packed)

    def _answer_questions(self) -> list[Chat]:
        """Have the target answer the training questions of GSM8K, if they are there."""
        if not (SHARED / GSM8K).exists():
            return []
        prompts, written = self.work / "questions.jsonl", self.work / "answered.jsonl"
        lines = []
        for question in list(questions(SHARED / GSM8K))[: self.scale.answers]:
            answer = {"role": "assistant", "content": "..."}  # the target's answer replaces it
            messages = [{"role": "user", "content": question}, answer]
            lines.append(json.dumps({"messages": messages}) + "\n")
        atomic_write(prompts, "".join(lines))
        config = RegenerateConfig(
            max_new_tokens=self.scale.max_new_tokens, batch_size=self.scale.batch_size
        )
        request = RegenerateRequest(data=prompts, out=written, target=TARGET, dtype=fastest_dtype())
        answered = regenerate(request, config)
        return [] if answered is None else list(answered)

    def training_file(self, tokens: float = float("inf")) -> Path:
        """Write the chats to train on, about so many tokens of them, and return the file."""
        chats = read_chats(self.packed)
        kept: list[str] = []
        room = tokens * BYTES_PER_TOKEN
        for chat in chats[: -min(TUNING_CHATS, len(chats) // 4)]:
            line = json.dumps({"messages": chat}) + "\n"
            room -= len(line)
            if room < 0:
                break
            kept.append(line)
        suffix = "" if tokens == float("inf") else f"-{tokens:.0f}"
        file = self.work / f"chats{suffix}.jsonl"
        atomic_write(file, "".join(kept))
        return file

    # -- heads -------------------------------------------------------------------------------------

    def train(self, stage: str, chats: Path, folder: Path, out: Path) -> None:
        """Train a head in a folder, from the one in ``out`` if there is one, and save it there."""
        training = TrainingFolder(folder)
        start = None
        if not training.exists and (out / "config.json").exists():
            start = out
        elif training.exists:
            start = json.loads((folder / "recipe.json").read_text())["data"]["head"]
        request = TrainRequest(
            data=chats,
            out=folder,
            target=TARGET,
            head=start,
            resume=training.exists,
            store_features=True,
        )
        config = CONFIGS[stage].updated(max_steps=self.scale.max_steps)
        train_and_save(request, config, out, torch.bfloat16)

    def select_settings(self, command: str, name: str) -> None:
        """Run ``eagle-fsd tune`` or ``calibrate`` on the questions that are not trained on."""
        chats = read_chats(self.packed)
        lines = []
        for number, chat in enumerate(chats[-min(TUNING_CHATS, len(chats) // 4) :]):
            turns = [message["content"] for message in chat if message["role"] == "user"][:1]
            line = {"question_id": number, "category": "synthesized", "turns": turns}
            lines.append(json.dumps(line) + "\n")
        file = self.work / "tuning.jsonl"
        atomic_write(file, "".join(lines))
        words = [sys.executable, "-m", "eagle_fsd.cli", command, str(file), "--install"]
        options = {
            "--target": TARGET,
            "--drafter": self.head(name),
            "--out": self.work / f"{command}-{name}",
            "--max-new-tokens": min(256, self.scale.max_new_tokens),
            "--count": self.scale.questions,
        }
        words += [str(word) for option in options.items() for word in option]
        subprocess.run(words, check=True)

    # -- measurements ------------------------------------------------------------------------------

    def write_card(self, name: str) -> None:
        """Measure a head on Spec-Bench, and write its model card."""
        rows = self._measure(self.head(name), "exact", "fsd")
        lines = [describe_measurement(self.scale.questions, "questions of Spec-Bench"), ""]
        lines += ["| decoding | tree | tau |", "|---|---|---|"]
        for method, row in rows.items():
            lines.append(f"| {method} | {describe_tree(row)} | {row['tau']:.2f} |")
        card = _CARD.replace("{kind}", name.upper().replace("EAGLE", "EAGLE-"))
        write_card(self.head(name), card, "\n".join(lines), len(read_chats(self.packed)))

    def measure_curve(self) -> None:
        """Train heads on fewer tokens, and measure tau of exact decoding with each."""
        file = self.data / "smollm2_curve.json"
        rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        measured = {(row["head"], row["about"]) for row in rows}
        for stage in CONFIGS:
            for about in self.scale.curve:
                if (stage, about) in measured:
                    continue
                folder = self.work / "curve" / f"{stage}-{about}"
                out = folder.with_name(f"{folder.name}-head")
                self.train(stage, self.training_file(about), folder, out)
                record = read_record(out)
                rows.append(
                    {
                        "head": stage,
                        "about": about,
                        "tokens": record["tokens"],  # in all epochs
                        "epochs": record["settings"]["epochs"],
                        "tau": self._measure(out, "exact")["exact"]["tau"],
                    }
                )
                atomic_write(file, json.dumps(rows, indent=2) + "\n")

    def _measure(self, head: Path, *methods: str) -> dict[str, dict[str, Any]]:
        file, limit = SHARED / BENCHMARKS[1], min(256, self.scale.max_new_tokens)
        return measure(
            TARGET,
            head,
            self.scale.questions,
            methods,
            questions=file if file.exists() else "spec-bench",
            max_new_tokens=limit,
        )


def pack_chats(chats: list[Chat], path: Path) -> None:
    """Write compressed chats, and their hash beside them."""
    text = "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        file.write(text)
    content = {"chats": len(chats), "sha256": digest, "target": TARGET}
    atomic_write(_hash_file(path), json.dumps(content, indent=2) + "\n")


def read_chats(path: Path) -> list[Chat]:
    """Read compressed chats; raises ValueError if they are not those of the hash."""
    text = lzma.decompress(path.read_bytes()).decode()
    expected = json.loads(_hash_file(path).read_text())["sha256"]
    if hashlib.sha256(text.encode()).hexdigest() != expected:
        raise ValueError(f"{path} is damaged: its hash is another")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl.xz") + ".json")


def main() -> None:
    """Run the stages that the command line selects."""
    parser = argparse.ArgumentParser(description="Train the heads of SmolLM2-135M-Instruct.")
    here = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=BUNDLED, help="parent of the heads' folders")
    parser.add_argument("--data", type=Path, default=here, help="folder of chats and curve")
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"), help="work files")
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="stage to run; default: all of them"
    )
    parser.add_argument("--tiny", action="store_true", help="a handful of chats and steps")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options.work.mkdir(parents=True, exist_ok=True)
    scale = TINY if options.tiny else Scale()
    recipe = Recipe(options.out, options.data, options.work, scale)
    for stage in options.stage or STAGES:
        log.info("stage %s", stage)
        recipe.run(stage)


_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# {kind} draft head of SmolLM2-135M-Instruct

A head with {parameters} M parameters that drafts {settings[draft_vocab_size]} of the target's
49,152 tokens. Its embedding is the target's. `fsd.json`, if present, holds the settings that
`from_pretrained` uses by default.

Trained by `python -m recipes.smollm2` on {chats} chats that the target wrote; questions of
MT-bench, Spec-Bench, IFEval and GSM8K's test set are not among them: {steps} steps, {tokens} tokens
in {settings[epochs]} epochs, {minutes} minutes on {machine}, {date}.
"""


if __name__ == "__main__":
    main()
