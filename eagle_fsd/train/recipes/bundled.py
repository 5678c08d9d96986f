"""The recipe of the pair that ships with the package: ``python -m eagle_fsd.train.recipes.bundled``.

Three stages, each of which can be run alone and goes on where it was stopped: ``target`` trains the
tokenizer and the target, ``head`` the draft head with the trainer everybody uses, and ``card``
measures both on unseen problems and writes the model cards. Between the last two ``eagle-fsd
calibrate --install`` finds the pair's settings; ``make bundled`` does all of it, in some hours on
two cores.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eagle_fsd.bundled import BUNDLED
from eagle_fsd.bundled.problems import problems
from eagle_fsd.bundled.quality import Quality, measure_quality
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.train.config import TrainRecipe
from eagle_fsd.train.recipes.chats import write_chats
from eagle_fsd.train.recipes.target import TargetRecipe, train_target
from eagle_fsd.train.record import RECORD_FILE
from eagle_fsd.train.run import train
from eagle_fsd.train.run_folder import RunFolder
from eagle_fsd.utils.provenance import describe_environment

STAGES = ("target", "head", "card")
CARD_PROBLEMS = 500
#: Chats that the head is trained on, with the trainer's defaults.
HEAD_CHATS = 3000
HEAD_RECIPE = TrainRecipe()

log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Where the finished pair goes.")] = BUNDLED,
    work: Annotated[Path, typer.Option(help="Checkpoints.")] = Path("runs/bundled"),
    stage: Annotated[
        list[str] | None, typer.Option(help="target, head, card; default: all.")
    ] = None,
) -> None:
    """Train the bundled pair from nothing."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stages = stage or list(STAGES)
    if unknown := set(stages) - set(STAGES):
        raise typer.BadParameter(f"unknown stage {', '.join(sorted(unknown))}")
    work.mkdir(parents=True, exist_ok=True)
    if "target" in stages:
        train_target(TargetRecipe(), work / "target", out / "target")
    if "head" in stages:
        train_head(out / "target", work, out / "head")
    if "card" in stages:
        write_cards(out)


def train_head(target: Path, work: Path, out: Path) -> None:
    """Train in ``work`` as anybody would, and put the head into ``out`` in half precision."""
    data = write_chats(work / "chats.jsonl", HEAD_CHATS)
    trained = work / "head"
    train(
        HEAD_RECIPE,
        trained,
        data=data,
        target=target,
        resume=RunFolder.begun(trained),
        listener=lambda metrics: log.info("%s", metrics),
    )
    model = EagleFSD.from_pretrained(target, trained, dtype=torch.float32)
    save_head(model.head, out, dtype=torch.float16)
    shutil.copy(trained / RECORD_FILE, out / RECORD_FILE)
    (out / SETTINGS_FILE).unlink(missing_ok=True)  # it was calibrated for another head


def write_cards(out: Path) -> None:
    """Measure the pair, exactly and with the settings of its ``fsd.json``; write both model cards.

    Raises:
        FileNotFoundError: The head has no ``fsd.json``.
    """
    if not (out / "head" / SETTINGS_FILE).exists():
        raise FileNotFoundError("the head has no fsd.json: eagle-fsd calibrate --install writes it")
    model = EagleFSD.from_pretrained(out / "target", out / "head", dtype=torch.float32)
    unseen = problems("test", CARD_PROBLEMS, seed=0)
    with torch.inference_mode():
        exact = measure_quality(model, unseen, threshold=0.0)
        fuzzy = measure_quality(model, unseen)
    for part, text in (("target", _TARGET_CARD), ("head", _HEAD_CARD)):
        record = json.loads((out / part / RECORD_FILE).read_text())
        card = text.format(
            **record,
            recipe=json.dumps(record["settings"], indent=2),
            parameters=f"{_parameters(model, part) / 1e6:.2f}",
            minutes=f"{record['seconds'] / 60:.0f}",
            chats=HEAD_CHATS,
            measured=_measured(model, exact, fuzzy),
        )
        (out / part / "README.md").write_text(card)


def _parameters(model: EagleFSD, part: str) -> int:
    module = model.model if part == "target" else model.head
    return sum(parameter.numel() for parameter in module.parameters())


def _measured(model: EagleFSD, exact: Quality, fuzzy: Quality) -> str:
    environment = describe_environment()
    tree = model.settings
    shown = ("threshold", "divergence", "min_ratio")
    settings = ", ".join(f"{name} {getattr(tree, name)}" for name in shown)
    rows = [f"| exact | {exact.accuracy:.1%} | {exact.tau:.2f} |"]
    rows.append(f"| {settings} | {fuzzy.accuracy:.1%} | {fuzzy.tau:.2f} |")
    return "\n".join(
        [
            f"Measured on {exact.problems} unseen problems, greedy, float32, tree"
            f" {tree.total_tokens}/{tree.depth}/{tree.top_k} (total_tokens/depth/top_k), on"
            f" {environment['date'][:10]} with {_versions(environment)}:",
            "",
            "| decoding | accuracy | tau |",
            "|---|---|---|",
            *rows,
        ]
    )


def _versions(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))


_TARGET_CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---

# eagle-fsd bundled target

A Llama of {parameters} M parameters that answers generated grade-school word problems and a little
small talk. It exists so that Fuzzy Speculative Decoding can be tried, tested and measured without
a download. It knows nothing else.

Trained from scratch by `python -m eagle_fsd.train.recipes.bundled --stage target` on chats drawn from
`eagle_fsd/bundled/problems.py` (an endless stream; test questions are kept apart from it by a
hash of their text): {steps} steps, {tokens} tokens, {minutes} minutes on {machine}, {date}.

{measured}

Recipe:

```json
{recipe}
```
"""

_HEAD_CARD = """---
license: apache-2.0
---

# eagle-fsd bundled draft head

An EAGLE head of {parameters} M parameters for the bundled target, in the layout EAGLE-1/2 heads are
published in; its embedding and output projection are the target's. `fsd.json` holds the settings
that `from_pretrained` takes up, and how `eagle-fsd calibrate` came by them.

Trained by `python -m eagle_fsd.train.recipes.bundled --stage head`, which is `eagle-fsd train` with its
defaults on {chats} generated chats: smooth-L1 on the feature, 0.1 times the cross-entropy, the JS
divergence between target and draft, uniform noise on the input features; {steps} steps, {tokens}
tokens, {minutes} minutes on {machine}, {date}.

{measured}

Recipe:

```json
{recipe}
```
"""


if __name__ == "__main__":
    app()
