"""Rules, drafters and processors of users, and results that they change or convert."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pairs import (
    ACCEPT_ALL,
    aligned_pair,
    answer_alone,
    greedy_reference,
    prompt,
    random_pair,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import TemperatureLogitsWarper

from eagle_fsd import AcceptanceConfig, EagleFSD, Origin
from eagle_fsd.evaluation.methods import Method
from eagle_fsd.model.acceptance import FuzzyRule, TopKRule
from eagle_fsd.model.acceptance.wrappers import DelayedRule, LimitedRule, WrappedRule
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.request import Prompt
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule, Verification, VerificationInputs


class Scaled(FuzzyRule):
    """A rule with an attribute that is no field of a dataclass."""

    def __init__(self, scale: float) -> None:
        super().__init__(ACCEPT_ALL)
        self.scale = scale

    def gate(self, inputs: VerificationInputs) -> Tensor:
        return super().gate(inputs) & (inputs.tree.depths < self.scale)


@dataclasses.dataclass
class MaxFuzzy(AcceptanceRule):
    """Accept this many fuzzy tokens, counted in a state of one column. It has no hash."""

    limit: int
    state_size = 1

    def gate(self, inputs: VerificationInputs) -> Tensor:
        assert inputs.state is not None
        return (inputs.state < self.limit).expand_as(inputs.tree.tokens)

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        assert inputs.state is not None
        return inputs.state + (kept.origins == Origin.FUZZY).sum(1, keepdim=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted(AcceptanceRule):
    """A dataclass, which compares its fields."""

    value: float


def test_rules_are_equal_only_if_all_their_attributes_are() -> None:
    """Rows whose rules are equal are verified together, with one of them."""
    pair, rules = random_pair(), [Scaled(0), Scaled(9), FuzzyRule(ACCEPT_ALL)]
    assert len({*rules, FuzzyRule(ACCEPT_ALL)}) == 3
    assert Slotted(1.0) == Slotted(1.0) != Slotted(2.0)
    prompts = [Prompt(prompt(9)[0], rule=rule) for rule in rules]
    found = {item.index: item for item in pair.generate_many(prompts, 24)}
    assert found[0].tokens == answer_alone(pair, prompt(9), 24, method="ar")
    for index, rule in enumerate(rules):
        assert found[index].tokens == answer_alone(pair, prompt(9), 24, rule=rule)
    assert found[0].tokens != found[1].tokens == found[2].tokens
    # An evaluation resumes in another process if the description is the same.
    settings = [
        Method("mine", rule=rule).describe(pair)["method"] for rule in (MaxFuzzy(3), *rules)
    ]
    assert settings[0] == "MaxFuzzy(limit=3)"
    assert len(set(settings)) == 4


@pytest.mark.parametrize(
    "wrapped",
    [
        MaxFuzzy(2),
        WrappedRule(MaxFuzzy(2)),
        LimitedRule(MaxFuzzy(2), 1e9),
        DelayedRule(DelayedRule(MaxFuzzy(2), 0), 0),
    ],
)
def test_a_restricted_rule_sees_its_own_state(wrapped: AcceptanceRule) -> None:
    shared, ids = random_pair(), prompt(9)
    pair = EagleFSD(shared.model, shared.drafter, shared.tree)
    pair.compile = "auto"  # counts steps by their rule, which need not be hashable
    expected = pair.generate(ids, max_new_tokens=40, rule=MaxFuzzy(2))
    found = pair.generate(ids, max_new_tokens=40, rule=wrapped)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.origins[0]["fuzzy"] >= 2


def test_a_drafter_may_serve_several_pairs() -> None:
    """In turn, each with its own target; it may also be assigned."""
    first, second = tiny_target(), tiny_target(seed=8)
    head, ids = untrained_head(first), prompt(9)
    pairs = [EagleFSD(model, head) for model in (first, second)]
    alone = [EagleFSD(model, untrained_head(first)) for model in (first, second)]
    options: dict[str, Any] = {"max_new_tokens": 16, "threshold": ACCEPT_ALL}
    for at in (0, 1, 0):
        expected = alone[at].generate(ids, **options)
        assert torch.equal(pairs[at].generate(ids, **options).sequences, expected.sequences)
    pairs[0].drafter = NGramDrafter()
    loaded = EagleFSD.from_pretrained(first, second)  # a loaded model is a draft model
    assert isinstance(loaded.drafter, DraftModel)
    expected = greedy_reference(first, ids, new=16)
    for pair in (pairs[0], loaded):
        assert torch.equal(pair.generate(ids, max_new_tokens=16).sequences, expected)


def test_a_draft_vocabulary_follows_the_projection() -> None:
    model, ids = tiny_target(), prompt(9)
    head = untrained_head(model).attach(Target(model))
    head.restrict_vocabulary(torch.arange(40))
    pair, options = EagleFSD(model, head), {"max_new_tokens": 16, "threshold": ACCEPT_ALL}
    before = pair.generate(ids, **options).sequences  # type: ignore[arg-type]
    rows = head._row_weights
    assert torch.equal(pair.generate(ids, **options).sequences, before)  # type: ignore[arg-type]
    assert head._row_weights is rows  # graphs that read them stay valid
    with torch.no_grad():
        model.lm_head.weight.neg_()
    pair.generate(ids, max_new_tokens=4)
    assert torch.equal(head._row_weights, model.lm_head.weight[:40])


class Annealed(TemperatureLogitsWarper):
    """A subclass of a warper that reads the prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / (1.0 + 0.1 * (input_ids[:, -1:] % 7))


def test_subclasses_of_warpers_get_the_prefix() -> None:
    pair, ids = aligned_pair(), prompt(9)
    options: dict[str, Any] = {"logits_processor": [Annealed(1.0)]}
    expected = greedy_reference(pair.model, ids, new=16, **options)
    assert torch.equal(pair.generate(ids, max_new_tokens=16, **options).sequences, expected)
    with pytest.raises(ValueError, match="Annealed fails without previous tokens"):
        pair.generate(ids, max_new_tokens=4, temperature=1.0, logits_warper=[Annealed(1.0)])


def test_custom_generate_takes_a_rule() -> None:
    pair, ids, rule = random_pair(), prompt(9), TopKRule(9, ratio=0.01)
    expected = pair.generate(ids, max_new_tokens=16, rule=rule).sequences
    options: dict[str, Any] = {"custom_generate": pair.custom_generate, "rule": rule}
    assert torch.equal(greedy_reference(pair.model, ids, new=16, **options), expected)
    assert not torch.equal(greedy_reference(pair.model, ids, new=16), expected)


def test_results_can_be_changed_and_converted() -> None:
    pair, ids = aligned_pair(), prompt(9)
    found = pair.beam_search(ids, max_new_tokens=8, num_beams=2)
    found.sequences[0, -1] = 1
    found.scores -= found.scores.max()
    pair.model(found.sequences).logits.sum().backward()
    pair.model.zero_grad()
    stats = pair.generate(ids, max_new_tokens=8, acceptance=AcceptanceConfig()).stats
    assert dataclasses.asdict(stats)["origins"] == stats.origins
    assert sum(stats.origins[0].values()) == 8


def test_the_default_device_does_not_matter() -> None:
    pair, ids = aligned_pair(), prompt(9)
    for model in (pair, EagleFSD(pair.model, NGramDrafter())):
        expected = model.generate(ids, max_new_tokens=16).sequences
        with torch.device("meta"):
            found = model.generate(ids, max_new_tokens=16).sequences
            beams = model.beam_search(ids, max_new_tokens=4, num_beams=2).sequences
        assert torch.equal(found, expected)
        assert not beams.is_meta
