"""The bundled target: a tokenizer and a small Llama, trained from scratch on generated chats.

Deep and narrow on purpose. On two cores a layer costs launches rather than arithmetic, much as on
a GPU it costs reading weights, so a pass over a draft tree is hardly dearer than a pass over one
token and the pair behaves as pairs of real size do.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_wsd_schedule

from eagle_fsd.model.bundled.problems import Message, chats

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
        tokens_per_batch: Tokens (padding included) an optimiser step sees.
        prompt_weight: Weight of the loss on what the user says, relative to the answer's.
        minutes: Wall-clock budget; the schedule is laid out in ``steps``, whichever ends first.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 448
    layers: int = 14
    heads: int = 4
    context: int = 2048
    steps: int = 3000
    tokens_per_batch: int = 4096
    prompt_weight: float = 0.1
    optimizer: str = "muon"
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 50
    decay_share: float = 0.35
    seed: int = 0


def build_tokenizer(vocab_size: int, chats_read: int = 6000, seed: int = 1) -> PreTrainedTokenizerFast:
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


def encode_chat(tokenizer: PreTrainedTokenizerFast, chat: list[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of a chat, and for each whether the assistant says it (its end token included)."""
    ids, spoken = [tokenizer.bos_token_id], [False]
    for message in chat:
        role = tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>")
        body = tokenizer.encode(message["content"], add_special_tokens=False) + [tokenizer.eos_token_id]
        ids += [role, *body]
        spoken += [False] + [message["role"] == "assistant"] * len(body)
    return ids, spoken


def batches(
    tokenizer: PreTrainedTokenizerFast, recipe: TargetRecipe, pool: int = 1024
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, weights), both ``[B, S]``: chats of like length together, padded right.

    Right padding under a causal mask is never attended to by a real token, so no mask is needed.
    """
    source = chats("train", recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        encoded = [encode_chat(tokenizer, chat) for chat in itertools.islice(source, pool)]
        encoded.sort(key=lambda item: len(item[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for item in encoded:
            if (len(groups[-1]) + 1) * len(item[0]) > recipe.tokens_per_batch:
                groups.append([])
            groups[-1].append(item)
        for index in torch.randperm(len(groups), generator=generator).tolist():
            group = groups[index]
            width = max(len(ids) for ids, _ in group)
            ids = torch.full((len(group), width), tokenizer.pad_token_id)
            weights = torch.zeros(len(group), width)
            for row, (tokens, spoken) in enumerate(group):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                weights[row, : len(tokens)] = torch.tensor(
                    [1.0 if own else recipe.prompt_weight for own in spoken]
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


def train_target(recipe: TargetRecipe, out: Path) -> None:
    """Train and save to ``out``; a run that was stopped goes on from its last checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(recipe.vocab_size)
    tokenizer.save_pretrained(out)
    model = build_model(recipe, tokenizer)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    optimisers = [
        torch.optim.Muon(
            matrices,
            lr=recipe.muon_lr,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="original",
        )
        if recipe.optimizer == "muon"
        else torch.optim.AdamW(
            matrices, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        ),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    decay = int(recipe.steps * recipe.decay_share)
    schedules = [
        get_wsd_schedule(o, recipe.warmup, decay, num_training_steps=recipe.steps) for o in optimisers
    ]
    log.info("target: %.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    stream = batches(tokenizer, recipe)
    checkpoint = out / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for part, saved in zip([*optimisers, *schedules], state["parts"], strict=True):
            part.load_state_dict(saved)
        first = state["step"]
        for _ in range(first):
            next(stream)
        log.info("resumed at step %d", first)
    started, seen, smooth = time.monotonic(), 0, None
    for step in range(first, recipe.steps):
        ids, weights = next(stream)
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        kept = weights[:, 1:] > 0
        logits = model.lm_head(hidden[kept])
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][kept], reduction="none")
        w = weights[:, 1:][kept]
        loss = (losses * w).sum() / w.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in optimisers:
            part.step()
            part.zero_grad(set_to_none=True)
        for part in schedules:
            part.step()
        own = losses.detach()[w == 1].mean().item()
        smooth = own if smooth is None else 0.95 * smooth + 0.05 * own
        seen += ids.numel()
        if (step + 1) % 20 == 0:
            rate = seen / (time.monotonic() - started)
            log.info("step %d loss %.4f tokens/s %.0f", step + 1, smooth, rate)
        if (step + 1) % 250 == 0 or step + 1 == recipe.steps:
            state = {
                "model": model.state_dict(),
                "parts": [p.state_dict() for p in [*optimisers, *schedules]],
                "step": step + 1,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").rename(checkpoint)
            model.save_pretrained(out)
    (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")


if __name__ == "__main__":
    import sys

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    overrides = dict(item.split("=") for item in sys.argv[2:])
    recipe = TargetRecipe(**{k: type(getattr(TargetRecipe, k))(v) for k, v in overrides.items()})
    train_target(recipe, Path(sys.argv[1]))
