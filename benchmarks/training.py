"""Time a training step of heads of SmolLM2's shape on a CPU against its floor.

::

    python benchmarks/training.py

Target and heads have random weights, which cost as much as others. The features are stored, as with
``train --store-features``: a step is the head's forward and backward passes and the losses. Its
floor is the number of its multiplications over the rate of a large matrix product. The memory is
that of the process during the steps of a head, and includes the target's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from measurement import Table, new_parser, parse, progress, save_report
from shapes import make_config
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.evaluation.memory import PeakMemory
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import TrainConfig
from eagle_fsd.train.heads import new_head
from eagle_fsd.train.losses import HeadLosses

#: Name, options, and whether the target's most likely tokens are stored with the features.
CASES = (
    ("EAGLE-2", {}, False),
    ("EAGLE-2, 8,192 tokens", {"draft_vocab_size": 8192}, False),
    ("EAGLE-2, 8,192 tokens, stored", {"draft_vocab_size": 8192}, True),
    ("EAGLE-3, 8,192 tokens, stored", {"draft_vocab_size": 8192, "head_type": "eagle3"}, True),
)
COLUMNS = {
    "head": "head",
    "rate": "tokens/s",
    "ms": "ms per token",
    "floor": "floor (ms per token)",
    "ratio": "times the floor",
    "memory": "peak memory (MiB)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the steps, print the table and save it."""
    parser = new_parser("Time a training step.", compiles=False)
    options = parse(parser, arguments, device="cpu", dtype="float32")
    scale = 8 if options.quick else 1
    config = make_config(
        LlamaConfig,
        {"head_dim": 64 // scale, "tie_word_embeddings": True},
        *(size // scale for size in (49_152, 576, 1536)),
        *(7, 9, 3, 2048),  # an EAGLE-3 head reads three of seven layers
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    target, tokens = Target(model.eval()), 512 // scale
    speed = _multiplications_per_second(target, tokens)
    memory, rows = PeakMemory(target.device), []
    for name, given, stored in progress(CASES, "heads"):
        given = {**given, "unroll": 3 if "head_type" in given else 1}
        if "draft_vocab_size" in given:
            given["draft_vocab_size"] //= scale
        settings = TrainConfig.from_dict(given)
        memory.start()
        seconds, count = _step(target, settings, tokens, stored)
        peak = memory.read()
        floor = count / speed
        rows.append(
            {
                "head": f"{name}, {settings.unroll} runs" if settings.unroll > 1 else name,
                "rate": 1 / seconds,
                "ms": 1e3 * seconds,
                "floor": 1e3 * floor,
                "ratio": seconds / floor,
                "memory": None if peak is None else peak / 2**20,
            }
        )
        note = f"{tokens} tokens per step, processor time; {speed / 1e9:.0f} G multiplications/s."
        table = Table("Training steps", COLUMNS, rows, note)
        save_report(options, "training", [table], finished=len(rows) == len(CASES))


def _step(target: Target, config: TrainConfig, tokens: int, stored: bool) -> tuple[float, float]:
    """Return the seconds of processor time and the multiplications of a step, per token."""
    size, vocab = config.draft_vocab_size, target.vocab_size
    ids = None if size is None else torch.arange(size)
    head = new_head(config, target, ids).float().train().requires_grad_(True)
    losses = HeadLosses(head, config)
    device, hidden = target.device, target.hidden_size
    features = torch.randn(1, tokens, head.feature_size, device=device)
    labels = torch.randn(1, tokens, hidden, device=device)
    read = torch.randint(head.vocab_size, (1, tokens), device=device)
    mask = torch.ones(1, tokens, dtype=torch.bool, device=device)
    best = read if stored else None  # all of them are tokens of the head
    spent = []
    for _ in range(3):
        start = time.process_time()
        losses(features, read, labels, loss_mask=mask, best=best)["loss"].backward()
        spent.append(time.process_time() - start)
    # The passes of the head, forward and twice backward, and of the output projections.
    projections = [item for name, item in head.named_parameters() if name.startswith("lm_head")]
    layers = _matrix_elements(head) - sum(item.numel() for item in projections)
    output = head.vocab_size * hidden
    drafts = config.unroll * (3 if projections else 2) * output
    targets = output + (vocab * hidden if size is not None and not stored else 0)
    return min(spent) / tokens, 3.0 * config.unroll * layers + drafts + targets


def _matrix_elements(module: nn.Module) -> int:
    return sum(item.numel() for item in module.parameters() if item.ndim == 2)


def _multiplications_per_second(target: Target, rows: int) -> float:
    """Measure the rate of a large matrix product."""
    weight = target.lm_head.weight.detach()
    x: Tensor = torch.randn(rows, weight.shape[1], device=target.device)
    spent = []
    for _ in range(5):
        start = time.process_time()
        F.linear(x, weight)
        spent.append(time.process_time() - start)
    return rows * weight.numel() / max(1e-9, min(spent))


if __name__ == "__main__":
    main()
