"""The bundled target: a tokenizer and a small Llama, trained from scratch on generated chats.

Deep and narrow on purpose. On two cores a layer costs launches rather than arithmetic, much as on
a GPU it costs reading weights, so a pass over a draft tree is hardly dearer than a pass over one
token and the pair behaves as pairs of real size do.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_wsd_schedule

from eagle_fsd.bundled.problems import chats
from eagle_fsd.train.encoding import EncodedChat, encode_chat
from eagle_fsd.train.record import write_record
from eagle_fsd.utils.chat_templates import TokenizerFormat

log = logging.getLogger(__name__)

BEGIN, USER, ASSISTANT, SYSTEM, END, PAD = (
    "<|begin|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
)
CHAT_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
#: Words keep their leading space, digits stand alone, as in Llama 3's pattern.
WORDS = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s")


@dataclass
class TargetRecipe:
    """Everything that decides the bundled target; the defaults are what was shipped.

    Attributes:
        tokens_per_batch: Tokens an optimiser step sees, padding included.
        prompt_weight: Weight of the loss on what the user says; the answer's is 1.
        decay_share: The part of the steps over which the learning rate falls to zero at the end.
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


def build_tokenizer(
    vocab_size: int, chats_read: int = 6000, seed: int = 1
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single-digit tokens, trained on generated chats."""
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
        for chat in itertools.islice(chats("train", seed), chats_read)
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
    tokenizer: PreTrainedTokenizerFast, recipe: TargetRecipe, pool: int = 1024
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, weights), both ``[B, S]``: chats of like length together, padded right.

    Right padding under a causal mask is never attended to by a real token, so no mask is needed.
    """
    source = chats("train", recipe.seed)
    wording = TokenizerFormat(tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        encoded = [encode_chat(chat, tokenizer, wording) for chat in itertools.islice(source, pool)]
        encoded.sort(key=lambda item: len(item.ids))
        groups: list[list[EncodedChat]] = [[]]
        for item in encoded:
            if (len(groups[-1]) + 1) * len(item.ids) > recipe.tokens_per_batch:
                groups.append([])
            groups[-1].append(item)
        for index in torch.randperm(len(groups), generator=generator).tolist():
            group = groups[index]
            width = max(len(item.ids) for item in group)
            ids = torch.full((len(group), width), tokenizer.pad_token_id)
            weights = torch.zeros(len(group), width)
            for row, item in enumerate(group):
                ids[row, : len(item.ids)] = torch.tensor(item.ids)
                weights[row, : len(item.ids)] = torch.tensor(
                    [1.0 if own else recipe.prompt_weight for own in item.spoken]
                )
            yield ids, weights


def build_model(recipe: TargetRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.04,
        )
    )


def train_target(recipe: TargetRecipe, work: Path, out: Path) -> None:
    """Train with checkpoints in ``work``, then save to ``out`` in half precision.

    A run that was stopped goes on from its last checkpoint.
    """
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(recipe.vocab_size)
    model = build_model(recipe, tokenizer)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimiser = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=recipe.lr,
        betas=(0.9, 0.95),
    )
    decay = int(recipe.steps * recipe.decay_share)
    schedule = get_wsd_schedule(optimiser, recipe.warmup, decay, num_training_steps=recipe.steps)
    parts = {"model": model, "optimiser": optimiser, "schedule": schedule}
    log.info("target: %.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)

    checkpoint = work / "checkpoint.pt"
    first, seen, spent = 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first, seen, spent = state["step"], state["tokens"], state["seconds"]
        log.info("going on from step %d", first)
    for layer in model.model.layers:
        layer.compile(dynamic=True)  # twice as fast on a CPU

    stream = itertools.islice(batches(tokenizer, recipe), first, recipe.steps)
    started, smooth = time.monotonic() - spent, None
    for step, (ids, weights) in enumerate(stream, first + 1):
        loss, own = _language_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        smooth = own if smooth is None else 0.95 * smooth + 0.05 * own
        seen += ids.numel()
        spent = time.monotonic() - started
        if step % 20 == 0:
            left = spent / step * (recipe.steps - step) / 60
            log.info(
                "step %d of %d, loss on answers %.4f, %.0f tokens/s, %.0f minutes left",
                step,
                recipe.steps,
                smooth,
                seen / spent,
                left,
            )
        if step % 250 == 0 or step == recipe.steps:
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"step": step, "tokens": seen, "seconds": spent}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    tokenizer.save_pretrained(out)
    model.to(torch.float16).save_pretrained(out)
    write_record(out, recipe, recipe.steps, seen, spent)


def _language_loss(model: LlamaForCausalLM, ids: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Weighted mean cross-entropy of the next token, and its mean over the answers alone."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    kept = weights[:, 1:] > 0
    losses = F.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
    weight = weights[:, 1:][kept]
    return (losses * weight).sum() / weight.sum(), losses.detach()[weight == 1].mean().item()
