"""The plugin for SGLang, on trees and batches made by hand.

SGLang has no build for a CPU. A stand-in takes the place of its modules, with a plain form of its
verification of trees: process the logits, mask them, then walk down from the root, at each node to
the child that carries the target's token.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_fsd import AcceptanceConfig, AcceptanceRule, OptionsError
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_TARGET
from eagle_fsd.engines import sglang as plugin
from eagle_fsd.engines.sglang.trees import RequestSampling, TreeVerifier, linked_tree
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.identity import fingerprint_of_files
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree, ancestor_matrix
from eagle_fsd.model.verify import Verification, verify

VOCABULARY = 12
PROMPT = 7
CONFIGS = [
    AcceptanceConfig(rule="top-ratio 0.2"),
    AcceptanceConfig(rule="top-gap"),
    AcceptanceConfig(rule="margin 0.8"),
    AcceptanceConfig(rule="typical", exact_first=2),
    AcceptanceConfig(rule="regret"),
    AcceptanceConfig(rule="typical 0.03", max_fuzzy_nats=1.0),
]


@dataclass
class Batch:
    """Trees in SGLang's form, and the target's logits at their nodes."""

    parents: list[list[int]]
    seed: int
    temperatures: list[float] = field(default_factory=list)
    emitted: int = 1

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        count, self.size = len(self.parents), len(self.parents[0])
        self.logits = 2.0 * torch.randn(count * self.size, VOCABULARY, generator=random)
        self.tokens = torch.zeros(count, self.size, dtype=torch.long)
        self.child = torch.full((count, self.size), -1)
        self.sibling = self.child.clone()
        likely = self.logits.view(count, self.size, -1).argsort(-1, descending=True)
        for row, parents in enumerate(self.parents):
            last: dict[int, int] = {}
            used: dict[int, int] = {}
            for node, parent in enumerate(parents[1:], start=1):
                used[parent] = used.get(parent, -1) + int(torch.randint(1, 3, (), generator=random))
                self.tokens[row, node] = likely[row, parent, used[parent] % VOCABULARY]
                links = self.sibling if parent in last else self.child
                links[row, last.get(parent, parent)] = node
                last[parent] = node
        self.temperatures = self.temperatures or [0.0] * count
        self.requests = [Request(f"request {row}") for row in range(count)]

    def tree(self) -> DraftTree:
        """The trees as the library builds them."""
        parents = torch.tensor(self.parents)
        ancestors = ancestor_matrix(parents, self.size)
        return DraftTree(
            tokens=self.tokens,
            parents=parents,
            depths=ancestors.sum(-1) - 1,
            ancestors=ancestors,
            draft_rows=torch.full_like(parents, -1),
            draft_log_probs=torch.empty(len(parents), 0, 0),
            max_depth=self.size - 1,
        )

    def verified(self, rule: AcceptanceRule) -> Verification:
        """What the library keeps of the trees at temperature 0."""
        logits = self.logits.view(*self.tokens.shape, -1)
        inputs = Sampler(SamplingConfig())(self.tree(), logits)
        if rule.state_size:
            inputs.state = torch.zeros(len(self.tokens), rule.state_size)
        return verify(inputs, rule)

    def sampled(self, sample: Any, mask: Any = None, **info: Any) -> tuple[list[list[int]], Tensor]:
        """The tokens of each request with ``eagle_sample``, and the logits afterwards."""
        greedy = [value == 0.0 for value in self.temperatures]
        verify_input = SimpleNamespace(
            draft_token=self.tokens.flatten(),
            draft_token_num=self.size,
            max_tree_depth=self.size,
            positions=(self.tree().depths + PROMPT + self.emitted - 1).flatten(),
            retrieve_index=torch.arange(self.tokens.numel()).view_as(self.tokens),
            retrieve_next_token=self.child,
            retrieve_next_sibling=self.sibling,
        )
        count = len(greedy)
        options = {
            "is_all_greedy": all(greedy),
            "temperatures": torch.tensor([[value or 1.0] for value in self.temperatures]),
            "top_ks": torch.tensor([1 if row else 2**30 for row in greedy]),
            "top_ps": torch.ones(count),
            "has_watermark_candidates": False,
            "acc_additive_penalties": None,
        }
        batch = SimpleNamespace(
            reqs=self.requests,
            sampling_info=SimpleNamespace(**options | info),
            return_logprob=True,
            forward_mode=SimpleNamespace(is_idle=lambda: False),
        )
        output = SimpleNamespace(next_token_logits=self.logits.clone())
        state = info.get("watermark_state")
        predict, lengths, index = sample(verify_input, batch, output, mask, watermark_state=state)
        tokens = [
            predict[row[:length]].tolist() for row, length in zip(index, lengths, strict=True)
        ]
        return tokens, output.next_token_logits


class Request:
    """A request of SGLang."""

    def __init__(self, rid: str) -> None:
        self.rid, self.origin_input_ids = rid, [0] * PROMPT


@dataclass
class Mask:
    """A grammar that excludes a token."""

    token: int

    def apply(self, logits: Tensor) -> None:
        logits[:, self.token] = -torch.inf


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> tuple[Tensor, list[int], list[Tensor]]:
    """A plain form of SGLang's verification of trees."""
    logits, info = logits_output.next_token_logits, batch.sampling_info
    size = verify_input.draft_token_num
    if info.acc_additive_penalties is not None:
        logits += info.acc_additive_penalties.repeat_interleave(size, 0)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    sampling = RequestSampling(info.temperatures[:, 0], info.top_ks, info.top_ps)
    warped = sampling.warped(logits.view(-1, size, VOCABULARY))
    drawn = torch.multinomial(warped.softmax(-1).flatten(0, 1), 1).view(-1, size)
    drawn = torch.where(sampling.greedy[:, None], warped.argmax(-1), drawn)
    predict, lengths, index = torch.zeros(drawn.numel(), dtype=torch.long), [], []
    tokens = verify_input.draft_token.view(-1, size)
    for row, rows in enumerate(verify_input.retrieve_index):
        node, path = 0, [int(rows[0])]
        while True:
            predict[path[-1]] = token = int(drawn[row, node])
            child = int(verify_input.retrieve_next_token[row, node])
            while child >= 0 and int(tokens[row, child]) != token:
                child = int(verify_input.retrieve_next_sibling[row, child])
            if child < 0:
                break
            node = child
            path.append(int(rows[child]))
        lengths.append(len(path))
        index.append(torch.tensor(path))
    return predict, lengths, index


class ServerArgs:
    """Arguments of a server, which SGLang checks when it starts."""

    model_path = str(BUNDLED_TARGET)
    speculative_draft_model_path = None
    speculative_accept_threshold_single = 1.0
    speculative_accept_threshold_acc = 1.0
    speculative_use_rejection_sampling = False
    enable_deterministic_inference = False

    def __init__(self, speculative_algorithm: str | None = "EAGLE", **values: Any) -> None:
        self.speculative_algorithm = speculative_algorithm
        vars(self).update(values)

    def check_server_args(self) -> None:
        """Accept everything."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A stand-in for SGLang; the value has the registered hooks by path."""
    hooks: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda path, hook, _: hooks.update({path: hook}))
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.overrides": {"resolved_view": lambda arguments: arguments},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
        },
        "sglang.srt.speculative": {},
        "sglang.srt.speculative.eagle_utils": {"eagle_sample": eagle_sample},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    yield hooks
    sys.modules.pop("eagle_fsd.engines.sglang.hooks", None)


def registered(
    hooks: dict[str, Any], values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """``eagle_sample`` with a rule, and the check of arguments."""
    monkeypatch.setenv("EAGLE_FSD_SETTINGS", json.dumps(values))
    plugin.register()
    around = hooks["sglang.srt.speculative.eagle_utils.eagle_sample"]
    after = hooks["sglang.srt.server_args.ServerArgs.check_server_args"]
    return (
        lambda *args, **options: around(eagle_sample, *args, **options),
        lambda *args, **options: after(None, ServerArgs(*args, **options)),
    )


@st.composite
def shapes(draw: st.DrawFn) -> list[list[int]]:
    """The parents of some trees of one size."""
    size = draw(st.integers(1, 14))
    trees = st.tuples(*(st.integers(0, max(node - 1, 0)) for node in range(size))).map(list)
    return draw(st.lists(trees.map(sorted), min_size=1, max_size=3))


@settings(max_examples=60)
@given(parents=shapes(), config=st.sampled_from(CONFIGS), seed=st.integers(0, 2**20))
def test_greedy_trees_keep_the_library_s_path(
    parents: list[list[int]], config: AcceptanceConfig, seed: int
) -> None:
    """SGLang's own verification keeps the library's path on irregular trees, for every rule."""
    batch, rule = Batch(parents, seed), rule_for(config)
    tree = linked_tree(batch.tokens, batch.child, batch.sibling, batch.size - 1)
    expected = batch.tree()
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(expected, name))
    verifier, kept = TreeVerifier(rule, logging.getLogger("test")), batch.verified(rule)

    def sample(verify_input: Any, info: Any, output: Any, mask: Any, **_: Any) -> Any:
        rows = verify_input.retrieve_index
        state = None
        if rule.state_size:
            names = [request.rid for request in batch.requests]
            state = verifier.states.of(names, lambda: torch.zeros(len(names)), rows.device)
        verifier(output.next_token_logits, rows, tree, None, state)
        return eagle_sample(verify_input, info, output, mask)

    found, _ = batch.sampled(sample)
    for row, tokens in enumerate(found):
        assert tokens == kept.tokens[row, : int(kept.count[row])].tolist()


def test_nodes_without_links_are_padding() -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    tree = linked_tree(tokens, torch.tensor([[1, -1, 3, -1]]), torch.full((1, 4), -1), 3)
    assert tree.parents.tolist() == [[0, 0, 2, 3]]
    assert tree.depths.tolist() == [[0, 1, 0, 0]]


CHAINS = [[0, 0, 0, 1, 1, 3, 3, 5]] * 3


def test_the_hook_relaxes_processed_logits(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule applies after penalties and grammars, and reported logits are not relaxed."""
    sample, _ = registered(engine, {"rule": "top-ratio 0.2"}, monkeypatch)
    rule, longer = rule_for(AcceptanceConfig(rule="top-ratio 0.2")), 0
    for seed in range(30):
        batch = Batch(CHAINS, seed)
        found, logits = batch.sampled(sample)
        assert torch.equal(logits, batch.logits)
        assert list(map(len, found)) == batch.verified(rule).count.tolist()
        longer += sum(map(len, found)) - sum(map(len, batch.sampled(eagle_sample)[0]))
        token = int(batch.tokens[0, 1])
        assert all(token not in tokens for tokens in batch.sampled(sample, Mask(token))[0])
        penalty = torch.zeros(3, VOCABULARY)
        penalty[:, token] = -100.0
        found, logits = batch.sampled(sample, acc_additive_penalties=penalty)
        assert all(token not in tokens for tokens in found)
        assert torch.equal(logits, batch.logits + penalty.repeat_interleave(8, 0))
    assert longer > 20


def test_the_hook_keeps_states_of_requests(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length of the answer, and what its fuzzy tokens have given up; none after its end."""
    batches = [Batch(CHAINS, 3, emitted=emitted) for emitted in (1, 5)]
    exact = [batch.sampled(eagle_sample)[0] for batch in batches]
    loose, _ = registered(engine, {"rule": "top-ratio 0.2"}, monkeypatch)
    relaxed = [batch.sampled(loose)[0] for batch in batches]
    assert relaxed[0] != exact[0]
    delayed, _ = registered(engine, {"rule": "top-ratio 0.2", "exact_first": 50}, monkeypatch)
    assert [batch.sampled(delayed)[0] for batch in batches] == exact
    values = {"rule": "top-ratio 0.2", "max_fuzzy_nats": 2.0}
    limited, _ = registered(engine, values, monkeypatch)
    steps = [batches[0].sampled(limited)[0] for _ in range(8)]
    assert steps[0] != exact[0]
    assert steps[-1] == exact[0]
    del batches[0].requests
    batches[0].requests = [Request(f"request {row}") for row in range(3)]
    assert batches[0].sampled(limited)[0] == steps[0]


def test_sampled_requests_follow_the_target_where_nothing_is_relaxed(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6,000 first tokens, among greedy requests; Hoeffding's bound for all tokens is below 1e-6."""
    sample, _ = registered(engine, {"rule": "top-ratio", "exact_first": 99}, monkeypatch)
    torch.manual_seed(0)
    batch = Batch(CHAINS[:1] * 600, 5, [0.8] * 599 + [0.0])
    batch.logits = batch.logits[:8].repeat(600, 1)
    batch.tokens, counts = batch.tokens[:1].repeat(600, 1), torch.zeros(VOCABULARY)
    for _ in range(10):
        found, _ = batch.sampled(sample)
        counts += torch.tensor([row[0] for row in found[:-1]]).bincount(minlength=VOCABULARY)
        assert found[-1][0] == int(batch.logits[0].argmax())
    law = (batch.logits[0] / 0.8).softmax(-1)
    assert (counts / counts.sum() - law).abs().max() < 0.038
    top = RequestSampling(torch.ones(1), torch.tensor([3]), torch.tensor([0.8]))
    kept = top.warped(torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()) > -torch.inf
    assert kept.tolist() == [[[True, True, False, False]]]  # 0.5 / 0.95 is below 0.8


def test_watermarked_batches_are_verified_without_the_rule(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, _ = registered(engine, {"rule": "top-ratio 0.2"}, monkeypatch)
    batch = Batch(CHAINS, 3)
    marked = {"watermark_state": object(), "has_watermark_candidates": True}
    assert batch.sampled(sample, **marked)[0] == batch.sampled(eagle_sample)[0]


def test_what_would_not_apply_is_refused(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plugin or the check of the server's arguments rejects settings that would not apply."""
    for values in ({}, {"threshold": 0.0}):
        monkeypatch.setenv("EAGLE_FSD_SETTINGS", json.dumps(values) if values else "")
        plugin.register()
        assert not engine
    for values, words in (
        ({"threshold": 0.1}, "without the draft's distributions"),
        ({"rule": "budget"}, "a random number of its own"),
        ({"rule": "mixture"}, "no rule 'mixture' in engines"),
    ):
        with pytest.raises(SystemExit, match=words):
            registered(engine, values, monkeypatch)
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("eagle_fsd.engines.sglang.h")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # another version
        with pytest.raises(SystemExit, match="does not support this version of SGLang"):
            registered(engine, {"rule": "regret"}, patch)
        patch.setenv("EAGLE_FSD_SETTINGS", "")
        plugin.register()
    target = {"name": "other", "dtype": "float32"}
    target["fingerprint"] = str(fingerprint_of_files(BUNDLED_TARGET, torch.float32))
    _, check = registered(engine, {"rule": "regret", "target": target}, monkeypatch)
    check()
    check("NGRAM")
    for algorithm, options, words in (
        (None, {}, "need --speculative-algorithm EAGLE, .* or NGRAM; got None"),
        ("DFLASH", {}, "got DFLASH"),
        ("EAGLE", {"speculative_accept_threshold_acc": 0.5}, "threshold_acc 1.0; got 0.5"),
        ("EAGLE", {"enable_deterministic_inference": True}, "got True"),
        ("EAGLE", {"model_path": str(BUNDLED_DRAFT_MODEL)}, "other weights"),
    ):
        with pytest.raises(OptionsError, match=words):
            check(algorithm, **options)
    hooks = importlib.import_module("eagle_fsd.engines.sglang.hooks")
    monkeypatch.setattr(hooks, "sglang_version", "0.6.0")
    with pytest.raises(SystemExit, match=r"supports SGLang 0\.5\.23; got 0\.6\.0$"):
        registered(engine, {"rule": "typical"}, monkeypatch)
