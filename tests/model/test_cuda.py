"""Decoding on CUDA: captured steps emit what eager steps and Hugging Face's ``generate`` emit.

``benchmarks/gpu.sh`` runs this file by itself, so it needs only pytest, the bundled pair and the
tiny models of ``pairs.py``. ``EAGLE_FSD_TEST_DEVICE=cpu`` runs the tests without a GPU, where
nothing is captured, to check the tests themselves.

Greedy answers in float32 are equal up to the first position at which the target's two largest
logits differ by less than :data:`TIE`: there, rounding decides.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from pairs import (
    aligned_pair,
    greedy_reference,
    left_padded,
    new_random_pair,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

from eagle_fsd import EagleFSD, GenerateOutput, Prompt
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_EAGLE3, BUNDLED_HEAD
from eagle_fsd.bundled.problems import chat_messages, problems
from eagle_fsd.model.acceptance import ExactRule
from eagle_fsd.model.verify import VerificationInputs

DEVICE = os.environ.get("EAGLE_FSD_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE != "cpu"
TIE = 1e-4
#: Bytes that the allocator may round up; a call's caches and graphs are larger.
SLACK = 1 << 19
#: Bundled drafters, and whether their steps are captured: n-grams are looked up on the host.
DRAFTERS = {
    str(BUNDLED_HEAD): True,
    str(BUNDLED_EAGLE3): True,
    str(BUNDLED_DRAFT_MODEL): True,
    "ngram": False,
    "adaptive-ngram": False,
}

pytestmark = pytest.mark.skipif(
    ON_CUDA and not torch.cuda.is_available(), reason="there is no CUDA device"
)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An item for every graph that is replayed."""
    found: list[None] = []
    replay = torch.cuda.CUDAGraph.replay

    def count(graph: Any) -> None:
        found.append(None)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return found


@pytest.fixture(autouse=True)
def _highest_precision() -> Iterator[None]:
    """Compute float32 products in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@lru_cache
def bundled_pair(drafter: str = str(BUNDLED_HEAD)) -> EagleFSD:
    if drafter == str(BUNDLED_HEAD):
        return EagleFSD.from_pretrained(dtype=torch.float32, device_map=DEVICE)
    return EagleFSD.from_pretrained(bundled_pair().model, drafter, total_tokens=16, depth=6)


def new_aligned_pair(device: str = DEVICE) -> EagleFSD:
    """Return a tiny target with a long context, and a head that is right most of the time."""
    base = aligned_pair()
    model, head = copy.deepcopy((base.model, base.drafter))
    model.config.max_position_embeddings = 1024
    return EagleFSD(model.to(device), head, small_tree())


PAIRS: dict[str, Callable[[], EagleFSD]] = {
    "random": lru_cache(lambda: new_random_pair(device=DEVICE)),
    "aligned": lru_cache(new_aligned_pair),
}


def prompts(count: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """Return so many prompts of different lengths, padded on the left, and their mask."""
    lengths = (7, 1, 20, 2, 33)
    ids, mask = left_padded(*[prompt(lengths[row % 5], row) for row in range(count)])
    return ids.to(device), mask.to(device)


def chats(count: int) -> list[list[int]]:
    """Return tokens of word problems."""
    tokenizer = bundled_pair().tokenizer
    return [
        tokenizer.apply_chat_template(
            chat_messages((problem.question, ""))[:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for problem in problems("test", count)
    ]


def generate(
    pair: EagleFSD,
    replays: Sequence[None],
    ids: Tensor,
    mask: Tensor | None = None,
    captured: bool = True,
    **options: Any,
) -> list[GenerateOutput]:
    """Decode with graphs and without; ``captured`` says whether the former must replay some."""
    found = []
    for capture in (True, False):
        pair.capture, before = capture, len(replays)
        found.append(pair.generate(ids, mask, **options))
        assert (len(replays) > before) == (captured and capture and ON_CUDA)
    return found


def assert_greedy(model: PreTrainedModel, found: Tensor, expected: Tensor, start: int) -> None:
    """Assert that answers of Hugging Face and ours are equal; they begin at ``start``."""
    width = max(found.shape[1], expected.shape[1])
    rows = [torch.nn.functional.pad(item, (0, width - item.shape[1])) for item in (found, expected)]
    for row, (one, other) in enumerate(zip(*rows, strict=True)):
        different = (one != other).nonzero()
        if not len(different):
            continue
        first = int(different[0])
        assert first >= start
        # Prompts hold no zeros but for the padding before them.
        context = one[int((one != 0).nonzero()[0]) : first]
        with torch.no_grad():
            best = model(context[None]).logits[0, -1].topk(2)
        candidates = {int(one[first]), int(other[first])}
        gap = float(best.values[0] - best.values[1])
        assert gap < TIE, f"row {row}, token {first}: {candidates}"
        assert candidates == set(best.indices.tolist())


@pytest.mark.parametrize(("kind", "rows", "new"), [("random", 5, 48), ("aligned", 2, 560)])
def test_batches_are_decoded_as_by_hugging_face(
    kind: str, rows: int, new: int, replays: Sequence[None]
) -> None:
    """In long answers the number of visible slots changes, and with it the graph."""
    pair, (ids, mask) = PAIRS[kind](), prompts(rows)
    expected = greedy_reference(pair.model, ids, mask, new=new)
    for method in ("fsd", "ar"):
        for out in generate(pair, replays, ids, mask, max_new_tokens=new, method=method):
            assert_greedy(pair.model, out.sequences, expected, ids.shape[1])
            assert (out.stats.tau > 1.3) == (kind == "aligned" and method == "fsd")


@pytest.mark.parametrize("drafter", DRAFTERS, ids=[name.rpartition("/")[2] for name in DRAFTERS])
def test_drafters_decode_as_hugging_face(drafter: str, replays: Sequence[None]) -> None:
    pair = bundled_pair(drafter)
    ids, mask = left_padded(*[torch.tensor([tokens]) for tokens in chats(3)])
    ids, mask = ids.to(DEVICE), mask.to(DEVICE)
    expected = greedy_reference(pair.model, ids, mask, new=64)
    options: dict[str, Any] = {"max_new_tokens": 64, "threshold": 0.0, "pad_token_id": 0}
    for out in generate(pair, replays, ids, mask, DRAFTERS[drafter], **options):
        assert_greedy(pair.model, out.sequences, expected, ids.shape[1])


def test_answers_end_where_those_of_hugging_face_end() -> None:
    """Rows end by length, token or criterion, and the step launched ahead adds no tokens."""
    pair, (ids, mask) = PAIRS["aligned"](), prompts(4)
    free = greedy_reference(pair.model, ids, mask, new=40)[:, ids.shape[1] :]
    cases: list[tuple[int, int, dict[str, Any]]] = [(3, new, {}) for new in (1, 2, 3, 4, 5, 11)]
    for place in (0, 1, 5, 17, 30):
        eos = [int(free[0, place]), int(free[2, place // 2])]
        cases.append((4, 40, {"eos_token_id": eos, "pad_token_id": 0}))
    for divisor in (3, 7, 11):

        def ends(ids: Tensor, *_: Any, divisor: int = divisor, **_options: Any) -> Tensor:
            return ids[:, -1] % divisor == 0

        cases.append((1, 60, {"stopping_criteria": StoppingCriteriaList([ends])}))
    for rows, new, options in cases:
        own, own_mask = prompts(rows)
        expected = greedy_reference(pair.model, own, own_mask, new=new, **options)
        for capture in (True, False):
            pair.capture = capture
            out = pair.generate(own, own_mask, new, **options)
            assert_greedy(pair.model, out.sequences, expected, own.shape[1])
            assert out.sequences.shape == expected.shape


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.0, "temperature": 0.8, "top_p": 0.9},
        {"threshold": 0.0, "temperature": 1.0, "top_k": 20},
        {"threshold": 0.1, "min_ratio": 0.3},
        {"threshold": 0.2, "temperature": 0.7, "top_p": 0.95},
    ],
    ids=["top-p", "top-k", "FSD", "FSD-sampled"],
)
def test_captured_steps_sample_and_accept_as_eager_ones(
    options: dict[str, Any], replays: Sequence[None]
) -> None:
    pair, (ids, mask) = PAIRS["aligned"](), prompts(3)
    found = []
    for seed in (1, 2):
        outputs = generate(pair, replays, ids, mask, max_new_tokens=60, seed=seed, **options)
        for out in outputs:
            assert torch.equal(out.sequences, outputs[1].sequences)
            assert torch.equal(out.origins, outputs[1].origins)
        found.append(outputs[0].sequences)
    assert torch.equal(*found) == ("temperature" not in options)


def test_prompts_that_join_and_leave(replays: Sequence[None]) -> None:
    """The number of rows changes from step to step."""
    pair, (ids, mask) = PAIRS["aligned"](), prompts(7)
    rows = range(len(ids))
    expected = greedy_reference(pair.model, ids, mask, new=50)
    for capture in (True, False):
        pair.capture = capture
        requests = [
            Prompt(ids[row][mask[row] > 0], max_new_tokens=14 + 6 * row, temperature=0.0)
            for row in rows
        ]
        found = list(pair.generate_many(requests, max_batch=3))
        assert sorted(answer.index for answer in found) == list(rows)
        for answer in found:
            row, width = answer.index, ids.shape[1]
            assert len(answer.tokens) == 14 + 6 * row
            own = torch.cat([ids[row], ids.new_tensor(answer.tokens)])[None]
            assert_greedy(pair.model, own, expected[row : row + 1, : own.shape[1]], width)
    assert bool(replays) == ON_CUDA


class _ReadingRule(ExactRule):
    """Reads from the device, which no graph can contain."""

    reads: ClassVar[list[bool]] = []

    def gate(self, inputs: VerificationInputs) -> Tensor:
        self.reads.append(bool(inputs.raw.log_total.isnan().any()))
        return super().gate(inputs)


def test_steps_that_cannot_be_captured_run_eagerly(
    replays: Sequence[None], caplog: pytest.LogCaptureFixture
) -> None:
    """A failed capture leaves the stream, the allocator and the random numbers usable."""
    pair, (ids, mask) = new_random_pair(device=DEVICE), prompts(2)
    expected = greedy_reference(pair.model, ids, mask, new=24)
    stream = torch.cuda.current_stream() if ON_CUDA else None
    with caplog.at_level(logging.WARNING):
        for rule in (_ReadingRule(), _ReadingRule(), None):
            out = pair.generate(ids, mask, max_new_tokens=24, rule=rule)
            assert_greedy(pair.model, out.sequences, expected, ids.shape[1])
    assert _ReadingRule.reads
    assert not any(_ReadingRule.reads)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == int(ON_CUDA)
    assert all("without CUDA graphs" in message for message in messages)
    assert not replays
    if ON_CUDA:
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    numbers = [torch.rand(8, device=DEVICE) for _ in range(2)]
    assert not torch.equal(*numbers)
    sampled = pair.model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True)
    assert sampled.shape[1] == ids.shape[1] + 4
    # Other targets are captured.
    generate(new_random_pair(device=DEVICE), replays, ids, mask, max_new_tokens=24)


def test_targets_with_dynamic_rope_are_decoded_as_by_hugging_face() -> None:
    """Their rotary embedding reads the length from the device."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_target("qwen2", rope_parameters=rope).to(DEVICE)
    pair, (ids, mask) = EagleFSD(model, untrained_head(model), small_tree()), prompts(3)
    expected = greedy_reference(model, ids, mask, new=24)
    for _ in range(2):
        out = pair.generate(ids, mask, max_new_tokens=24)
        assert_greedy(model, out.sequences, expected, ids.shape[1])


@pytest.mark.skipif(
    ON_CUDA and torch.cuda.device_count() < 2, reason="there is no second CUDA device"
)
def test_a_device_that_is_not_the_current_one(replays: Sequence[None]) -> None:
    device = "cuda:1" if ON_CUDA else DEVICE
    pair, (ids, mask) = new_aligned_pair(device), prompts(3, device)
    expected = greedy_reference(pair.model, ids, mask, new=48)
    for out in generate(pair, replays, ids, mask, max_new_tokens=48):
        assert out.sequences.device == ids.device
        assert_greedy(pair.model, out.sequences, expected, ids.shape[1])
    if ON_CUDA:
        assert torch.cuda.current_device() == 0


def test_calls_and_graphs_keep_no_memory(replays: Sequence[None]) -> None:
    """Repeated calls take no more memory, and a model that is deleted frees all of it."""

    def allocated() -> int:
        gc.collect()
        if not ON_CUDA:
            return 0
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for every stream of a capture
        return torch.cuda.memory_allocated()

    PAIRS["random"]()  # allocates what libraries need
    generate(PAIRS["random"](), replays, *prompts(1), max_new_tokens=24)
    before = allocated()
    pair, levels = new_random_pair(device=DEVICE), []
    for count in (4, 6):
        for _ in range(count):
            generate(pair, replays, *prompts(2), max_new_tokens=24)
        levels.append(allocated())
    assert levels[1] - levels[0] < SLACK
    pair.capture = True
    pair.generate(*prompts(5), max_new_tokens=200)
    del pair
    assert allocated() - before < SLACK
