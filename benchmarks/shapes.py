"""Time steps of published model sizes with random weights, under forced acceptance.

::

    python benchmarks/shapes.py --shape qwen2.5-0.5b --dtype bfloat16
    python benchmarks/shapes.py --device cuda --accepted 3

Nothing is downloaded: the sizes are those of the published ``config.json`` files. Each shape is
timed with a head that drafts the target's whole vocabulary and, if that is larger, with one that
drafts :data:`DRAFT_VOCAB` tokens. Each step accepts ``--accepted`` drafted tokens, whatever they
are, so speeds say what a head of that quality would gain; no text is produced.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from measurement import (
    QUICK,
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

from eagle_fsd import EagleFSD
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


#: Configurations by name. The sizes are from the models' ``config.json`` on the Hugging Face Hub:
#: Qwen/Qwen2.5-0.5B and -1.5B, meta-llama/Llama-3.1-8B, lmsys/vicuna-7b-v1.5 and -13b-v1.5,
#: Qwen/Qwen3-8B. ``tiny`` is for ``--quick``.
SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": make_config(LlamaConfig, LLAMA, 512, 32, 64, 4, 2, 2, 16384),
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


def random_target(config: PreTrainedConfig, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Create a target with random weights on a device."""
    config = copy.deepcopy(config)
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
    """Draw weights such that the logits of a target spread by :data:`LOGIT_SPREAD`."""
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
    tables, name = [], f"shapes-{str(options.dtype).removeprefix('torch.')}"
    for shape in shapes:
        model = random_target(SHAPES[shape], options.device, options.dtype)
        vocabs = [None, draft_vocab] if draft_vocab < model.config.vocab_size else [None]
        for vocab, tree in itertools.product(vocabs, trees):
            pair = EagleFSD(model, random_head(model, vocab), tree)
            pair.compile = options.compile
            title = f"{shape}, draft vocabulary {pair.drafter.vocab_size}, tree {tree.shape}"
            ways, ids = contenders(pair), random_prompt(pair, options.rows, context)
            times = time_steps(ways, ids, timing, label=title, accepted=options.accepted)
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


if __name__ == "__main__":
    main()
