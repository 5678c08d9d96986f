"""Train the pair that ships with the package: ``python -m recipes.bundled``.

Its stages can be run separately; by default, all but ``card`` run: ``target`` trains the tokenizer
and the target, ``head`` trains the EAGLE-2 head as ``eagle-fsd train`` does, ``eagle3`` the EAGLE-3
head, ``draft-model`` the draft model (``draft_model.py``), and ``card`` measures them on unseen
problems and writes the model cards. An interrupted training of the target or a head resumes. Run
``eagle-fsd tune --install`` and ``eagle-fsd calibrate --install`` before ``card`` to select the
pair's settings. ``make bundled`` runs everything, which takes some hours on two cores.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from eagle_fsd.bundled import BUNDLED
from eagle_fsd.evaluation.tables import markdown
from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.train.chat_file import write_chats
from eagle_fsd.train.config import TrainConfig, TrainRequest
from eagle_fsd.train.record import read_record
from eagle_fsd.train.training_folder import TrainingFolder
from recipes.draft_model import CARD, CHAIN_OPTIONS, DraftModelConfig, train_draft_model
from recipes.measure import describe_versions, measure
from recipes.publish import describe_measurement, describe_tree, train_and_save, write_card
from recipes.target import TargetConfig, train_target

STAGES = ("target", "head", "eagle3", "draft-model", "card")
#: Number of chats that the heads are trained on.
HEAD_CHATS = 3000
#: Hyperparameters of the heads by stage, ``head`` with the defaults of ``eagle-fsd train``. The
#: EAGLE-3 head can draft all 407 tokens that occur in the answers. When trained with two runs, its
#: drafts were accepted much less often from the third token on.
HEADS = {
    "head": TrainConfig(),
    "eagle3": TrainConfig(
        head_type="eagle3",
        draft_vocab_size=416,
        fc_norm=True,
        norm_output=True,
        epochs=7,
        batch_size=8,
        unroll=5,
    ),
}
#: Numbers of unseen problems that the pair is measured on, and its heads are compared on.
CARD_PROBLEMS, COMPARED_PROBLEMS = 500, 200
#: Trees that the heads are compared with: total_tokens, depth and top_k. The last one is a chain.
TREES = ((16, 8, 2), (60, 6, 10), (10, 8, 1))


def main() -> None:
    """Run the stages that the command line selects."""
    parser = argparse.ArgumentParser(description="Train the bundled pair from scratch.")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of the finished pair")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/bundled"), help="folder for checkpoints"
    )
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="stage to run; default: all but card"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stages = options.stage or STAGES[:-1]  # the card needs settings, selected before it
    options.work.mkdir(parents=True, exist_ok=True)
    if "target" in stages:
        train_target(TargetConfig(), options.work / "target", options.out / "target")
    for stage in HEADS:
        if stage in stages:
            train_head(stage, options.work, options.out)
    if "draft-model" in stages:
        work, out = options.work / "draft_model", options.out / "draft_model"
        train_draft_model(DraftModelConfig(), options.out / "target", work, out)
    if "card" in stages:
        write_cards(options.out)


def train_head(stage: str, work: Path, out: Path) -> None:
    """Train a head, EAGLE-3 on stored features."""
    data, folder = write_chats(work / "chats.jsonl", HEAD_CHATS), TrainingFolder(work / stage)
    request = TrainRequest(
        data=data,
        out=folder.path,
        target=out / "target",
        resume=folder.exists,
        store_features=stage == "eagle3",
    )
    train_and_save(request, HEADS[stage], out / stage)


def write_cards(out: Path) -> None:
    """Measure the pair, with the settings in ``fsd.json``, and the other drafters; write cards."""
    target, head = out / "target", out / "head"
    if not (head / SETTINGS_FILE).exists():
        raise FileNotFoundError(
            f"{head} has no {SETTINGS_FILE}; run eagle-fsd calibrate --install first"
        )
    methods = ("exact", "fsd")
    results = _format_results(measure(target, head, CARD_PROBLEMS, methods))
    write_card(target, _TARGET_CARD, results, HEAD_CHATS)
    write_card(head, _HEAD_CARD, results, HEAD_CHATS)
    write_card(out / "eagle3", _EAGLE3_CARD, _compare_heads(out), HEAD_CHATS)
    draft = out / "draft_model"
    rows = measure(target, draft, CARD_PROBLEMS, methods, *CHAIN_OPTIONS)
    write_card(draft, CARD, _format_results(rows), HEAD_CHATS)


def _format_results(rows: dict[str, dict[str, Any]]) -> str:
    exact, fuzzy = rows["exact"], rows["fsd"]
    settings, names = fuzzy["settings"], ("threshold", "divergence", "min_ratio")
    shown = ", ".join(f"{name} {settings[name]}" for name in names if name in settings)
    shown = shown or settings["method"]
    return (
        f"{describe_measurement(exact['scored'], 'unseen problems')}\n"
        "\n"
        "| decoding | tree | accuracy | tau |\n"
        "|---|---|---|---|\n"
        f"| exact | {describe_tree(exact)} | {exact['accuracy']:.1%} | {exact['tau']:.2f} |\n"
        f"| {shown} | {describe_tree(fuzzy)} | {fuzzy['accuracy']:.1%} | {fuzzy['tau']:.2f} |"
    )


def _compare_heads(out: Path) -> str:
    """Measure tau of exact decoding with both heads; return a Markdown table by tree."""
    heads = {"EAGLE-2": out / "head", "EAGLE-3": out / "eagle3"}
    rows = []
    for tree in TREES:
        total_tokens, depth, top_k = tree
        options = ("--total-tokens", total_tokens, "--depth", depth, "--tree-top-k", top_k)
        rows.append(["/".join(map(str, tree))])
        for head in heads.values():
            found = measure(out / "target", head, COMPARED_PROBLEMS, ("exact",), *options)
            rows[-1].append(f"{found['exact']['tau']:.2f}")
    tokens = [f"{read_record(head)['tokens'] / 1e6:.2f} M" for head in heads.values()]
    return (
        f"Tau of exact decoding on {COMPARED_PROBLEMS} unseen problems, greedy, float32, by tree"
        f" (total_tokens/depth/top_k), {describe_versions()}:\n\n"
        f"{markdown(['tree', *heads], [*rows, ['training tokens', *tokens]])}"
    )


_TARGET_CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---

# eagle-fsd bundled target

A Llama with {parameters} M parameters that answers generated grade-school word problems and some
small talk. It exists so that Fuzzy Speculative Decoding can be tried, tested and measured without
a download, and it knows nothing else.

Trained from scratch by `python -m recipes.bundled --stage target` on chats that
`eagle_fsd/bundled/problems.py` generates (an endless stream; a hash of their text separates the
test questions from it): {steps} steps, {tokens} tokens, {minutes} minutes on {machine}, {date}.
"""

_HEAD_CARD = """---
license: apache-2.0
---

# eagle-fsd bundled draft head

An EAGLE head with {parameters} M parameters for the bundled target, in the layout of published
EAGLE-1/2 heads. Its embedding and output projection are the target's. `fsd.json` holds the settings
that `from_pretrained` uses by default, and how `eagle-fsd calibrate` selected them.

Trained by `python -m recipes.bundled --stage head`, which is `eagle-fsd train` with
its defaults on {chats} generated chats: smooth L1 on the feature, 0.1 times the cross-entropy, the
Jensen-Shannon divergence between target and draft, and uniform noise on the input features; {steps}
steps, {tokens} tokens, {minutes} minutes on {machine}, {date}.
"""

_EAGLE3_CARD = """---
license: apache-2.0
---

# eagle-fsd bundled EAGLE-3 head

An EAGLE-3 head with {parameters} M parameters for the bundled target, in the layout that EAGLE and
SGLang read. It has the norms of EAGLE-3.1 (`fc_norm`, `norm_output`), reads the inputs of the
target's layers 2, 7 and 11, and can draft {settings[draft_vocab_size]} of the target's 1024 tokens.
Its embedding is the target's. It has no settings: decoding is lossless unless a threshold is set.

Trained by `python -m recipes.bundled --stage eagle3` on {chats} generated chats and
the target's stored hidden states: cross-entropy with the target's distribution, {settings[unroll]}
runs over every chat; {steps} steps, {tokens} tokens, {minutes} minutes on {machine}, {date}.
"""


if __name__ == "__main__":
    main()
