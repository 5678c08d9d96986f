"""Train the heads of SmolLM2-135M-Instruct: ``python -m recipes.smollm2``.

The stages, in order:

- ``chats``: the target writes chats. With the files in :data:`SHARED`, it also answers GSM8K's
  training questions, and chats that share a question with a benchmark are left out.
- ``features``: store what the target computes for these chats.
- ``eagle2``, ``eagle3``: train the heads on these features.
- ``tune``, ``calibrate``: select settings on held-out chats; IFEval's prompts certify them.
- ``card``: measure the heads on questions of Spec-Bench, and write the model cards.
- ``curve``: measure heads that were trained on fewer tokens.
- ``speed``: compare the EAGLE-3 head with Hugging Face's ``generate``, one factor at a time.

Every stage but ``card`` resumes. Without files in ``--work``, chats come from the compressed parts
in ``smollm2_chats``, whose hashes are in ``parts.json``, and training starts from the weights of
the heads in ``--out``, without the state of the optimizer. ``--parts`` is the number of parts to
have at least; new ones need another ``--work``. ``--tiny`` runs every stage on a handful of chats,
in ``runs/smollm2-tiny``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagle_fsd.bundled import BUNDLED, SMOLLM2_HEADS
from eagle_fsd.cli.console import progress
from eagle_fsd.cli.train import WritingProgress
from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.model.gguf import locate_model
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.chat_file import Chat
from eagle_fsd.train.config import (
    FeaturesRequest,
    RegenerateConfig,
    RegenerateRequest,
    SynthesizeConfig,
    SynthesizeRequest,
    TrainConfig,
    TrainRequest,
)
from eagle_fsd.train.feature_store import INDEX_FILE, FeatureStore, store_features
from eagle_fsd.train.loaded_target import fastest_dtype
from eagle_fsd.train.record import read_record
from eagle_fsd.train.regenerate import regenerate
from eagle_fsd.train.synthesize import synthesize
from eagle_fsd.train.training_folder import TrainingFolder
from eagle_fsd.utils.files import atomic_write, read_jsonl
from recipes.measure import measure
from recipes.overlap import Overlaps, read_questions
from recipes.publish import (
    describe_measurement,
    describe_tree,
    train_and_save,
    write_card,
    write_questions,
)

TARGET = "smollm2"
STAGES = ("chats", "features", "eagle2", "eagle3", "tune", "calibrate", "card", "curve", "speed")
SHARED = Path("../shared/data")
#: Questions whose answers are written for training.
GSM8K = "gsm8k_train.jsonl"
SPEC_BENCH, IFEVAL = "spec_bench_question.jsonl", "ifeval_prompts.jsonl"
#: Benchmarks that chats must not share questions with.
BENCHMARKS = ("mt_bench_question.jsonl", SPEC_BENCH, IFEVAL, "gsm8k_test.jsonl")
#: First chats, which are not trained on: their questions select the settings.
TUNING_CHATS = 128
#: Tree that the heads are compared with.
TREE = ("--total-tokens", 16, "--depth", 8, "--tree-top-k", 2)
#: The fastest setting that the calibration of the EAGLE-3 head tested, which it did not certify.
RELAXED = ("--rule", "acc 0.5")
#: Nats per token that an answer of the setting to certify may give up, and the percentage points of
#: IFEval's prompts that it may lose.
MAX_REGRET, MAX_DROP = 0.05, 3
#: Heads by stage. Every level of a draft tree reads the output projection: a few thousand rows
#: instead of the target's 49,152. An EAGLE-3 head contains its rows; with 4,096 it has 15 MB.
CONFIGS = {
    "eagle2": TrainConfig(
        draft_vocab_size=8192, tokens_per_batch=2048, lr=1e-3, unroll=2, epochs=4
    ),
    "eagle3": TrainConfig(
        head_type="eagle3",
        draft_vocab_size=4096,
        fc_norm=True,
        norm_output=True,
        tokens_per_batch=2048,
        lr=1e-3,
        unroll=3,
        epochs=4,
    ),
}

log = logging.getLogger(__name__)


class Factor(NamedTuple):
    """How a row of ``speed`` differs from one prompt at a time in float32, eager, on one thread.

    ``options`` are those of ``tune`` and ``evaluate``, and ``context`` counts tokens of a text
    before every question. Unless ``tuned``, trees are those of the head's ``fsd.json``. At most
    ``questions`` are answered.
    """

    options: tuple[str, ...] = ()
    threads: int = 1
    context: int = 0
    tuned: bool = False
    questions: int = 26


FACTORS = {
    "base": Factor(),
    "4 prompts": Factor(("--batch", "4")),
    "16 prompts": Factor(("--batch", "16")),
    "context 256": Factor(context=256),
    "context 2000": Factor(context=2000, questions=13),
    "context 7500": Factor(context=7500, questions=6),
    "2 threads": Factor(threads=2, tuned=True),
    "compiled": Factor(("--compile",)),  # tune does not compile
    "bfloat16": Factor(("--dtype", "bfloat16"), tuned=True),
    "bfloat16, 2 threads": Factor(("--dtype", "bfloat16"), threads=2, tuned=True),
}


@dataclass(frozen=True)
class Scale:
    """How much is written, trained on and measured.

    A part of the chats consists of ``chats`` that the target writes as a whole and its ``answers``
    to given questions; ``curve`` lists numbers of tokens. ``tuning``, ``questions``, ``timed`` and
    ``prompts`` (None: all) are numbers of questions: of held-out chats, of Spec-Bench for tau and
    for speed, and of IFEval.
    """

    parts: int = 7
    chats: int = 600
    answers: int = 300
    max_new_tokens: int = 512
    batch_size: int = 96
    max_steps: int | None = None
    tuning: int = 16
    questions: int = 26
    timed: int = 26
    prompts: int | None = None
    curve: tuple[int, ...] = (100_000, 300_000, 800_000)


TINY = Scale(
    parts=1,
    chats=6,
    answers=2,
    max_new_tokens=320,
    batch_size=4,
    max_steps=2,
    tuning=2,
    questions=6,
    timed=6,
    prompts=6,
    curve=(500,),
)


@dataclass(frozen=True)
class Recipe:
    """The folders of a run: finished heads, committed data, and work files."""

    out: Path
    data: Path
    work: Path
    scale: Scale

    @property
    def chats(self) -> Path:
        """The folder of the compressed chats."""
        return self.data / "smollm2_chats"

    def head(self, stage: str) -> Path:
        """Return the folder of a finished head."""
        return self.out / SMOLLM2_HEADS[f"smollm2-{stage}"].name

    def run(self, stage: str) -> None:
        """Run a stage."""
        if stage == "chats":
            self.write_chats()
        elif stage == "features":
            self.store_features()
        elif stage in CONFIGS:
            self.train(stage, self.work / "features", self.work / stage, self.head(stage))
        elif stage in ("tune", "calibrate"):
            for name in CONFIGS:
                self.select_settings(stage, name)
        elif stage == "card":
            for name in CONFIGS:
                self.write_card(name)
        elif stage == "curve":
            self.measure_curve()
        else:
            self.measure_speed()

    # -- chats -------------------------------------------------------------------------------------

    def write_chats(self) -> None:
        """Have the target write the parts of the chats that do not exist."""
        for part in range(self.scale.parts):
            if part_name(part) in read_hashes(self.chats):
                continue
            overlaps = Overlaps(())
            if SHARED.is_dir():
                files = (SHARED / name for name in BENCHMARKS)
                overlaps = Overlaps(question for file in files for question in read_questions(file))
            else:
                log.warning("%s is missing: the chats are not compared with benchmarks", SHARED)
            written = [*self._synthesize(part), *self._answer_questions(part)]
            chats = [chat for chat in written if overlaps.find(chat) is None]
            log.info("%d chats share a question with a benchmark", len(written) - len(chats))
            pack_chats(chats, self.chats, part)

    def _synthesize(self, part: int) -> list[Chat]:
        """Have the target write both sides of chats."""
        limit = self.scale.max_new_tokens
        config = SynthesizeConfig(
            seed=part,
            max_new_tokens=limit,
            max_user_tokens=min(256, limit),
            batch_size=self.scale.batch_size,
        )
        out = self.work / f"synthesized-{part}.jsonl"
        request = SynthesizeRequest(target=TARGET, out=out, count=self.scale.chats)
        shown = WritingProgress(config)
        return list(synthesize(request, config, progress=shown.stage, on_tokens=shown.add_tokens))

    def _answer_questions(self, part: int) -> list[Chat]:
        """Have the target answer training questions of GSM8K, if they are there."""
        if not (SHARED / GSM8K).exists():
            return []
        prompts, out = self.work / f"questions-{part}.jsonl", self.work / f"answered-{part}.jsonl"
        start = part * self.scale.answers
        own = list(islice(read_questions(SHARED / GSM8K), start, start + self.scale.answers))
        if not own:
            return []
        write_questions(prompts, own)
        config = RegenerateConfig(
            max_new_tokens=self.scale.max_new_tokens, batch_size=self.scale.batch_size
        )
        request = RegenerateRequest(data=prompts, out=out, target=TARGET, dtype=fastest_dtype())
        shown = WritingProgress(config)
        answered = regenerate(request, config, progress=shown.stage, on_tokens=shown.add_tokens)
        return [] if answered is None else list(answered)

    def training_file(self) -> Path:
        """Write the chats to train on, and return the file."""
        file = self.work / "chats.jsonl"
        chats = self._split_chats()[1]
        atomic_write(file, "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        return file

    def _split_chats(self) -> tuple[list[Chat], list[Chat]]:
        """Return the chats that select settings, and those to train on."""
        chats = read_chats(self.chats)
        tuning = min(TUNING_CHATS, len(chats) // 4)
        return chats[:tuning], chats[tuning:]

    # -- heads -------------------------------------------------------------------------------------

    def store_features(self) -> None:
        """Store the features that both heads need: those of the EAGLE-3 head."""
        request = FeaturesRequest(
            data=self.training_file(),
            target=TARGET,
            dtype=fastest_dtype(),
            out=self.work / "features",
            head_type="eagle3",
        )
        store_features(request, progress=progress)

    def some_features(self, about: int) -> Path:
        """Make a folder with the stored features of about so many tokens, and return it.

        They are random shards, and larger folders contain the shards of smaller ones.
        """
        folder = self.work / f"features-{about}"
        index = json.loads((self.work / "features" / INDEX_FILE).read_text())
        shards = []
        for shard in random.Random(0).sample(index["shards"], len(index["shards"])):
            if about <= 0:
                break
            about -= sum(tokens for _, tokens, _ in shard["chats"])
            shards.append({**shard, "file": f"../features/{shard['file']}"})
        folder.mkdir(exist_ok=True)
        atomic_write(folder / INDEX_FILE, json.dumps({**index, "shards": shards}))
        return folder

    def train(self, stage: str, features: Path, folder: Path, out: Path) -> None:
        """Train a head in ``folder``, from that in ``out`` if there is one; save it to ``out``."""
        training = TrainingFolder(folder)
        start = training.recorded("head")
        if not training.exists and (out / "config.json").exists():
            start = out
        request = TrainRequest(
            features=features,
            out=folder,
            target=TARGET,
            dtype=fastest_dtype(),
            head=start,
            resume=training.exists,
        )
        config = CONFIGS[stage].updated(max_steps=self.scale.max_steps)
        train_and_save(request, config, out, torch.bfloat16)

    def select_settings(self, command: str, name: str) -> None:
        """Tune or calibrate a head, with settings selected on questions that are not trained on.

        IFEval's prompts certify the calibration. A second one counts regret, and is not installed.
        """
        tuning = self._tuning_questions()
        questions: str | Path
        file, tokens = SHARED / IFEVAL, min(256, self.scale.max_new_tokens)
        options: dict[str, object] = {
            "--target": TARGET,
            "--drafter": self._drafter(name),
            "--out": self.work / f"{command}-{name}",
        }
        count: int | None
        if command == "tune":
            questions, count = tuning, self.scale.tuning
            options["--max-new-tokens"] = tokens // 2
        else:
            questions, count = file if file.exists() else "ifeval", self.scale.prompts
            options |= {"--select-on": tuning, "--max-drop": MAX_DROP, "--max-new-tokens": tokens}
            options["--answer-batch"] = 16
        if count is not None:
            options["--count"] = count
        selected = {"--select-regret": MAX_REGRET} if command == "calibrate" else {}
        run_command(command, questions, options | selected, "--install")
        if command == "calibrate":  # once more, by a measure that needs no references
            options |= {"--measure": "regret", "--max-regret": MAX_REGRET}
            options["--out"] = self.work / f"regret-{name}"
            run_command(command, questions, options)

    def _tuning_questions(self) -> Path:
        lines = []
        for number, chat in enumerate(self._split_chats()[0]):
            turns = [message["content"] for message in chat if message["role"] == "user"][:1]
            line = {"question_id": number, "category": "synthesized", "turns": turns}
            lines.append(json.dumps(line) + "\n")
        tuning = self.work / "tuning.jsonl"
        atomic_write(tuning, "".join(lines))
        return tuning

    def _drafter(self, name: str) -> str:
        """Return a head's name, which the settings repeat, or its folder."""
        return f"smollm2-{name}" if self.out == BUNDLED else str(self.head(name))

    # -- measurements ------------------------------------------------------------------------------

    def write_card(self, name: str) -> None:
        """Measure a head on Spec-Bench, and write its model card."""
        row = self._measure(self.head(name))
        lines = [describe_measurement(row["answers"], "questions of Spec-Bench"), ""]
        lines += ["| decoding | tree | tau |", "|---|---|---|"]
        lines.append(f"| exact | {describe_tree(row)} | {row['tau']:.2f} |")
        card = _CARD.replace("{kind}", name.upper().replace("EAGLE", "EAGLE-"))
        tuned = (self.head(name) / SETTINGS_FILE).exists()
        card = card.replace("{settings_note}", _TUNED if tuned else _NOT_TUNED)
        write_card(self.head(name), card, "\n".join(lines), len(self._split_chats()[1]))

    def measure_curve(self) -> None:
        """Measure tau of exact decoding with heads trained on a part of the chats, and on all."""
        file = self.data / "smollm2_curve.json"
        rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        # The heads in ``out`` may have been trained on since.
        rows = [
            row
            for row in rows
            if row["about"] is not None
            or row["tokens"] == read_record(self.head(row["head"]))["tokens"]
        ]
        measured = {(row["head"], row["about"]) for row in rows}
        stored = FeatureStore(self.work / "features")
        total = sum(stored.sizes)
        sizes = (*(size for size in self.scale.curve if size < total), None)
        for stage, about in product(CONFIGS, sizes):
            if (stage, about) in measured:
                continue
            head = self.head(stage)
            if about is not None:
                folder = self.work / "curve" / f"{stage}-{about}"
                head = folder.with_name(f"{folder.name}-head")
                self.train(stage, self.some_features(about), folder, head)
            record = read_record(head)
            row = {"head": stage, "about": about, "tokens": record["tokens"]}
            rows.append(row | {"tau": self._measure(head)["tau"]})
            atomic_write(file, json.dumps(rows, indent=2) + "\n")

    def measure_speed(self) -> None:
        """Measure every factor with the EAGLE-3 head; the table is ``smollm2_speed.md``.

        Beside Hugging Face's ``generate``, plain and exact decoding, :data:`RELAXED` is measured.
        """
        lines = ["| factor | method | tree | tokens/s | x best of Hugging Face | tau |"]
        lines.append("|---|---|---|---|---|---|")
        common: dict[str, object] = {"--target": TARGET, "--drafter": self._drafter("eagle3")}
        common["--max-new-tokens"] = min(128, self.scale.max_new_tokens)
        for name, factor in FACTORS.items():
            if factor.context and not (SHARED / SPEC_BENCH).exists():
                log.warning("%s needs %s", name, SHARED / SPEC_BENCH)
                continue
            folder = self.work / "speed" / name.replace(" ", "-")
            tuned, words = folder / "tune" / SETTINGS_FILE, factor.options
            if factor.tuned and not tuned.exists():  # a second time could select other trees
                options = {**common, "--count": self.scale.tuning, "--out": tuned.parent}
                questions = self._tuning_questions()
                run_command("tune", questions, options, *words, threads=factor.threads)
            settings = tuned if factor.tuned else self.head("eagle3") / SETTINGS_FILE
            count = min(self.scale.timed, factor.questions)
            options = {**common, "--count": count, "--out": folder / "evaluate"}
            options |= {"--baseline": "hf", "--settings": settings}
            if "--batch" not in words:  # Hugging Face's prompt lookup takes one prompt at a time
                options["--assistant"] = "ngram"
            if factor.context:
                options["--system"] = long_text(factor.context)
            run_command("evaluate", spec_bench(), options, *words, *RELAXED, threads=factor.threads)
            rows = json.loads((folder / "evaluate" / "report.json").read_text())["rows"]
            best = max(row["tokens_per_second"] for row in rows if row["method"].startswith("hf"))
            for row in rows:
                relaxed = row["method"] == "fsd"
                tree = describe_tree(row) if relaxed or row["method"] == "exact" else ""
                method = RELAXED[1] if relaxed else row["method"]
                speed, tau = row["tokens_per_second"], row["tau"]
                numbers = f"{speed:.1f} | {speed / best:.2f} | {f'{tau:.2f}' if tau else ''}"
                lines.append(f"| {name} | {method} | {tree} | {numbers} |")
            atomic_write(self.data / "smollm2_speed.md", "\n".join(lines) + "\n")

    def _measure(self, head: Path) -> dict[str, Any]:
        """Return the row of exact decoding on questions of Spec-Bench."""
        limit = min(128, self.scale.max_new_tokens)
        count, questions = self.scale.questions, spec_bench()
        options: Any = {"questions": questions, "max_new_tokens": limit}
        return measure(TARGET, head, count, ["exact"], *TREE, **options)["exact"]


def run_command(
    command: str,
    questions: str | Path,
    options: Mapping[str, object],
    *flags: str,
    threads: int | None = None,
) -> None:
    """Run a command of ``eagle-fsd`` on questions, by default with the threads of this process."""
    words = [sys.executable, "-m", "eagle_fsd.cli", command, str(questions), *flags]
    words += [str(word) for option in options.items() for word in option]
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(words, check=True, env={**os.environ, **environment})


def spec_bench() -> str | Path:
    """Return the shared file of Spec-Bench's questions, or else the set's name."""
    file = SHARED / SPEC_BENCH
    return file if file.exists() else "spec-bench"


def long_text(tokens: int) -> str:
    """Return a text of about ``tokens`` tokens: the first documents in Spec-Bench's questions."""
    tokenizer = load_tokenizer(locate_model(TARGET))
    turns = (record["turns"][0] for record in read_jsonl(SHARED / SPEC_BENCH))
    documents = "\n\n".join(turn for turn in turns if len(turn) > 2000)
    ids = tokenizer(documents[: 10 * tokens], add_special_tokens=False).input_ids
    return str(tokenizer.decode(ids[:tokens]))


def part_name(part: int) -> str:
    """Return the name of the file with a part of the chats."""
    return f"{part:02d}.jsonl.xz"


def read_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the text of every part, by its file's name."""
    file = folder / "parts.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def pack_chats(chats: list[Chat], folder: Path, part: int) -> None:
    """Write a compressed part of the chats, then its hash."""
    text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(folder / part_name(part), "wt", encoding="utf-8", preset=9) as file:
        file.write(text)
    hashes = read_hashes(folder) | {part_name(part): hashlib.sha256(text.encode()).hexdigest()}
    atomic_write(folder / "parts.json", json.dumps(hashes, indent=2, sort_keys=True) + "\n")


def read_chats(folder: Path) -> list[Chat]:
    """Read all parts of the chats; raises ValueError if one does not have its hash."""
    chats: list[Chat] = []
    for name, expected in sorted(read_hashes(folder).items()):
        text = lzma.decompress((folder / name).read_bytes()).decode()
        if hashlib.sha256(text.encode()).hexdigest() != expected:
            raise ValueError(f"{folder / name} is damaged: parts.json has another SHA-256")
        chats += [json.loads(line)["messages"] for line in text.splitlines()]
    return chats


def main() -> None:
    """Run the stages that the command line selects."""
    parser = argparse.ArgumentParser(description="Train the heads of SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, help="folder of the heads; default: the package")
    parser.add_argument("--data", type=Path, help="folder of chats and tables; default: recipes")
    parser.add_argument("--work", type=Path, help="work files; default: runs/smollm2")
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="stage to run; default: all of them"
    )
    parser.add_argument("--parts", type=int, help=f"least number of parts; default: {Scale.parts}")
    parser.add_argument("--tiny", action="store_true", help="a handful of chats and steps")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    scale, out, data, work = Scale(), BUNDLED, Path(__file__).parent, Path("runs/smollm2")
    if options.tiny:  # neither reads nor replaces what is committed
        trial = Path("runs/smollm2-tiny")
        scale, out, data, work = TINY, trial / "heads", trial, trial / "work"
    if options.parts is not None:
        scale = replace(scale, parts=options.parts)
    work = options.work or work
    work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(options.out or out, options.data or data, work, scale)
    for stage in options.stage or STAGES:
        log.info("stage %s", stage)
        recipe.run(stage)


_TUNED = """An `fsd.json` beside it holds the settings
that `from_pretrained` uses by default."""
_NOT_TUNED = """It has no settings: decoding is
lossless unless a threshold is set."""
_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# {kind} draft head of SmolLM2-135M-Instruct

A head with {parameters} M parameters that drafts {settings[draft_vocab_size]} of the target's
49,152 tokens. Its embedding is the target's. {settings_note}

Trained by `python -m recipes.smollm2` on {chats} chats whose answers the target wrote; questions of
MT-bench, Spec-Bench, IFEval and GSM8K's test set are not among them: {steps} steps that read
{tokens} tokens, in {minutes} minutes on {machine}, {date}.
"""


if __name__ == "__main__":
    main()
