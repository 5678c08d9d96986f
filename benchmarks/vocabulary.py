"""Time verification and the head's read-out over a large vocabulary against the target's pass.

::

    python benchmarks/vocabulary.py
    python benchmarks/vocabulary.py --threads 2 --dtype bfloat16

The target has random weights and the shape of Llama with 0.5 billion parameters and 128,256 tokens;
the tree is EAGLE-2's of 60 nodes. What is compared runs in turn; the best of several times counts.

The read-out of a level of the tree gives the distributions of ten nodes. A head keeps their
log-probabilities; the other possibility is to keep the logits and one normalizer per node.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from measurement import Table, new_parser, parse, progress, save_report, synchronize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd import SamplingConfig, TreeConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.random_numbers import RandomNumbers
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree, TreeBuilder
from eagle_fsd.model.verify import AcceptanceRule, verify
from eagle_fsd.model.vocabulary import Distributions

TREE = TreeConfig(total_tokens=60, depth=6, top_k=10)
TEMPERATURE = SamplingConfig(temperature=0.7)
#: Standard deviation of random logits.
SPREAD = 2.5
COLUMNS = {"what": "verification", "ms": "time (ms)", "share": "above exact, part of the pass"}
READ_OUT_COLUMNS = {"what": "read-out", "ms": "time (ms)"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time verification, print the table and save it."""
    parser = new_parser("Time verification over a large vocabulary.", compiles=False)
    options = parse(parser, arguments)
    size, layers, repeats = (1024, 1, 2) if options.quick else (128_256, 24, 7)
    target = _target(size, layers).to(options.device, options.dtype)
    tree = _tree(size, options.device)
    logits = SPREAD * torch.randn(1, tree.size, size, device=options.device)
    hidden = torch.randn(1, TREE.top_k, target.config.hidden_size).to(target.lm_head.weight)
    level = logits[:, : TREE.top_k]

    def verification(rule: AcceptanceRule, sampling: SamplingConfig) -> Callable[[], object]:
        sampler, random = Sampler(sampling), RandomNumbers.seeded(0, 1).to(options.device)
        return lambda: verify(sampler(tree, logits, random), rule)

    exact, greedy = ExactRule(), SamplingConfig()
    cases: dict[str, Callable[[], object]] = {
        "target's pass": lambda: target(tree.tokens),
        "exact, greedy": verification(exact, greedy),
        **{
            f"FSD, {name}": verification(FuzzyRule(0.1, name), greedy)
            for name in ("js", "kl", "tv", "top_k_js", "top_p_js")
        },
        "exact, temperature": verification(exact, TEMPERATURE),
        "exact, top-p": verification(exact, TEMPERATURE.updated(top_p=0.9)),
        "exact, top-k": verification(exact, TEMPERATURE.updated(top_k=50)),
        "exact, top-k and top-p": verification(exact, TEMPERATURE.updated(top_k=50, top_p=0.9)),
    }
    read_out: dict[str, Callable[[], object]] = {
        "output projection": lambda: target.lm_head(hidden),
        "log-probabilities": lambda: level.log_softmax(-1),
        "normalizers": lambda: Distributions.of(level),
    }
    best, read = (dict.fromkeys(part, float("inf")) for part in (cases, read_out))
    with torch.inference_mode():
        for _ in progress(range(repeats), "repeats"):
            for part, times in ((cases, best), (read_out, read)):
                for name, run in part.items():
                    synchronize()
                    start = time.perf_counter()
                    run()
                    synchronize()
                    times[name] = min(times[name], time.perf_counter() - start)
            _save(options, tree, size, best, read, finished=False)
    _save(options, tree, size, best, read)


def _save(
    options: argparse.Namespace,
    tree: DraftTree,
    size: int,
    best: Mapping[str, float],
    read: Mapping[str, float],
    finished: bool = True,
) -> None:
    """Save the results so far: seconds of verification and of the read-out."""
    whole, base = list(best.values())[:2]
    rows = [
        {
            "what": name,
            "ms": 1e3 * seconds,
            "share": "" if number < 2 else f"{(seconds - base) / whole:.1%}",
        }
        for number, (name, seconds) in enumerate(best.items())
    ]
    note = f"{size:,} tokens, {tree.size} nodes, {int(tree.has_children().sum())} of them inner."
    name = f"vocabulary-{str(options.dtype).removeprefix('torch.')}"
    tables = [
        Table("Verification", COLUMNS, rows, note),
        Table(
            "Read-out of one level",
            READ_OUT_COLUMNS,
            [{"what": part, "ms": 1e3 * seconds} for part, seconds in read.items()],
            f"{size:,} tokens, {TREE.top_k} nodes.",
        ),
    ]
    save_report(options, name, tables, finished=finished)


def _target(vocab_size: int, layers: int) -> LlamaForCausalLM:
    """Create a model of Qwen2.5-0.5B's shape with another vocabulary."""
    config = LlamaConfig(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _tree(vocab_size: int, device: str) -> DraftTree:
    """Grow EAGLE-2's tree over a draft with random distributions."""

    def log_probs(*shape: int) -> Tensor:
        return (SPREAD * torch.randn(*shape, vocab_size, device=device)).log_softmax(-1)

    builder = TreeBuilder(TREE, vocab_size, device)
    builder.start(log_probs(1))
    for _ in range(TREE.depth):
        builder.choose()
        builder.extend(log_probs(1, TREE.top_k))
    return builder.finish(torch.zeros(1, dtype=torch.long, device=device))


if __name__ == "__main__":
    main()
