"""The bundled target: a tokenizer and a small Llama, trained from scratch on generated chats.

The model is deep and narrow on purpose: on a CPU, operator overhead, not arithmetic, dominates the
time of a pass over one token, as reading weights does for a large model on a GPU. A pass over a
draft tree therefore takes less time than a few such passes.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_wsd_schedule

from eagle_fsd.bundled.problems import chats
from eagle_fsd.model.checkpoint import transformers4_fields
from eagle_fsd.train.assistant_mask import encode_chat
from eagle_fsd.train.dataset import collate, pack_batches
from eagle_fsd.train.record import write_record
from eagle_fsd.utils.chat_templates import TokenizerTemplate
from eagle_fsd.utils.files import atomic_path, atomic_write

log = logging.getLogger(__name__)

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
#: Words keep their leading space, and digits are split, as in Qwen2's pattern.
WORDS = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s")
#: Chats that the tokenizer is trained on, and chats that are sorted by length together.
TOKENIZER_CHATS, POOL = 6000, 1024


@dataclass(frozen=True)
class TargetConfig:
    """The target's architecture and hyperparameters; the defaults are the bundled target's.

    ``prompt_weight`` is the weight of the loss on tokens outside answers. ``decay_share`` is the
    fraction of the steps, at the end, over which the learning rate decays to 0. A batch has at most
    ``tokens_per_batch`` tokens, padding included.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 448
    layers: int = 14
    heads: int = 4
    context: int = 2048
    steps: int = 3200
    tokens_per_batch: int = 4096
    prompt_weight: float = 0.1
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup: int = 50
    decay_share: float = 0.35
    seed: int = 0


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with single-digit tokens on generated chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BEGIN, END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        message["content"]
        for chat in itertools.islice(chats("train", seed=1), TOKENIZER_CHATS)
        for message in chat
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, config: TargetConfig
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of chats of similar length: ``[B, S]`` token ids, ``[B, S]`` loss weights.

    :data:`POOL` chats are sorted by length together.
    """
    source = chats("train", config.seed)
    chat_template = TokenizerTemplate(tokenizer)
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        pool = itertools.islice(source, POOL)
        examples = [encode_chat(chat, tokenizer, chat_template) for chat in pool]
        lengths = [len(item.ids) for item in examples]
        packed = pack_batches(
            range(len(examples)), lengths, tokens=config.tokens_per_batch, seed=config.seed
        )
        for number in torch.randperm(len(packed), generator=generator).tolist():
            batch = collate([examples[index] for index in packed[number]])
            real = torch.arange(batch.ids.shape[1]) < torch.tensor(batch.lengths)[:, None]
            weights = torch.where(batch.assistant_mask, 1.0, config.prompt_weight) * real
            yield batch.ids, weights


def build_model(config: TargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create the model with random weights."""
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.04,
        )
    )


def train_target(config: TargetConfig, work: Path, out: Path) -> None:
    """Train the target, resuming from a checkpoint in ``work``; save it in half precision."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(config.vocab_size)
    model = build_model(config, tokenizer)
    optimizer = _build_optimizer(config, model)
    decay = int(config.steps * config.decay_share)
    schedule = get_wsd_schedule(optimizer, config.warmup, decay, num_training_steps=config.steps)
    log.info("target: %.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)

    # The keys are part of the checkpoint format.
    parts: dict[str, Any] = {"model": model, "optimiser": optimizer, "schedule": schedule}
    checkpoint = work / "checkpoint.pt"
    first, tokens, seconds = 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first, tokens, seconds = state["step"], state["tokens"], state["seconds"]
        log.info("resuming from step %d", first)
    for layer in model.model.layers:
        layer.compile(dynamic=True)

    stream = itertools.islice(batches(tokenizer, config), first, config.steps)
    start, average = time.monotonic() - seconds, None
    for step, (ids, weights) in enumerate(stream, first + 1):
        loss, answer_loss = _language_modeling_loss(model, ids, weights)
        take_step(loss, model, optimizer, schedule)
        average = answer_loss if average is None else 0.95 * average + 0.05 * answer_loss
        tokens += ids.numel()
        seconds = time.monotonic() - start
        if step % 20 == 0:
            log_progress(
                step,
                config.steps,
                tokens=tokens,
                seconds=seconds,
                losses=f"loss on answers {average:.4f}",
            )
        if step % 250 == 0 or step == config.steps:
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"step": step, "tokens": tokens, "seconds": seconds}
            with atomic_path(checkpoint) as temporary:
                torch.save(state, temporary)
    save_target(model, tokenizer, out)
    write_record(out, asdict(config), steps=config.steps, tokens=tokens, seconds=seconds)


def take_step(
    loss: Tensor, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, schedule: LRScheduler
) -> None:
    """Update a model with the clipped gradient of a loss."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)


def log_progress(step: int, steps: int, tokens: int, seconds: float, losses: str) -> None:
    """Log the losses, the speed and the minutes that are left."""
    rate, left = tokens / seconds, seconds / step * (steps - step) / 60
    log.info("step %d of %d, %s, %.0f tokens/s, %.0f minutes left", step, steps, losses, rate, left)


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the target in half precision, so that transformers 4 and 5 can load it.

    The model is converted in place.
    """
    tokenizer.save_pretrained(out)
    # transformers 5 writes the class's new name, which transformers 4 does not know.
    _update_json(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    save_weights(model, out)


def save_weights(model: LlamaForCausalLM, out: Path) -> None:
    """Save a model without its tokenizer in half precision, as :func:`save_target` does."""
    model.half().save_pretrained(out)
    # The data type to load it in, also on a GPU: the settings of the bundled heads are for float32.
    fields = {"dtype": "float32", **transformers4_fields(model.config, torch.float32)}
    _update_json(out / "config.json", **fields)


def _update_json(path: Path, **values: Any) -> None:
    content = {**json.loads(path.read_text(encoding="utf-8")), **values}
    atomic_write(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _build_optimizer(config: TargetConfig, model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Build AdamW with weight decay on all matrices except the embedding."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def _language_modeling_loss(
    model: LlamaForCausalLM, ids: Tensor, weights: Tensor
) -> tuple[Tensor, float]:
    """Return the weighted mean cross-entropy, and the unweighted mean over the answers."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    kept = weights[:, 1:] > 0
    losses = F.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
    weight = weights[:, 1:][kept]
    return (losses * weight).sum() / weight.sum(), losses.detach()[weight == 1].mean().item()
