"""Time steps of published model sizes with random weights, under forced acceptance.

::

    python benchmarks/shapes.py --shape qwen2.5-0.5b --dtype bfloat16
    python benchmarks/shapes.py --device cuda --accepted 3

Nothing is downloaded: the sizes are those of the published ``config.json`` files. Each shape is
timed with a head that drafts the target's whole vocabulary, and with one that drafts
:data:`DRAFT_VOCAB` tokens. Each step accepts ``--accepted`` drafted tokens, whatever they are, so
speeds say what a head of that quality would gain; no text is produced.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from measurement import (
    FSD,
    PLAIN,
    QUICK,
    Table,
    Timing,
    contenders,
    copy_bandwidth,
    new_figure,
    new_parser,
    parse,
    parse_tree,
    random_prompt,
    save_report,
    step_row,
    time_steps,
    tree_name,
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

from eagle_fsd import EagleFSD
from eagle_fsd.model.drafters.eagle import EagleHead

#: Size of a reduced draft vocabulary, as in FR-Spec (arXiv 2502.14856).
DRAFT_VOCAB = 32_000
#: Standard deviation of random logits. It makes the most likely token much more likely than the
#: others, as in trained models, so that trees are deep.
LOGIT_SPREAD = 30.0


def _llama(**sizes: Any) -> LlamaConfig:
    sizes = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, **sizes}
    return LlamaConfig(rms_norm_eps=1e-5, **sizes)


#: Configurations by name. The numbers are from the models' ``config.json`` on the Hugging Face Hub:
#: Qwen/Qwen2.5-0.5B and -1.5B, meta-llama/Llama-3.1-8B, lmsys/vicuna-7b-v1.5 and -13b-v1.5,
#: Qwen/Qwen3-8B. ``tiny`` is for ``--quick``.
SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": _llama(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=16384,
    ),
    "small": _llama(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "vicuna-7b": _llama(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
    ),
    "vicuna-13b": _llama(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        max_position_embeddings=4096,
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    ),
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
    options = parse(parser, arguments)
    cpu = options.device == "cpu"
    shapes = options.shape or (CPU_SHAPES if cpu else GPU_SHAPES)
    trees = options.tree or [parse_tree("16/3/4" if cpu else "60/6/10")]
    context = options.context or (256 if cpu else 1024)
    timing, draft_vocab = Timing(), DRAFT_VOCAB
    if options.quick:
        shapes, context, timing, draft_vocab = ("tiny",), 16, QUICK, 128
    bandwidth = copy_bandwidth(torch.device(options.device), options.quick)
    tables = []
    for shape in shapes:
        model = random_target(SHAPES[shape], options.device, options.dtype)
        vocabs = [None, draft_vocab] if draft_vocab < model.config.vocab_size else [None]
        for vocab, tree in itertools.product(vocabs, trees):
            pair = EagleFSD(model, random_head(model, vocab), tree)
            pair.compile = options.compile
            ways = contenders(pair)
            ids = random_prompt(pair, options.rows, context)
            drafted = pair.drafter.vocab_size
            title = f"{shape}, draft vocabulary {drafted}, tree {tree_name(tree)}"
            times = time_steps(ways, ids, timing, title, options.accepted)
            rows = [
                step_row(way, times[way.name], times[PLAIN], context, options.rows, bandwidth)
                for way in ways
            ]
            note = (
                f"{options.accepted} drafted tokens accepted per step, context {context}, batch"
                f" {options.rows}; copy bandwidth {bandwidth / 1e9:.0f} GB/s."
            )
            tables.append(Table(title, COLUMNS, rows, note))
            _save(options, tables, finished=False)
            del pair, ways
        del model
        gc.collect()
        if not cpu:
            torch.cuda.empty_cache()
    _save(options, tables)


def _save(options: argparse.Namespace, tables: Sequence[Table], finished: bool = True) -> None:
    """Save the results so far."""
    figure, (axis,) = new_figure()
    best = [(table.title, row) for table in tables for row in table.rows if row["method"] == FSD]
    axis.barh([title for title, _ in best], [row["speedup"] for _, row in best])
    axis.axvline(1.0, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.set_xlabel(f"FSD's speed with {options.accepted} accepted tokens per step, plain = 1")
    name = f"shapes-{str(options.dtype).removeprefix('torch.')}"
    save_report(options, name, tables, figure, finished)


if __name__ == "__main__":
    main()
