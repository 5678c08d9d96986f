"""The bundled draft model: two decoder layers with the target's tokenizer, trained by distillation.

It starts from the target's embedding and from its first and last decoder layers, and learns the
target's distributions on chats whose answers the target generated.
"""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, get_wsd_schedule

from eagle_fsd.model.config import TargetOptions
from eagle_fsd.train.chat_file import write_chats
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest
from eagle_fsd.train.dataset import TrainingBatch, collate, pack_batches
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.record import write_record
from eagle_fsd.train.regenerate import regenerate
from recipes.target import log_progress, save_weights, take_step

log = logging.getLogger(__name__)

#: Options of ``eagle-fsd evaluate`` with which the card's results are measured.
CHAIN_OPTIONS = ("--total-tokens", 7, "--depth", 5, "--tree-top-k", 1, "--threshold", 0.1)
CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---

# eagle-fsd bundled draft model

A Llama of two layers with {parameters} M parameters that drafts for the bundled target. It shares
the target's tokenizer, which is not copied here.

Trained by `python -m recipes.bundled --stage draft-model`: it starts from the
target's embedding and its first and last layers, and learns the target's distributions on {chats}
generated chats whose answers the target sampled; {steps} steps, {tokens} tokens, {minutes} minutes
on {machine}, {date}.
"""


@dataclass(frozen=True)
class DraftModelConfig:
    """Hyperparameters of the draft model; the defaults are the bundled draft model's.

    ``layers`` are the target's decoder layers that it starts from. ``decay_share`` is the fraction
    of the steps, at the end, over which the learning rate decays to 0.
    """

    layers: tuple[int, ...] = (0, -1)
    chats: int = 1024
    epochs: int = 20
    tokens_per_batch: int = 4096
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup: int = 50
    decay_share: float = 0.35
    seed: int = 0


def build_draft_model(target: LlamaForCausalLM, layers: tuple[int, ...]) -> LlamaForCausalLM:
    """Build a model from a target's embedding, final norm and some of its decoder layers."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    model = LlamaForCausalLM(config)
    model.load_state_dict(target.state_dict(), strict=False)
    for layer, index in zip(model.model.layers, layers, strict=True):
        layer.load_state_dict(target.model.layers[index].state_dict())
    return model.float()


def train_draft_model(config: DraftModelConfig, target: Path, work: Path, out: Path) -> None:
    """Train the draft model and save it in half precision, without a tokenizer.

    The target first rewrites the answers; if that is interrupted, it resumes.
    """
    work.mkdir(parents=True, exist_ok=True)
    answers = work / "answers.jsonl"
    regenerate(
        RegenerateRequest(
            data=write_chats(work / "chats.jsonl", config.chats), out=answers, target=target
        ),
        RegenerateConfig(temperature=1.0, batch_size=64, max_new_tokens=400),
    )
    loaded = LoadedTarget.load(TargetOptions(target=target, dtype="float32"), "cpu")
    teacher = loaded.target.model
    assert isinstance(teacher, LlamaForCausalLM)
    data = loaded.open_chats(answers)
    examples = [data[index] for index in range(len(data))]
    packed = pack_batches(
        range(len(examples)),
        [len(example.ids) for example in examples],
        config.tokens_per_batch,
        config.seed,
    )
    batches = [collate([examples[index] for index in batch]) for batch in packed]
    log.info("draft model: computing the target's hidden states of %d batches", len(batches))
    with torch.no_grad():  # the projection is cheap, so the hidden states are kept
        labels = [_answer_states(teacher, batch).half() for batch in batches]

    model = build_draft_model(teacher, config.layers)
    steps = config.epochs * len(batches)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    decay = int(steps * config.decay_share)
    schedule = get_wsd_schedule(optimizer, config.warmup, decay, num_training_steps=steps)
    generator = torch.Generator().manual_seed(config.seed)
    epochs = [torch.randperm(len(batches), generator=generator) for _ in range(config.epochs)]
    start, tokens = time.monotonic(), 0
    for step, index in enumerate(torch.cat(epochs).tolist(), 1):
        with torch.no_grad():
            probs = teacher.lm_head(labels[index].float()).softmax(-1)  # [n, V]
        log_probs = model.lm_head(_answer_states(model, batches[index])).log_softmax(-1)
        loss = F.kl_div(log_probs, probs, reduction="batchmean")
        take_step(loss, model, optimizer, schedule)
        tokens += batches[index].ids.numel()
        if step % 20 == 0:
            overlap = torch.minimum(probs, log_probs.detach().exp()).sum(-1).mean()
            losses = f"KL {loss.item():.4f}, overlap {overlap.item():.4f}"
            log_progress(
                step, steps, tokens=tokens, seconds=time.monotonic() - start, losses=losses
            )
    save_weights(model, out)
    write_record(out, asdict(config), steps=steps, tokens=tokens, seconds=time.monotonic() - start)


def _answer_states(model: LlamaForCausalLM, batch: TrainingBatch) -> Tensor:
    """Return ``[n, H]``: the last hidden states at the tokens before those of answers."""
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    states: Tensor = hidden[batch.assistant_mask[:, 1:]]
    return states
