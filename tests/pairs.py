"""Tiny seeded targets and draft heads, prompts, reference answers and rules shared by the tests.

The models are randomly initialized and float32; nothing is read from files or from the Hub.

There are two kinds of pairs. :func:`random_pair` is a random target with an untrained head: at
``T = 0`` almost no drafted token is accepted, at a large ``T`` every one is. :func:`aligned_pair`
is constructed so that the head is right most of the time without any training, for tests in which
acceptance matters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from eagle_fsd import EagleFSD, EagleHead, GenerateOutput, TreeConfig
from eagle_fsd.model import compilation
from eagle_fsd.model.acceptance import FuzzyRule
from eagle_fsd.model.batch import Batch
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import VerificationInputs

#: Every device that this machine can test on.
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

VOCAB_SIZE = 96
#: A threshold above every divergence of these pairs: all drafted tokens are accepted.
ACCEPT_ALL = 10.0
#: Length of the answers of :func:`reference`.
NEW_TOKENS = 24
MODEL_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-grouped-llama3-rope": lambda: LlamaConfig(**MODEL_SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope-tied": lambda: LlamaConfig(
        **{**MODEL_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1},
        rope_parameters=LINEAR_ROPE,
        tie_word_embeddings=True,
        head_dim=16,
    ),
    "qwen2": lambda: Qwen2Config(**MODEL_SIZES),
    "qwen3": lambda: Qwen3Config(**MODEL_SIZES, head_dim=16),
    "mistral-no-window": lambda: MistralConfig(**MODEL_SIZES, sliding_window=None),
    "mistral-wide-window": lambda: MistralConfig(**MODEL_SIZES, sliding_window=128),
}
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
#: The architecture of tests that are not about architectures.
DEFAULT_ARCHITECTURE = "llama-grouped-llama3-rope"
#: With these seeds greedy decoding of the test prompts never falls into repeating one token.
SEEDS = {**dict.fromkeys(ARCHITECTURES, 3), "qwen3": 1}


def tiny_target(
    architecture: str = DEFAULT_ARCHITECTURE,
    seed: int | None = None,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """Create a random target. Biases and norms are random too, and all parameters are large enough
    for greedy output to vary instead of repeating one token."""
    config = ARCHITECTURES[architecture]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize(model, SEEDS[architecture] if seed is None else seed)
    return model.to(dtype).eval()


def small_vocabulary_config(vocab_size: int, **changes: Any) -> LlamaConfig:
    """Configure two layers over so few tokens that the law of a few of them can be enumerated."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**{**sizes, **changes})


def untrained_head(model: PreTrainedModel, seed: int = 7, bias: bool = True) -> EagleHead:
    """Create a random head of the target's family that is not attached to the target yet."""
    head = EagleHead(model.config, bias=bias)
    randomize(head, seed)
    return head.to(model.dtype).eval()


@lru_cache
def random_pair(architecture: str = DEFAULT_ARCHITECTURE, device: str = "cpu") -> EagleFSD:
    """Return the :func:`new_random_pair` shared by all tests that only decode with it."""
    return new_random_pair(architecture, device)


def new_random_pair(
    architecture: str = DEFAULT_ARCHITECTURE, device: str = "cpu", **tree: int
) -> EagleFSD:
    """Create a random target with an untrained head."""
    model = tiny_target(architecture).to(device)
    return EagleFSD(model, untrained_head(model), small_tree(**tree))


def small_tree(**changes: int) -> TreeConfig:
    """Return a tree that is cheap to draft, with ``changes`` applied."""
    return TreeConfig(**{"total_tokens": 12, "depth": 3, "top_k": 3, **changes})


@lru_cache
def aligned_pair(
    architecture: str = DEFAULT_ARCHITECTURE, cycle: int = VOCAB_SIZE, context: float = 0.08
) -> EagleFSD:
    """Return an :func:`aligned_target` and a head to match.

    The head, a copy of the first layer fed mostly with the embedding, is a good guess but not a
    perfect one.
    """
    model = aligned_target(architecture, cycle, context)
    size = model.config.hidden_size
    head = EagleHead(model.config, bias=False)
    randomize(head, 7)
    layers = model.base_model.layers
    first = {name: item for name, item in layers[0].state_dict().items() if "attn" not in name}
    del first["input_layernorm.weight"]
    head.layers[0].load_state_dict(first, strict=False)
    with torch.no_grad():
        head.fc.weight.mul_(context / 2)
        head.fc.weight[:, :size] = torch.eye(size)
        head.layers[0].self_attn.o_proj.weight.mul_(context)
    return EagleFSD(model, head, small_tree())


def aligned_target(
    architecture: str = DEFAULT_ARCHITECTURE,
    cycle: int = VOCAB_SIZE,
    context: float = 0.08,
    **changes: Any,
) -> PreTrainedModel:
    """Create a target whose next token depends mostly on the current one.

    The attention is scaled by ``context`` and the layers above the first do nothing else. The
    output projection maps every token to its successor in a cycle of ``cycle`` tokens: a long cycle
    gives varied output, a short one repetitive output.
    """
    model = tiny_target(architecture, tie_word_embeddings=False, **changes)
    base, size = model.base_model, model.config.hidden_size
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        base.norm.weight.fill_(1.0)
        for layer in base.layers[1:]:
            layer.mlp.down_proj.weight.zero_()
        for layer in base.layers:
            layer.self_attn.o_proj.weight.zero_()
        tokens = torch.arange(model.config.vocab_size)
        features = base(input_ids=tokens[:, None]).last_hidden_state[:, 0]
        order = torch.randperm(len(tokens), generator=generator).view(-1, cycle)
        successors = order.roll(-1, dims=1)
        model.lm_head.weight[successors.flatten()] = 6.0 * features[order.flatten()] / size
        for layer in base.layers:
            noise = torch.randn(layer.self_attn.o_proj.weight.shape, generator=generator)
            layer.self_attn.o_proj.weight.copy_(context * noise)
    return model


def randomize(module: torch.nn.Module, seed: int) -> None:
    """Draw every parameter of ``module`` anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1.0 + 0.2 * noise
            elif "embed_tokens" not in name:
                noise = 0.3 * noise
            parameter.copy_(noise)


def prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Return ``[1, length]`` random ids without 0, the padding of :func:`left_padded`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (1, length), generator=generator)


def left_padded(*prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Combine prompts of ``[1, S]`` into ``[B, longest]`` ids and their attention mask."""
    width = max(item.shape[1] for item in prompts)
    ids = [torch.nn.functional.pad(item, (width - item.shape[1], 0)) for item in prompts]
    mask = [torch.arange(width)[None] >= width - item.shape[1] for item in prompts]
    return torch.cat(ids), torch.cat(mask).long()


@lru_cache
def batch() -> tuple[Tensor, Tensor]:
    """Return prompts of one, two, seven and twenty tokens, padded on the left, and their mask."""
    return left_padded(prompt(7, 1), prompt(1, 2), prompt(20, 3), prompt(2, 4))


def greedy_reference(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, new: int = 32, **options: Any
) -> Tensor:
    """Return ``[B, S + new]``, the output of Hugging Face's own greedy ``generate``."""
    mask = torch.ones_like(ids) if mask is None else mask
    options.setdefault("pad_token_id", 0)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


def finish(batch: Batch) -> None:
    """Decode until all answers of a batch are complete."""
    while len(batch):
        batch.step()


def answer_alone(pair: EagleFSD, ids: Tensor, new: int, **options: Any) -> list[int]:
    """Return the answer of :meth:`EagleFSD.generate` to one prompt, ``[1, S]``."""
    return answers(pair.generate(ids, max_new_tokens=new, **options))[0].tolist()


@lru_cache
def reference(architecture: str = DEFAULT_ARCHITECTURE, aligned: bool = False) -> Tensor:
    """Return Hugging Face's greedy output for :func:`batch`, checked not to be trivial."""
    pair = aligned_pair(architecture) if aligned else random_pair(architecture)
    ids, mask = batch()
    sequences = greedy_reference(pair.model, ids, mask, new=NEW_TOKENS)
    for row in sequences[:, ids.shape[1] :]:
        assert row.unique().numel() >= 8, "the reference repeats itself"
    return sequences


def answers(out: GenerateOutput) -> Tensor:
    """Return the new tokens, ``[B, new]``."""
    return out.sequences[:, -out.origins.shape[1] :]


def plain_logits(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits ``[S, V]`` and features ``[S, H]`` of ``ids`` ``[S]``, without a cache."""
    with torch.no_grad():
        output = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0]


def forget_compiled() -> None:
    """Drop all compiled functions."""
    compilation._versions.clear()
    torch._dynamo.reset()


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """Return the tokens from the root of row ``row`` down to ``node``, both included."""
    tokens = [int(tree.tokens[row, node])]
    while node:
        node = int(tree.parents[row, node])
        tokens.insert(0, int(tree.tokens[row, node]))
    return tokens


class RecordingRule(FuzzyRule):
    """FSD's rule, which by default accepts everything; records every step's inputs in ``steps``."""

    steps: list[VerificationInputs]

    def __init__(self, threshold: float = ACCEPT_ALL) -> None:
        super().__init__(threshold)
        object.__setattr__(self, "steps", [])  # the rule itself is frozen

    def gate(self, inputs: VerificationInputs) -> Tensor:
        self.steps.append(inputs)
        return super().gate(inputs)


def drafted_trees(
    out: GenerateOutput, rule: RecordingRule, prompts: Sequence[Tensor], steps: int
) -> Iterator[tuple[DraftTree, int, list[int]]]:
    """Yield the trees of the first steps, in which no row ends, with each row's tokens before."""
    for number, inputs in enumerate(rule.steps[:steps]):
        for row, given in enumerate(prompts):
            emitted = sum(out.stats.accepted[row][:number])
            context = [*given[0].tolist(), *answers(out)[row, :emitted].tolist()]
            assert inputs.tree.tokens[row, 0] == context[-1]
            yield inputs.tree, row, context


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    file: str,
    config_changes: dict[str, Any] | None = None,
    tensor_changes: dict[str, Tensor | None] | None = None,
) -> None:
    """Write ``config.json`` and weights with changes, of which None removes a field or a tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**config, **(config_changes or {})}
    for name, value in (config_changes or {}).items():
        if value is None:
            del values[name]
    (folder / "config.json").write_text(json.dumps(values))
    state = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in {**tensors, **(tensor_changes or {})}.items()
        if tensor is not None
    }
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file)


@contextmanager
def raises_one_line(
    message: str, kind: type[Exception] = ValueError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose message matches and is a single printable line."""
    with pytest.raises(kind, match=message) as error:
        yield error
    one_line(error)


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Return an error's message after checking that it is a single printable line."""
    message = str(error.value)
    assert message
    assert message.isprintable()
    return message


def allowed_tokens(row: int, ids: Tensor) -> list[int]:
    """Constrain decoding by the index of the prompt and the last token."""
    return [token for token in range(VOCAB_SIZE) if (token + int(ids[-1]) + row) % 3]


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters, which can encode any text and any stop string."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    core = Tokenizer(models.BPE(vocab={item: i for i, item in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)
