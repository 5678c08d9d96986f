"""Find out which of the target's hidden states an EAGLE-3 head was trained on.

Checkpoints number the layers in two ways, one apart (see :mod:`eagle_fsd.model.eagle3_checkpoint`).
Of a head that reads the wrong states, fewer tokens are accepted.

Shape letters: ``S`` tokens of a text, ``C`` candidates, ``n`` positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.target import Target

#: Number and length of the texts that :func:`sample_texts` generates.
TEXTS, TEXT_LENGTH = 8, 48
#: Maximum number of parameters of a target that generates them on a CPU.
MAX_CPU_PARAMETERS = 10**9


@torch.inference_mode()
def detect_layers(
    head: Eagle3Head,
    target: Target,
    texts: Sequence[Tensor],
    candidates: Sequence[tuple[int, ...]],
) -> tuple[tuple[int, ...], dict[tuple[int, ...], float]]:
    """Measure how well a head agrees with its target for several choices of hidden states.

    Returns the best choice, and for each the share of positions at which head and target agree.
    ``texts`` are ``[S]`` token ids that the target might write. Another candidate than the first,
    the declared one, is chosen if the difference exceeds three standard deviations (of a sign
    test).
    """
    hits = torch.cat([_hits(head, target, text, candidates) for text in texts], 1)  # [C, n]
    best = int(hits.sum(1).argmax())
    better, worse = ((hits[best] & ~hits[0]).sum(), (hits[0] & ~hits[best]).sum())
    if better - worse <= 3.0 * (better + worse).sqrt():
        best = 0
    shares = hits.float().mean(1).tolist()
    return candidates[best], dict(zip(candidates, shares, strict=True))


def _hits(
    head: Eagle3Head, target: Target, text: Tensor, candidates: Sequence[tuple[int, ...]]
) -> Tensor:
    """Return ``[C, S - 1]`` bool: where the head's most likely token is the target's."""
    ids = text[None].to(target.device)
    output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    expected = output.logits[:, 1:].argmax(-1).to(head.device)
    positions = torch.arange(ids.shape[1] - 1, device=head.device)[None]
    rows = []
    for reads in candidates:
        states = [output.hidden_states[index][:, :-1].to(head.device) for index in reads]
        hidden = head(head.fuse(torch.cat(states, -1)), ids[:, 1:].to(head.device), positions)
        drafted = head.log_probs(hidden).argmax(-1)
        if head.token_ids is not None:
            drafted = head.token_ids[drafted]
        rows.append(drafted == expected)
    return torch.cat(rows)


def is_cheap(target: Target) -> bool:
    """Whether a target can generate, and is on an accelerator or small."""
    parameters = list(target.model.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return False
    size = sum(parameter.numel() for parameter in parameters)
    return target.device.type != "cpu" or size <= MAX_CPU_PARAMETERS


def sample_texts(target: Target) -> list[Tensor]:
    """Let the target write ``TEXTS`` samples of ``TEXT_LENGTH`` tokens, the same each time."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        start = torch.randint(target.vocab_size, (TEXTS, 1)).to(target.device)
        model: Any = target.model
        texts = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            max_new_tokens=TEXT_LENGTH - 1,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(texts)
