"""Time steps of published model sizes with random weights, under forced acceptance.

::

    python benchmarks/shapes.py --shape qwen2.5-0.5b --dtype bfloat16
    python benchmarks/shapes.py --device cuda --accepted 3
    python benchmarks/shapes.py --growth

Nothing is downloaded: the sizes are those of the published ``config.json`` files. Each shape is
timed with a head that drafts the target's whole vocabulary, and with one that drafts
:data:`DRAFT_VOCAB` tokens. Each step accepts ``--accepted`` drafted tokens, whatever they are, so
speeds say what a head of that quality would gain; no text is produced.

With ``--growth``, context, tree, vocabulary and batch of one shape vary, one at a time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from measurement import (
    QUICK,
    Contender,
    StepTimes,
    Table,
    Timing,
    contenders,
    copy_bandwidth,
    new_parser,
    parse,
    parse_tree,
    random_prompt,
    save_report,
    step_rows,
    time_steps,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.initialization import no_init_weights

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.model.drafters.eagle import EagleHead

#: Size of a reduced draft vocabulary, as in FR-Spec (arXiv 2502.14856).
DRAFT_VOCAB = 32_000
#: Standard deviation of random logits. It makes the most likely token much more likely than the
#: others, as in trained models, so trees are deep.
LOGIT_SPREAD = 30.0


LLAMA = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "rms_norm_eps": 1e-5}
LLAMA_3 = {
    **LLAMA,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
QWEN_3 = {**QWEN, "head_dim": 128, "tie_word_embeddings": False}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def make_config(kind: type[PreTrainedConfig], options: Mapping[str, Any], *sizes: int) -> Any:
    """Create a configuration; the sizes are :data:`SIZES`."""
    return kind(**options, **dict(zip(SIZES, sizes, strict=True)))


#: Configurations by name. The numbers are from the models' ``config.json`` on the Hugging Face Hub:
#: Qwen/Qwen2.5-0.5B and -1.5B, meta-llama/Llama-3.1-8B, lmsys/vicuna-7b-v1.5 and -13b-v1.5,
#: Qwen/Qwen3-8B. ``tiny`` is for ``--quick``.
SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": make_config(LlamaConfig, LLAMA, 512, 32, 64, 4, 2, 2, 16384),
    "small": make_config(LlamaConfig, LLAMA, 8192, 512, 1408, 8, 8, 4, 16384),
    "qwen2.5-0.5b": make_config(Qwen2Config, QWEN, 151936, 896, 4864, 24, 14, 2, 32768),
    "qwen2.5-1.5b": make_config(Qwen2Config, QWEN, 151936, 1536, 8960, 28, 12, 2, 131072),
    "llama-3.1-8b": make_config(LlamaConfig, LLAMA_3, 128256, 4096, 14336, 32, 32, 8, 131072),
    "vicuna-7b": make_config(LlamaConfig, LLAMA, 32000, 4096, 11008, 32, 32, 32, 4096),
    "vicuna-13b": make_config(LlamaConfig, LLAMA, 32000, 5120, 13824, 40, 40, 40, 4096),
    "qwen3-8b": make_config(Qwen3Config, QWEN_3, 151936, 4096, 12288, 36, 32, 8, 40960),
}
CPU_SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b")
GPU_SHAPES = ("llama-3.1-8b", "vicuna-7b", "vicuna-13b", "qwen3-8b")
COLUMNS = {
    "method": "method",
    "tau": "tau",
    "step_ms": "step (ms)",
    "floor_ms": "floor (ms)",
    "over_floor": "step / floor",
    "tokens_per_second": "tokens/s",
    "speedup": "speed, plain = 1",
}
CONTEXT, TREE, VOCABULARY, BATCH = "context", "tree nodes", "vocabulary", "batch"
RANGES: dict[str, tuple[int, ...]] = {
    CONTEXT: (256, 512, 1024, 2048, 4096, 8192),
    TREE: (8, 16, 32, 64, 128),
    VOCABULARY: (1024, 4096, 16384, 65536, 262144),
    BATCH: (1, 2, 4, 8, 16, 32),
}
QUICK_RANGES: dict[str, tuple[int, ...]] = {
    CONTEXT: (16, 32),
    TREE: (8, 16),
    VOCABULARY: (256, 512),
    BATCH: (1, 2),
}


def random_target(
    config: PreTrainedConfig, device: str, dtype: torch.dtype, **changes: Any
) -> PreTrainedModel:
    """Create a target with random weights on a device."""
    config = type(config)(**{**config.to_diff_dict(), **changes})
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    randomize(model)
    return model.eval()


def random_head(model: PreTrainedModel, draft_vocab: int | None = None) -> EagleHead:
    """Create an EAGLE-2 head with random weights on the target's device.

    ``draft_vocab``: Number of tokens that the head drafts; default: all.
    """
    with torch.device(model.device), no_init_weights():
        head = EagleHead(model.config, bias=False, dtype=model.dtype)
    randomize(head)
    if draft_vocab is not None:
        head.ranked_tokens = torch.arange(draft_vocab)
    return head.eval()


@torch.no_grad()
def randomize(module: torch.nn.Module) -> None:
    """Draw weights such that activations stay near 1 and logits spread by :data:`LOGIT_SPREAD`."""
    projection = getattr(module, "lm_head", None)
    for name, weight in module.named_parameters():
        if weight.ndim < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        spread = weight.shape[1] ** -0.5
        if projection is not None and weight is projection.weight:
            spread *= LOGIT_SPREAD
        elif "embed" in name:
            spread = 1.0
        weight.normal_(0.0, spread)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time every shape and head, print the tables and save them."""
    parser = new_parser("Time steps of published model sizes with random weights.")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="default: all of the device's")
    parser.add_argument("--tree", nargs="+", type=parse_tree, help="total_tokens/depth/top_k")
    parser.add_argument("--accepted", type=int, default=3, help="drafted tokens accepted per step")
    parser.add_argument("--context", type=int, help="tokens before the first step")
    parser.add_argument("--rows", type=int, default=1, help="rows in the batch; default: 1")
    parser.add_argument(
        "--growth", action="store_true", help="vary context, tree, vocabulary and batch of a shape"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="with --growth: start no point after these"
    )
    options = parse(parser, arguments)
    if options.growth:
        if len(options.shape or ()) > 1 or len(options.tree or ()) > 1:
            parser.error("--growth takes one --shape and --tree")
        grow(options)
        return
    cpu = options.device == "cpu"
    shapes = options.shape or (CPU_SHAPES if cpu else GPU_SHAPES)
    trees = options.tree or [parse_tree("16/3/4" if cpu else "60/6/10")]
    context = options.context or (256 if cpu else 1024)
    timing, draft_vocab = Timing(), DRAFT_VOCAB
    if options.quick:
        shapes, context, timing, draft_vocab = ("tiny",), 16, QUICK, 128
    bandwidth = copy_bandwidth(torch.device(options.device), options.quick)
    tables, name = [], f"shapes-{str(options.dtype).removeprefix('torch.')}"
    for shape in shapes:
        model = random_target(SHAPES[shape], options.device, options.dtype)
        vocabs = [None, draft_vocab] if draft_vocab < model.config.vocab_size else [None]
        for vocab, tree in itertools.product(vocabs, trees):
            pair = EagleFSD(model, random_head(model, vocab), tree)
            title = f"{shape}, draft vocabulary {pair.drafter.vocab_size}, tree {tree.shape}"
            ways, times = _time(
                options, pair, rows=options.rows, context=context, timing=timing, label=title
            )
            rows = step_rows(ways, times, context, rows=options.rows, bandwidth=bandwidth)
            note = (
                f"{options.accepted} drafted tokens accepted per step, context {context}, batch"
                f" {options.rows}; copy bandwidth {bandwidth / 1e9:.0f} GB/s."
            )
            tables.append(Table(title, COLUMNS, rows, note))
            save_report(options, name, tables, finished=False)
            del pair, ways
        del model
        gc.collect()
        if not cpu:
            torch.cuda.empty_cache()
    save_report(options, name, tables)


def _time(
    options: argparse.Namespace, pair: EagleFSD, rows: int, context: int, timing: Timing, label: str
) -> tuple[list[Contender], dict[str, StepTimes]]:
    pair.compile = options.compile
    ways, ids = contenders(pair), random_prompt(pair, rows, context)
    return ways, time_steps(ways, ids, timing, label=label, accepted=options.accepted)


def grow(options: argparse.Namespace) -> None:
    """Time a shape while one size at a time varies; print and save a table for each."""
    end = time.monotonic() + options.seconds
    (shape,) = options.shape or ["small" if options.device == "cpu" else "llama-3.1-8b"]
    (tree,) = options.tree or [parse_tree("32/4/8")]
    base = {CONTEXT: options.context or 512, TREE: tree.total_tokens, BATCH: options.rows}
    ranges, timing = RANGES, Timing(blocks=6)
    if options.quick:
        shape, base, ranges, timing = "tiny", {**base, CONTEXT: 16, TREE: 8}, QUICK_RANGES, QUICK
    base = {VOCABULARY: SHAPES[shape].vocab_size, **base}
    answer = (options.accepted + 1) * (timing.steps + 1)  # tokens of a timed call
    longest = SHAPES[shape].max_position_embeddings - answer
    ranges = {**ranges, CONTEXT: tuple(size for size in ranges[CONTEXT] if size <= longest)}

    # Ranges take turns, so that a run that is stopped has points of each. The vocabulary comes
    # last, because each of its points needs new models.
    points = [
        (name, values[at])
        for at in range(max(map(len, ranges.values())))
        for name, values in ranges.items()
        if name != VOCABULARY and at < len(values)
    ]
    points += [(VOCABULARY, value) for value in ranges[VOCABULARY]]
    fixed = ", ".join(f"{name} {value}" for name, value in base.items())
    note = f"Milliseconds per step, {shape} shape; unless it varies, {fixed}."
    tables: dict[str, Table] = {}
    model = head = pair = None
    for number, (name, value) in enumerate(points, 1):
        if number > 1 and time.monotonic() > end:
            break
        point = {**base, name: value}
        size = TreeConfig(total_tokens=point[TREE], depth=tree.depth, top_k=tree.top_k)
        if model is None or name == VOCABULARY:
            model = head = pair = None  # free the old models first
            gc.collect()
            changes = {"vocab_size": point[VOCABULARY]}
            model = random_target(SHAPES[shape], options.device, options.dtype, **changes)
            head = random_head(model)
        pair = EagleFSD(model, head, size)
        label = f"point {number} of {len(points)}: {name} {value}"
        times = _time(
            options, pair, rows=point[BATCH], context=point[CONTEXT], timing=timing, label=label
        )[1]  # contenders would keep the models
        row = {name: value, **{way: 1e3 * steps.seconds for way, steps in times.items()}}
        if name not in tables:
            tables[name] = Table(f"Growth with the {name}", {key: key for key in row}, [], note)
        tables[name].rows.append(row)
        save_report(options, "growth", list(tables.values()), finished=False)
    save_report(options, "growth", list(tables.values()))


if __name__ == "__main__":
    main()
