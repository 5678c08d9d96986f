"""The library's rules on ragged chains: the tokens that an engine must accept."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from accelerators import host_reads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd import AcceptanceConfig, AcceptanceRule, Origin
from eagle_fsd.engines.chains import (
    ChainVerifier,
    Layout,
    acceptance,
    emitted,
    raise_probability,
)
from eagle_fsd.engines.settings import UNSUPPORTED, reads_draft
from eagle_fsd.model.acceptance import RULES, BudgetRule, DelayedRule, rule_for
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree, ancestor_matrix
from eagle_fsd.model.verify import Verification, VerificationInputs, verify

VOCABULARY, CPU = 24, torch.device("cpu")
CONFIGS = [
    AcceptanceConfig(threshold=0.3, min_ratio=0.1, divergence="js"),
    AcceptanceConfig(threshold=0.4, divergence="tv", exact_first=3),
    AcceptanceConfig(threshold=1.0, divergence="top_k_kl", max_fuzzy_nats=2.0),
    *(AcceptanceConfig(rule=name) for name in RULES if name.split()[0] not in UNSUPPORTED),
]


def chain(tokens: Tensor, draft: Tensor) -> DraftTree:
    """One request's chain ``[K]`` as the library builds it, with ``[K, V]`` log-probabilities."""
    nodes = torch.arange(len(tokens) + 1)[None]
    parents = (nodes - 1).clamp_min(0)
    return DraftTree(
        tokens=torch.cat([torch.zeros(1, dtype=torch.long), tokens])[None],
        parents=parents,
        depths=nodes,
        ancestors=ancestor_matrix(parents, len(tokens)),
        draft_rows=torch.where(nodes < len(tokens), nodes, -1),
        draft_log_probs=draft[None],
        max_depth=len(tokens),
        sampled=True,  # the draft's own choices, as in engines
    )


def inputs_of(tree: DraftTree, logits: Tensor, state: Tensor | None = None) -> VerificationInputs:
    """The inputs of a greedy verification, with the target's logits ``[B, N, V]``."""
    return replace(Sampler(SamplingConfig())(tree, logits), state=state)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    config=st.sampled_from(CONFIGS),
    seed=st.integers(0, 2**20),
)
def test_greedy_requests_accept_what_the_library_accepts(
    counts: list[int], config: AcceptanceConfig, seed: int
) -> None:
    """Ragged greedy batches accept the library's tokens, for rules with and without a state."""
    rule, random = rule_for(config), torch.Generator().manual_seed(seed)
    total, longest = sum(counts), max(counts)
    logits = torch.randn(total, VOCABULARY, generator=random)
    draft = logits + 0.5 * torch.randn(total, VOCABULARY, generator=random)  # not normalized
    top = logits.topk(3).indices
    tokens = top.gather(1, torch.randint(3, (total, 1), generator=random))[:, 0]
    state = torch.rand(len(counts), rule.state_size, generator=random).mul(3).round()
    states = state if rule.state_size else None

    layout = Layout.of(torch.tensor(counts).cumsum(0), total, longest)
    greedy = torch.ones(len(counts), dtype=torch.bool) if seed % 2 else None
    inputs = inputs_of(layout.tree(tokens, draft), logits[layout.index], states)
    least = acceptance(rule, inputs, greedy)
    changed, least_at = logits.clone(), least[layout.rows, layout.nodes]
    raise_probability(changed, tokens, least_at, greedy=greedy is None)
    choice = changed.argmax(-1)

    start = 0
    alone: dict[int, tuple[VerificationInputs, Verification]] = {}
    produced = torch.full((len(counts), longest + 1), -1)
    for row, count in enumerate(counts):
        part = slice(start, start + count)
        start += count
        produced[row, 0] = 7  # the sample of a request without drafted tokens
        if not count:
            continue
        # The library verifies the chain alone; the target's distribution after it does not matter.
        own = chain(tokens[part], draft[part].log_softmax(-1))
        before = None if states is None else states[row : row + 1]
        single = inputs_of(own, torch.cat([logits[part], logits[part][-1:]])[None], before)
        kept = verify(single, rule)
        run = int((choice[part] == tokens[part]).long().cumprod(0).sum())
        assert run == int(kept.count) - 1
        produced[row, :run] = tokens[part][:run]
        produced[row, run] = choice[part][run] if run < count else int(single.sampled[0, -1])
        alone[row] = single, kept
    found = emitted(inputs, produced, least > 0.0)
    for row, (single, kept) in alone.items():
        length = int(kept.count)
        assert found.origins[row, :length].tolist() == kept.origins[0, :length].tolist()
        if states is not None:
            after = rule.advance(inputs, found)[row]
            assert torch.allclose(after, rule.advance(single, kept)[0], atol=1e-5)


def test_sampled_requests_leave_exact_tokens_to_the_engine() -> None:
    """Only what the rule accepts is certain; a rule that accepts at random raises probabilities."""
    logits = torch.tensor([[2.0, 1.9, -5.0], [2.0, 1.9, -5.0], [2.0, 1.9, -5.0]])
    tokens, layout = torch.tensor([0, 1, 2]), Layout.of(torch.tensor([1, 2, 3]), 3, 1)
    sampled = torch.zeros(3, dtype=torch.bool)

    def certain(rule: AcceptanceRule, state: Tensor | None = None) -> list[float]:
        inputs = inputs_of(layout.tree(tokens), logits[layout.index], state)
        return acceptance(rule, inputs, sampled)[:, 1].tolist()

    assert certain(rule_for(AcceptanceConfig())) == [0.0, 0.0, 0.0]
    assert certain(RULES["top-ratio"]) == [1.0, 1.0, 0.0]
    budget = BudgetRule(0.02)
    expected = budget.raised(logits[0].softmax(-1)).tolist()
    assert torch.tensor(certain(budget)).allclose(torch.tensor(expected))
    placeholders = inputs_of(layout.tree(torch.tensor([0, -1, 0])), logits[layout.index])
    assert acceptance(RULES["top-gap"], placeholders)[:, 1].tolist() == [True, False, True]
    late = torch.tensor([[0.0], [5.0], [5.0]])
    assert certain(DelayedRule(RULES["top-ratio"], 4), late) == [0.0, 1.0, 0.0]


def test_a_drafted_token_is_the_draft_s_choice() -> None:
    """Engines sample drafts: ``cascade`` accepts one that is not the draft's most likely token."""
    logits, layout = torch.tensor([[2.0, 1.0, 0.0]]), Layout.of(torch.tensor([1]), 1, 1)
    inputs = inputs_of(layout.tree(torch.tensor([1]), 2.0 * logits), logits[layout.index])
    assert acceptance(RULES["cascade"], inputs, torch.zeros(1, dtype=torch.bool))[0, 1]


def test_the_host_reads_nothing() -> None:
    """A step and its counts stay on the device; only the line of the log waits for it."""
    for config in CONFIGS:
        verifier = ChainVerifier(rule_for(config), logging.getLogger("test"))
        logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
        layout = Layout.of(torch.tensor([3, 6]), 6, 3)
        tree = layout.tree(logits.argmax(-1), logits)
        greedy = torch.ones(2, dtype=torch.bool)
        for _ in range(2):
            with host_reads() as found:
                state = None
                if verifier.rule.state_size:
                    state = verifier.states.of(["a", "b"], lambda: torch.zeros(2), CPU)
                inputs = inputs_of(tree, logits[layout.index], state)
                verifier.relax(logits.clone(), layout, inputs, greedy)
                verifier.finish(torch.tensor([[1, 2, -1, -1], [3, -1, -1, -1]]))
            # On a CPU, divergences read the number of nodes that have one.
            assert found == ["_local_scalar_dense"] * reads_draft(verifier.rule), config.label


def test_raised_probabilities() -> None:
    """The token gets the probability if that is larger, and the others keep their ratios."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    before, tokens = logits.softmax(-1), torch.tensor([0, 1, 2, 3])
    least = torch.tensor([0.0, 0.01, 0.9, 1.0])
    raise_probability(logits, tokens, least)
    after = logits.softmax(-1)
    assert torch.equal(after[0], before[0])
    assert torch.allclose(after.gather(1, tokens[:, None])[:, 0], least.maximum(before.diagonal()))
    assert torch.allclose(after[2, 3:] / after[2, 4], before[2, 3:] / before[2, 4])
    assert after[3].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_origins_of_a_sampled_request() -> None:
    """Tokens that the rule accepted are fuzzy, and the last one is the target's."""
    layout = Layout.of(torch.tensor([2]), 2, 2)
    inputs = inputs_of(layout.tree(torch.tensor([1, 2])), torch.zeros(2, 3)[layout.index])
    acceptance(rule_for(AcceptanceConfig()), inputs, greedy=torch.zeros(1, dtype=torch.bool))
    by_rule = torch.tensor([[False, True, False]])
    found = emitted(inputs, torch.tensor([[1, 2, 0]]), by_rule)
    assert found.origins.tolist() == [[Origin.FUZZY, Origin.EXACT, Origin.TARGET]]
    assert found.count.tolist() == [3]
