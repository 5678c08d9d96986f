"""Time parts of a step: verification, the head's read-out, attention, and packed weights.

::

    python benchmarks/operations.py
    python benchmarks/operations.py --threads 2 --dtype bfloat16

The target is a Llama of Qwen2.5-0.5B's shape with random weights and Llama 3's 128,256 tokens; the
tree is EAGLE-2's of 60 nodes. What is compared runs in turn; the best of several times counts.

The read-out of a level of the tree gives the distributions of ten nodes. A head keeps their
log-probabilities; the other possibility is to keep the logits and one normalizer per node.

For attention, one layer of 32 query heads and 8 key heads of size 64 attends from the nodes to a
context of 1,024 to 8,192 tokens, with the query groups folded and as transformers does it.

On an x86 CPU in float32 or bfloat16, a few tokens are multiplied by weights of SmolLM2-135M and of
Llama with 1 billion parameters, as torch does it and by packed copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from measurement import Table, best_times, new_parser, parse, progress, save_report
from shapes import make_config
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle_fsd import SamplingConfig, TreeConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.attention import fold_mask, tree_attention
from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.packed_weights import MINIMA, SUPPORTED, linear
from eagle_fsd.model.random_numbers import RandomNumbers, seed_keys
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree, TreeBuilder
from eagle_fsd.model.verify import AcceptanceRule, verify
from eagle_fsd.model.vocabulary import Distributions

TREE = TreeConfig(total_tokens=60, depth=6, top_k=10)
TEMPERATURE = SamplingConfig(temperature=0.7)
HEADS, KEY_HEADS, SIZE = 32, 8, 64
#: Standard deviation of random logits.
SPREAD = 2.5
COLUMNS = {"what": "verification", "ms": "time (ms)", "share": "above exact, part of the pass"}
READ_OUT_COLUMNS = {"what": "read-out", "ms": "time (ms)"}
ATTENTION_COLUMNS = {
    "context": "context",
    "stock_ms": "transformers (ms)",
    "folded_ms": "folded (ms)",
    "ratio": "ratio",
    "difference": "largest difference",
}
#: Outputs and inputs of the weights, and numbers of tokens.
WEIGHTS = ((49_152, 576), (1536, 576), (576, 1536), (8192, 2048), (2048, 8192), (2048, 2048))
TOKENS = (1, 4, 16, 64)
#: Values of all copies of a weight, more than most processors' caches hold.
COPIED_VALUES = 2**26
PACKED_COLUMNS = {
    "weight": "weight",
    "tokens": "tokens",
    "torch_ms": "torch (ms)",
    "packed_ms": "packed (ms)",
    "ratio": "ratio",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the operations, print the tables and save them."""
    options = parse(new_parser("Time parts of a step.", compiles=False), arguments)
    size, layers, repeats = (1024, 1, 2) if options.quick else (128_256, 24, 7)
    contexts = (64, 128) if options.quick else (1024, 2048, 4096, 8192)
    name = f"operations-{str(options.dtype).removeprefix('torch.')}"
    tables: list[Table] = []
    with torch.inference_mode():
        tables += time_vocabulary(options, size, layers, repeats)
        save_report(options, name, tables, finished=False)
        note = f"One layer, {HEADS} query heads, {KEY_HEADS} key heads of size {SIZE}, 60 nodes."
        tables.append(Table("Attention over a draft tree", ATTENTION_COLUMNS, [], note))
        for context in progress(contexts, "contexts"):
            tables[-1].rows.append(time_attention(options, context, 3 * repeats))
            save_report(options, name, tables, finished=False)
    if SUPPORTED and options.device == "cpu" and options.dtype in MINIMA:
        # Weights that are made in inference mode have no version, and are not packed.
        note = "One weight after the other, of copies that fit no cache."
        tables.append(Table("Packed weights", PACKED_COLUMNS, [], note))
        for shape in progress(WEIGHTS[1:2] if options.quick else WEIGHTS, "weights"):
            tables[-1].rows += time_weights(shape, options.dtype, repeats)
            save_report(options, name, tables, finished=False)
    save_report(options, name, tables)


def time_vocabulary(
    options: argparse.Namespace, size: int, layers: int, repeats: int
) -> tuple[Table, Table]:
    """Time verification, relative to the target's pass, and the read-out of a level."""
    tied = {"tie_word_embeddings": True}
    config = make_config(LlamaConfig, tied, size, 896, 4864, layers, 14, 2, 2048)
    target = LlamaForCausalLM(config).eval().to(options.device, options.dtype)
    tree = _tree(size, options.device)
    logits = SPREAD * torch.randn(1, tree.size, size, device=options.device)
    hidden = torch.randn(1, TREE.top_k, target.config.hidden_size).to(target.lm_head.weight)
    level = logits[:, : TREE.top_k]

    def verification(rule: AcceptanceRule, sampling: SamplingConfig) -> Callable[[], object]:
        sampler, keys = Sampler(sampling), seed_keys(0, 1).to(options.device)
        random = RandomNumbers(keys, torch.zeros_like(keys))
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
    best = best_times(cases, repeats)
    read = best_times(read_out, repeats)
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
    read_rows = [{"what": part, "ms": 1e3 * seconds} for part, seconds in read.items()]
    read_note = f"{size:,} tokens, {TREE.top_k} nodes."
    return (
        Table("Verification", COLUMNS, rows, note),
        Table("Read-out of one level", READ_OUT_COLUMNS, read_rows, read_note),
    )


def time_attention(options: argparse.Namespace, context: int, repeats: int) -> dict[str, Any]:
    """Time attention over a tree with the same masks in both ways; return a row."""
    layer, groups = nn.Module(), HEADS // KEY_HEADS
    layer.num_key_value_groups = groups
    place = {"device": options.device, "dtype": options.dtype}
    query = torch.randn(1, TREE.total_tokens, HEADS, SIZE, **place).transpose(1, 2)
    # A cache stores the heads of a token together.
    key, value = torch.randn(2, 1, context, KEY_HEADS, SIZE, **place).transpose(2, 3)
    allowed = torch.rand(1, TREE.total_tokens, context, device=options.device) < 0.7
    mask = additive_mask(allowed, options.dtype)
    folded = fold_mask(mask, groups)
    ways: dict[str, Callable[[], Tensor]] = {
        "stock": lambda: sdpa_attention_forward(layer, query, key, value, mask)[0],
        "folded": lambda: tree_attention(layer, query, key, value, attention_mask=folded)[0],
    }
    best = best_times(ways, repeats)
    difference = float((ways["stock"]() - ways["folded"]()).abs().max())
    return {
        "context": context,
        **{f"{way}_ms": 1e3 * seconds for way, seconds in best.items()},
        "ratio": best["stock"] / best["folded"],
        "difference": f"{difference:.1e}",
    }


@torch.no_grad()
def time_weights(shape: tuple[int, int], dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """Time the multiplication of a few tokens by a weight; return a row for each number."""
    count = max(1, COPIED_VALUES // (shape[0] * shape[1]))
    weights = [torch.randn(shape, dtype=dtype) for _ in range(count)]
    rows = []
    for tokens in TOKENS:
        x = torch.randn(1, tokens, shape[1], dtype=dtype)
        ways: dict[str, Callable[[], object]] = {
            "torch": lambda x=x: [F.linear(x, weight) for weight in weights],
            "packed": lambda x=x: [linear(x, weight) for weight in weights],
        }
        best = best_times(ways, repeats)
        row = {f"{way}_ms": 1e3 * seconds / count for way, seconds in best.items()}
        ratio = best["torch"] / best["packed"]
        name = f"{shape[1]:,} to {shape[0]:,}"
        rows.append({"weight": name, "tokens": tokens, **row, "ratio": ratio})
    return rows


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
