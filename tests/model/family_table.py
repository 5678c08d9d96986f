"""Print the table of docs/targets.md: how every causal-LM type of transformers decodes.

Run ``python tests/model/family_table.py``, which takes a few minutes.
"""

from __future__ import annotations

import datetime
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from families import TYPES, VOCAB_SIZE, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, EagleHead, TreeConfig
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target

#: Lengths of the prompts of a batch; two exceed the windows.
PROMPTS = (20, 2, 37)
NEW_TOKENS = 24
#: Models whose answers have fewer distinct tokens would show little.
MIN_DISTINCT = 5
#: Smallest lead of a token over the second best, in standard deviations of the logits.
MIN_LEAD = 1e-3
TREE = TreeConfig(total_tokens=16, depth=4, top_k=3)
CHAIN = TreeConfig(total_tokens=7, depth=5, top_k=1)
HEADER = ("type", "decoding", "layers", "EAGLE head", "why not")


class Row(NamedTuple):
    """A row of the table."""

    type: str
    decoding: str
    layers: str
    head: str
    reason: str


def check(model_type: str) -> Row:
    """Decode with a tiny model of a type, with plain passes, trees, chains and an untrained head.

    Decoding is ``identical``, ``refused`` (a ``ValueError``), or ``not built`` if transformers
    cannot create a model. ``AssertionError`` is raised where a token differs from the output
    of Hugging Face's ``generate``.
    """
    try:
        model = tiny_model(model_type)
    except Exception as error:  # whatever transformers raises
        return Row(model_type, "not built", "", "", f"{type(error).__name__}: {_reason(error)}")
    head = build_head(model)
    try:
        EagleFSD(model, None).generate(torch.ones(1, 1).long(), max_new_tokens=1, method="ar")
    except ValueError as error:
        return Row(model_type, "refused", "", "", _reason(error))
    model, expected = telling_model(model_type)
    plain = EagleFSD(model, None)
    ids, mask = batch()
    out = plain.generate(ids, mask, max_new_tokens=NEW_TOKENS, method="ar")
    assert torch.equal(_new(out.sequences), expected), "plain decoding differs"
    check_trees(model, expected)
    layers = ", ".join(sorted(kind.split("_")[0] for kind in plain.target.attention_types))
    if head is None:
        return Row(model_type, "identical", layers, "no", "")
    check_projection(plain.target)
    out = EagleFSD(model, head, TREE).generate(ids, mask, max_new_tokens=NEW_TOKENS // 3)
    assert torch.equal(_new(out.sequences), expected[:, : NEW_TOKENS // 3]), "a head changes tokens"
    return Row(model_type, "identical", layers, "yes", "")


def build_head(model: PreTrainedModel) -> EagleHead | None:
    """Return an untrained head, or None if the family's layers or its logits do not allow one."""
    try:
        head = EagleHead(model.config.get_text_config(decoder=True))
        check_target(Target(model))
    except ValueError:
        return None
    return head


def check_trees(model: PreTrainedModel, expected: Tensor) -> None:
    """Compare decoding with trees and with chains of which most tokens are accepted.

    The drafter has learned the answers, and others that differ from them in every third token.
    """
    ids, mask = batch()
    for tree in (TREE, CHAIN):
        drafter = AdaptiveNGramDrafter(order=NEW_TOKENS)
        pair = EagleFSD(model, drafter, tree)
        for given, answer in zip(prompts(), expected.tolist(), strict=True):
            wrong = [(token + (place % 3 == 2)) % VOCAB_SIZE for place, token in enumerate(answer)]
            for sequence in (wrong, answer, answer):
                row = drafter.new_row()
                for token in (*given[0].tolist(), *sequence):
                    row.append(token)
        out = pair.generate(ids, mask, NEW_TOKENS)
        assert torch.equal(_new(out.sequences), expected), f"{tree} differs"
        assert out.stats.tau > 3


def check_projection(target: Target) -> None:
    """Compare the logits that heads are trained and compared with to the model's own."""
    ids = batch()[0][:1, -20:]
    with torch.inference_mode():
        logits = target.project(target.prefill(ids, 0, target.new_cache(1, 20)))
        torch.testing.assert_close(logits, target.model(ids).logits, atol=2e-3, rtol=2e-3)


def telling_model(model_type: str) -> tuple[PreTrainedModel, Tensor]:
    """Find a model whose answers ``[B, NEW_TOKENS]`` vary, without close calls."""
    for seed in range(50):
        model = tiny_model(model_type, seed)
        answers, leads = zip(*map(partial(greedy, model), prompts()), strict=True)
        distinct = min(answer.unique().numel() for answer in answers)
        if distinct >= MIN_DISTINCT and min(leads) >= MIN_LEAD:
            return model, torch.cat(answers)
    raise AssertionError("every model's answers are repetitive or close calls")


def greedy(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, float]:
    """Return Hugging Face's answer ``[1, NEW_TOKENS]`` to ``[1, S]``, and its smallest lead.

    The lead of the best token over the second best is relative to the spread of the logits.
    """
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    best, second = logits.topk(2).values.T
    return out.sequences[:, ids.shape[1] :], float(((best - second) / logits.std(1)).min())


def prompts() -> list[Tensor]:
    """Return random prompts of ``[1, S]`` without token 0, which pads them in :func:`batch`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB_SIZE, (1, size), generator=generator) for size in PROMPTS]


def batch() -> tuple[Tensor, Tensor]:
    """Return the prompts padded on the left, and their attention mask."""
    ids = torch.cat([F.pad(ids, (max(PROMPTS) - ids.shape[1], 0)) for ids in prompts()])
    return ids, (ids > 0).long()


def _new(sequences: Tensor) -> Tensor:
    """Return the answers to :func:`batch`."""
    return sequences[:, max(PROMPTS) :]


def _reason(error: Exception) -> str:
    """Return the reason that an error states, without names and details."""
    text = str(error).strip().splitlines()[0].partition(". ")[0]
    for opening in (" is not supported: ", ", but "):
        text = text.partition(opening)[2] or text
    return text.partition(" (")[0].partition(", so ")[0]


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    counts = Counter(row.decoding for row in rows)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}"
    yield f"{len(rows)} types: {summary} ({made_with}, {datetime.date.today().isoformat()})."
    yield ""
    yield f"| {' | '.join(HEADER)} |"
    yield f"|{'---|' * len(HEADER)}"
    for row in rows:
        yield f"| `{row.type}` | {' | '.join(row[1:])} |"


def main() -> None:
    """Check every type and print the table; fail at a type that decodes differently."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for index, model_type in enumerate(TYPES):
        sys.stderr.write(f"{index + 1}/{len(TYPES)} {model_type}\n")
        rows.append(check(model_type))
    sys.stdout.writelines(f"{line}\n" for line in table(rows))


if __name__ == "__main__":
    main()
