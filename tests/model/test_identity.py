"""Fingerprints tell drafters from each other, and from those that settings were calibrated for."""

from __future__ import annotations

import torch
from pairs import tiny_target, untrained_head

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.model.config import read_settings
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.interface import Drafter, NoDrafter
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter
from eagle_fsd.model.identity import differs, fingerprint


def draft_model(seed: int) -> DraftModel:
    return DraftModel(tiny_target(seed=seed, num_hidden_layers=1))


def test_every_drafter_has_its_own_fingerprint() -> None:
    drafters: list[Drafter] = [
        *(NoDrafter(), NGramDrafter(), NGramDrafter(4), AdaptiveNGramDrafter()),
        AdaptiveNGramDrafter(order=8),
        *(draft_model(seed=1), draft_model(seed=2), untrained_head(tiny_target())),
    ]
    found = [fingerprint(drafter) for drafter in drafters]
    assert len(set(found)) == len(drafters)
    assert [fingerprint(drafter) for drafter in drafters] == found


def test_fingerprint_is_that_of_the_weights() -> None:
    """A draft model's is that of its model, also if only one value differs."""
    drafter = draft_model(seed=1)
    assert fingerprint(drafter) == fingerprint(drafter.model) == fingerprint(draft_model(seed=1))
    with torch.no_grad():
        drafter.model.lm_head.weight[0, 0] += 1.0
    assert fingerprint(drafter) != fingerprint(draft_model(seed=1))


def test_recorded_fingerprints_of_the_bundled_pair_are_valid() -> None:
    pair = EagleFSD.from_pretrained(dtype="float32", device_map="cpu")
    settings = read_settings(BUNDLED_HEAD / "fsd.json")
    for recorded, model in ((settings.target, pair.model), (settings.drafter, pair.drafter)):
        assert recorded is not None
        assert recorded.dtype == "float32"
        assert not differs(recorded, model, torch.float32)
