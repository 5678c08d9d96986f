"""The rejection sampler of Model Runner V2 with a rule, on batches made by hand.

That runner needs a GPU. Here its kernels run in Triton's interpreter, and its processing of logits
with states on the CPU. Run by ``make engines`` with an interpreter that has vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM; run make engines")

from vllm import triton_utils

from eagle_fsd import AcceptanceConfig
from eagle_fsd.engines.chains import Layout
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.sampling import Sampler as TreeSampler
from eagle_fsd.model.verify import verify

# Without a GPU, vLLM replaces Triton by placeholders.
with pytest.MonkeyPatch.context() as patch:
    triton = pytest.importorskip("triton")

    # The interpreter has no functions of devices.
    log1p = SimpleNamespace(log1p=lambda x: triton.language.log(1.0 + x))
    patch.setattr(triton_utils, "triton", triton)
    patch.setattr(triton_utils, "tl", triton.language)
    patch.setattr(triton_utils, "tldevice", log1p)
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from eagle_fsd.engines.vllm.sampler_v2 import RelaxedSamplerV2, extend_runner_v2

VOCABULARY, CHAIN, PROMPT = 32, 5, 10
CONFIGS = [
    AcceptanceConfig(threshold=0.3, min_ratio=0.1),
    AcceptanceConfig(rule="cascade"),
    AcceptanceConfig(rule="top-ratio 0.2"),
    AcceptanceConfig(rule="typical"),
    AcceptanceConfig(rule="budget"),
]


class Unchanged:
    """A processor that changes nothing."""

    def apply(self, logits: Tensor, context: Any) -> Tensor:
        return logits


@dataclass
class Mask(Unchanged):
    """A processor that excludes a token."""

    token: int

    def apply(self, logits: Tensor, context: Any) -> Tensor:
        return logits.index_fill(1, torch.tensor([self.token]), -torch.inf)


@dataclass
class States:
    """vLLM's sampling options of its requests, on a CPU."""

    values: list[float]
    top: int = VOCABULARY
    vocab_size: int = VOCABULARY
    temperature: Any = field(init=False)

    def __post_init__(self) -> None:
        def on_both(values: Any) -> Any:
            return SimpleNamespace(np=np.array(values), gpu=torch.tensor(values))

        count = len(self.values)
        self.temperature = on_both(self.values)
        self.seeds = on_both(list(range(count)))
        self.top_k, self.top_p = on_both([self.top] * count), on_both([1.0] * count)
        self.min_p = on_both([0.0] * count)

    apply_min_p, apply_top_k_top_p = SamplingStates.apply_min_p, SamplingStates.apply_top_k_top_p
    get_top_k_top_p = SamplingStates.get_top_k_top_p

    def apply_temperature(self, logits: Tensor, requests: Tensor, _: Any) -> None:
        values = self.temperature.gpu[requests, None]
        logits /= torch.where(values == 0.0, 1.0, values)


class CpuSampler:
    """vLLM's processing of logits, with processors of this module."""

    apply_sampling_params = Sampler.apply_sampling_params

    def __init__(self, states: States, *processors: Unchanged) -> None:
        self.sampling_states, self.logits_processors = states, processors
        self.thinking_budget_state, self.use_fp64_gumbel = Unchanged(), False
        self.needs_logits_processing = np.array(
            [bool(processors) or value > 0.0 for value in states.values]
        )
        names = [f"request {number}" for number in range(len(states.values))]
        self.req_states = SimpleNamespace(
            index_to_req_id=dict(enumerate(names)),
            prompt_len=SimpleNamespace(gpu=torch.full((len(names),), PROMPT)),
        )


def sampler_of(config: AcceptanceConfig | None, sampler: CpuSampler) -> RejectionSampler:
    """A rejection sampler for chains, with a rule if a configuration is given."""
    made = RejectionSampler(
        sampler,
        SimpleNamespace(
            num_speculative_tokens=CHAIN,
            enable_adaptive_verification=False,
            rejection_sample_method="standard",
        ),
        torch.device("cpu"),
    )
    if config is not None:
        RelaxedSamplerV2.convert(made, rule_for(config))
    return made


@dataclass
class Chunk:
    """Drafted tokens that the target finds likely, and both models' logits."""

    counts: list[int]
    seed: int
    emitted: int = 1

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        rows, requests = sum(self.counts) + len(self.counts), len(self.counts)
        sizes = torch.tensor(self.counts) + 1
        self.logits = 2.0 * torch.randn(rows, VOCABULARY, generator=random)
        self.mapping = torch.arange(requests).flip(0)  # not the order of the batch
        self.rows = self.mapping.repeat_interleave(sizes)
        self.ends = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
        self.local = torch.cat([torch.arange(size) for size in sizes])
        self.positions = PROMPT + self.emitted - 1 + self.local
        self.drafted = self.logits.topk(3).indices.gather(
            1, torch.randint(3, (rows, 1), generator=random)
        )[:, 0]
        self.drafted = self.drafted.roll(1).int()  # a row's token comes before it
        self.targets = (self.local < (sizes - 1).repeat_interleave(sizes)).nonzero()[:, 0]
        noise = torch.randn(rows, VOCABULARY, generator=random)
        self.draft = torch.zeros(requests, CHAIN, VOCABULARY)
        own = self.local < CHAIN
        self.draft[self.rows[own], self.local[own]] = (self.logits + noise)[own]

    def verified(
        self, sampler: RejectionSampler, drafted: Tensor | None = None
    ) -> tuple[list[list[int]], Tensor]:
        """The tokens of each request, and the raw logits afterwards."""
        logits = self.logits.clone()
        _, tokens, counts = sampler._verify(
            logits,
            self.draft,
            self.drafted,
            self.positions,
            self.ends,
            self.mapping,
            self.mapping.numpy(),
            self.rows,
            self.local,
            self.positions.numpy(),
            self.drafted if drafted is None else drafted,
        )
        return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)], logits


def plain(temperatures: list[float], *processors: Unchanged) -> CpuSampler:
    return CpuSampler(States(temperatures), *processors)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_greedy_chunks_accept_the_library_s_tokens(config: AcceptanceConfig) -> None:
    """The prefix that the rule accepts, then the target's most likely token; ragged chunks."""
    rule, fuzzy = rule_for(config), 0
    for seed in range(8):
        chunk = Chunk([3, 0, 5, 1], seed)
        found, logits = chunk.verified(sampler_of(config, plain([0.0] * 4)))
        assert torch.equal(logits, chunk.logits)  # of which vLLM reports log-probabilities
        exact, _ = chunk.verified(sampler_of(None, plain([0.0] * 4)))
        layout = Layout.of(torch.tensor(chunk.counts).cumsum(0), len(chunk.targets), CHAIN)
        at_nodes = chunk.logits[chunk.targets][layout.index]
        own = chunk.draft[chunk.rows[chunk.targets], chunk.local[chunk.targets]]
        tree = layout.tree(chunk.drafted[chunk.targets + 1], own)
        kept = verify(TreeSampler(SamplingConfig())(tree, at_nodes), rule)
        assert [len(tokens) for tokens in found] == kept.count.tolist()
        for row, tokens in enumerate(found):
            assert tokens[:-1] == kept.tokens[row, : len(tokens) - 1].tolist()
            last = int(chunk.ends[row]) + len(tokens) - 1
            assert tokens[-1] == int(chunk.logits[last].argmax())
        fuzzy += sum(map(len, found)) - sum(map(len, exact))
    assert fuzzy > 5


def test_sampled_chunks_are_vllm_s_where_nothing_is_relaxed() -> None:
    """Equal seeds give vLLM's tokens, even in chunks that contain greedy requests."""
    config = AcceptanceConfig(rule="top-ratio 0.2", exact_first=100)
    for seed in range(5):
        chunk, temperatures = Chunk([3, 5, 1], seed), [0.7, 0.0, 1.0]
        found, _ = chunk.verified(sampler_of(config, plain(temperatures)))
        assert found == chunk.verified(sampler_of(None, plain(temperatures)))[0]


def test_masked_tokens_are_never_accepted() -> None:
    """Tokens that a processor, top-k or vLLM masks are never accepted."""
    config = AcceptanceConfig(rule="top-ratio 0.2")
    for seed in range(3):
        chunk = Chunk([4, 4], seed)
        token = int(chunk.drafted[1])
        for temperature in (0.0, 0.7):
            masked = sampler_of(config, plain([temperature] * 2, Mask(token)))
            assert all(token not in tokens for tokens in chunk.verified(masked)[0])
        top = CpuSampler(States([1.0, 1.0], top=1))
        best = chunk.logits.argmax(-1)
        assert chunk.verified(sampler_of(config, top))[0][0][0] == int(best[0])
        invalid = chunk.drafted.clone()
        invalid[1:5] = -1
        assert chunk.verified(sampler_of(config, plain([0.0, 0.0])), invalid)[0][0] == [
            int(best[0])
        ]


def test_states_are_those_of_requests() -> None:
    """The length of an answer, and what its fuzzy tokens have given up."""
    delayed = AcceptanceConfig(rule="top-ratio 0.2", exact_first=8)
    loose = sampler_of(AcceptanceConfig(rule="top-ratio 0.2"), plain([0.0]))
    early, late = (Chunk([5], 4, emitted) for emitted in (1, 8))
    exact = early.verified(sampler_of(None, plain([0.0])))[0]
    assert len(early.verified(loose)[0][0]) > len(exact[0])
    assert early.verified(sampler_of(delayed, plain([0.0])))[0] == exact
    assert late.verified(sampler_of(delayed, plain([0.0])))[0] == late.verified(loose)[0]

    limited = sampler_of(AcceptanceConfig(rule="top-ratio 0.2", max_fuzzy_nats=3.0), plain([0.0]))
    lengths = [len(early.verified(limited)[0][0]) for _ in range(6)]
    assert lengths[0] > len(exact[0]) == lengths[-1]
    extend_runner_v2()
    runner = object.__new__(GPUModelRunner)
    runner.rejection_sampler, runner.pooling_runner = limited, None
    runner._remove_request = lambda name: None
    step = SimpleNamespace(finished_req_ids=set(), preempted_req_ids={"request 0"})
    runner.finish_requests(step)
    assert len(early.verified(limited)[0][0]) == lengths[-1]
    step.finished_req_ids, step.preempted_req_ids = {"request 0"}, set()
    runner.finish_requests(step)
    assert len(early.verified(limited)[0][0]) == lengths[0]
