"""Many prompts in one batch: every answer is the one that its prompt gets alone."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from eagle3_heads import aligned_eagle3_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import (
    ACCEPT_ALL,
    VOCAB_SIZE,
    RecordingRule,
    aligned_pair,
    answer_alone,
    finish,
    greedy_reference,
    left_padded,
    new_random_pair,
    prompt,
    raises_one_line,
    random_pair,
    small_tree,
)
from transformers import LogitsProcessor, MaxLengthCriteria, RepetitionPenaltyLogitsProcessor

from eagle_fsd import DraftModel, EagleFSD, EagleHead, NGramDrafter, Prompt, TreeConfig
from eagle_fsd.model import engine, memory
from eagle_fsd.model.acceptance import FuzzyRule, LimitedRule, TypicalRule
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.execution import StepResult
from eagle_fsd.model.request import Answer
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target

PENALTY = [RepetitionPenaltyLogitsProcessor(1.5)]
#: Options that the rows of a batch mix.
WAYS: list[dict[str, Any]] = [
    {},
    {"method": "ar"},
    {"threshold": 0.3},
    {"threshold": ACCEPT_ALL, "min_ratio": 0.1},
    {"rule": TypicalRule()},
    {"rule": LimitedRule(FuzzyRule(ACCEPT_ALL), 3.0)},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "seed": 4, "threshold": 0.4},
    {"temperature": 1.0, "seed": 3, "method": "ar"},
    {"logits_processor": PENALTY},
    {"details": 2},
    {"eos_token_id": list(range(0, VOCAB_SIZE, 4))},
    {"stopping_criteria": [MaxLengthCriteria(11)]},
]


@st.composite
def requests(draw: st.DrawFn) -> list[Prompt]:
    """Prompts of different lengths and options."""
    found = []
    for number in range(draw(st.integers(1, 9))):
        way = draw(st.sampled_from(WAYS))
        ids = prompt(draw(st.integers(1, 30)), number)[0]
        found.append(Prompt(ids, max_new_tokens=draw(st.integers(1, 20)), **way))
    return found


def alone(pair: EagleFSD, item: Prompt) -> tuple[list[int], list[int]]:
    """The answer to a single prompt, and its origins."""
    ids = torch.as_tensor(item.ids)[None]
    out = pair.generate(ids, torch.ones_like(ids), **item.options)
    return out.sequences[0, ids.shape[1] :].tolist(), out.origins[0].tolist()


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(requests(), st.integers(1, 5), st.sampled_from([2, 7, 512]), st.booleans())
def test_every_answer_is_the_one_that_its_prompt_gets_alone(
    items: list[Prompt], rows: int, chunk: int, aligned: bool
) -> None:
    """Answers do not depend on the batch's order, size, lengths, settings or stop conditions."""
    pair = aligned_pair() if aligned else random_pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PREFILL_CHUNK", chunk)
        found = {item.index: item for item in pair.generate_many(items, max_batch=rows)}
    assert sorted(found) == list(range(len(items)))
    for index, item in enumerate(items):
        tokens, origins = alone(pair, item)
        assert found[index].tokens == tokens
        assert found[index].origins == origins
        assert len(found[index].details) == (len(tokens) if "details" in item.options else 0)
        assert found[index].stats.tokens == len(tokens)
        assert found[index].stats.prefilled <= len(item.ids) - 1


def test_chats_that_take_turns_keep_their_beginnings() -> None:
    """A new chat replaces the one that was not continued for the longest time."""
    pair = aligned_pair()
    batch = pair.batch(3, max_length=200)  # memory for three rows
    start = prompt(40, 9)[0].tolist()  # all chats begin like that

    def answer(ids: list[int]) -> tuple[list[int], int]:
        added = batch.add(pair.request(ids, 6))
        finish(batch)
        assert added.tokens == answer_alone(pair, torch.tensor([ids]), 6)
        return [*ids, *added.tokens, 5], added.stats.prefilled

    chats = [answer([*start, *prompt(60, number)[0].tolist()])[0] for number in range(4)]
    processed = {number: answer(chats[number])[1] for number in (3, 1, 2, 0)}
    assert max(processed[number] for number in (1, 2, 3)) < 10
    assert processed[0] > 50


def test_a_batch_goes_on_after_the_model_has_changed() -> None:
    """A hook is added, then another one, and then the vector that it adds is exchanged."""
    pair, vector = new_random_pair(), torch.zeros(32)
    layer, batch, seen = pair.model.base_model.layers[0], pair.batch(3), []
    negate, steer = (lambda *args: -args[2]), (lambda *args: args[2] + vector)
    for hook, count in ((None, 3), (negate, 1), (steer, 2), (None, 2)):
        if hook is not None:
            layer.register_forward_hook(hook)
        elif seen:
            vector = torch.linspace(-3.0, 3.0, 32)
        prompts = [prompt(5 + number, number) for number in range(count)]
        answers = [batch.add(pair.request(ids[0], 12)) for ids in prompts]
        finish(batch)
        for answer, ids in zip(answers, prompts, strict=True):
            expected = greedy_reference(pair.model, ids, new=12)
            assert answer.tokens == expected[0, ids.shape[1] :].tolist()
        seen.append([answer.tokens for answer in answers])
    assert seen[2] != seen[3]


@pytest.mark.parametrize("kind", ["head", "draft model"])
def test_hooks_of_a_drafter_run_in_an_open_batch_and_in_new_calls(kind: str) -> None:
    model = aligned_pair().model
    if kind == "head":
        head = copy.deepcopy(aligned_pair().drafter)
        pair, hooked = EagleFSD(model, head, small_tree()), head.layers[0]
    else:
        draft = copy.deepcopy(model)
        pair, hooked = EagleFSD(model, DraftModel(draft), small_tree()), draft.lm_head
    batch, ids, calls = pair.batch(1), prompt(6), []

    def accepted() -> set[float]:
        answer = batch.add(pair.request(ids[0], 20))
        finish(batch)
        out = pair.generate(ids, max_new_tokens=20)
        assert answer.tokens == out.sequences[0, 6:].tolist()
        return {answer.stats.tau, out.stats.tau}

    (before,) = accepted()
    hooked.register_forward_hook(lambda *args: calls.append(1) or -args[2])
    (after,) = accepted()
    assert after < before
    assert calls


@pytest.mark.parametrize("make", [aligned_pair, partial(aligned_eagle3_pair, 48)])
def test_draft_vocabulary_can_change_in_an_open_batch(make: Callable[[], EagleFSD]) -> None:
    shared = make()
    pair = EagleFSD(shared.model, copy.deepcopy(shared.drafter), small_tree())
    batch, ids, head = pair.batch(1), prompt(6), pair.drafter
    if isinstance(head, EagleHead):
        change, vocabularies = head.restrict_vocabulary, [None, range(2), range(48, 96), None]
    else:
        change, own = head.set_token_ids, head.token_ids
        vocabularies = [own, own.flip(0), own]
    expected = greedy_reference(pair.model, ids, new=20)[0, 6:].tolist()
    for vocabulary in vocabularies:
        change(None if vocabulary is None else torch.as_tensor(vocabulary))
        answer = batch.add(pair.request(ids[0], 20))
        finish(batch)
        assert answer.tokens == expected
        assert answer.stats.tau == pair.generate(ids, max_new_tokens=20).stats.tau


def test_cancelled_answers_leave_at_once_and_change_no_other() -> None:
    """A waiting, prefilling or decoding request can be cancelled without changing other answers."""
    pair = aligned_pair()
    batch = pair.batch(3)
    answers = [batch.add(pair.request(prompt(5, number)[0], 30)) for number in range(4)]
    batch.step()
    batch.cancel(answers[3])
    batch.cancel(answers[1])
    assert batch.rows == len(batch) == 2
    late = batch.add(pair.request(prompt(30, 9)[0], 30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PREFILL_CHUNK", 10)
        found = [answer for answer, _ in batch.step()]
        assert found == [answers[0], answers[2]]
        batch.cancel(late)
        assert batch.rows == 2
    while len(batch):
        assert all(answer in (answers[0], answers[2]) for answer, _ in batch.step())
    for number in (0, 2):
        assert answers[number].tokens == answer_alone(pair, prompt(5, number), 30)
    assert answers[1].finished
    assert len(answers[1].tokens) < 30


def test_out_of_memory_halves_the_batch_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows with different options keep their answers when memory runs out twice."""
    pair, step = aligned_pair(), Engine.step
    failures = [
        (3, torch.OutOfMemoryError("CUDA out of memory")),
        (5, RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ]
    steps = 0
    ways = [way for way in WAYS if not way.keys() & {"eos_token_id", "stopping_criteria"}]
    items = [
        Prompt(prompt(4 + number, number)[0], max_new_tokens=20, **options)
        for number, options in enumerate(ways)
    ]
    expected = [alone(pair, item) for item in items]
    spent: dict[Answer, float] = {}

    def fail(self: Engine) -> StepResult:
        nonlocal steps
        steps += 1
        for row in self.rows:
            seconds = sum(row.stats.seconds.values())
            assert seconds >= spent.get(row, 0.0)
            spent[row] = seconds
        if failures and steps >= failures[0][0] and len(self.rows) > 1:
            steps = 0
            raise failures.pop(0)[1]
        return step(self)

    monkeypatch.setattr(Engine, "step", fail)
    found = {item.index: item for item in pair.generate_many(items, max_batch=4)}
    assert [(found[index].tokens, found[index].origins) for index in range(len(ways))] == expected
    assert caplog.text.count("memory ran out") == 2


def test_a_prompt_that_runs_out_of_memory_fails_its_answer_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others are answered, those that were decoded together with it and those after it."""
    pair, prefill = aligned_pair(), Target.prefill

    def fail(self: Target, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if ids.shape[1] > 100:
            raise MemoryError
        return prefill(self, ids, *arguments)

    monkeypatch.setattr(Target, "prefill", fail)
    lengths = 5, 120, 6, 7, 8
    batch = pair.batch(2)
    for requests in (list(map(prompt, lengths)), [prompt(120)]):
        answers = [batch.add(pair.request(ids[0], 20)) for ids in requests]
        finish(batch)
        for ids, answer in zip(requests, answers, strict=True):
            if ids.shape[1] == 120:
                assert str(answer.error) == "there is not enough memory to decode one prompt"
            else:
                assert answer.tokens == answer_alone(pair, ids, 20)
        assert batch.max_rows == 2
    found = []
    with pytest.raises(MemoryError):
        found.extend(pair.generate_many([prompt(n)[0] for n in lengths], 4, max_batch=3))
    assert sorted(item.index for item in found) == [0, 2, 3, 4]


def test_batch_is_limited_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait for free memory, and prompts that never fit are rejected with the numbers."""
    pair = aligned_pair()
    pair.generate(prompt(4), max_new_tokens=4)  # so that the layout of the caches is known
    row = Engine(pair.target, pair.drafter, pair.tree).row_bytes(40)
    monkeypatch.setattr(
        memory, "free_bytes", lambda _: int(2.5 * row.total() / memory.USABLE_SHARE)
    )
    batch = pair.batch(8)
    answers = [batch.add(pair.request(prompt(11, number)[0], 30)) for number in range(5)]
    rejected = batch.add(pair.request(prompt(100)[0], 150))
    most = 0
    while len(batch):
        batch.step()
        most = max(most, batch.rows)
    assert most == 2
    for number, answer in enumerate(answers):
        assert answer.tokens == answer_alone(pair, prompt(11, number), 30)
    assert rejected.finished
    assert batch.seconds["draft"] > 0.0
    assert re.search(
        r"249 tokens .* \d\.\d\d GiB on cpu, where rows may take \d\.\d\d", str(rejected.error)
    )


def test_long_rows_do_not_stay_where_they_limit_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long request has ended, as many short ones are decoded at once as fit."""
    pair = aligned_pair()
    pair.generate(prompt(4), max_new_tokens=4)
    row = Engine(pair.target, pair.drafter, pair.tree).row_bytes(240)
    free = int(1.9 * row.total() / memory.USABLE_SHARE)
    monkeypatch.setattr(memory, "free_bytes", lambda _: free)
    batch, most = pair.batch(4), 0
    for length, count in ((200, 1), (10, 4)):
        for number in range(count):
            batch.add(pair.request(prompt(length, number)[0], 30))
        while len(batch):
            batch.step()
            most = max(most, batch.rows)
    assert most == 4
    # Nor do they if a request is always being decoded.
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2 * free - batch.nbytes)
    batch = pair.batch(4)
    batch.add(pair.request(prompt(200)[0], 30))
    batch.step()
    answers = [batch.add(pair.request(prompt(10, number)[0], 30)) for number in range(16)]
    rows = []
    while len(batch):
        batch.step()
        rows.append(batch.rows)
    assert rows.count(4) > 10
    for number, answer in enumerate(answers):
        assert answer.tokens == answer_alone(pair, prompt(10, number), 30)


def test_a_request_may_be_longer_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair()
    pair.generate(prompt(4), max_new_tokens=4)
    row = Engine(pair.target, pair.drafter, pair.tree).row_bytes(60)
    batch = pair.batch(8, max_length=60)
    total = int(6.5 * row.total() / memory.USABLE_SHARE)
    monkeypatch.setattr(memory, "free_bytes", lambda _: total - batch.nbytes)
    answer = batch.add(pair.request(prompt(4)[0], 90))
    finish(batch)
    assert answer.tokens == answer_alone(pair, prompt(4), 90)


def test_idle_caches_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of other trees are dropped while a request is being decoded."""
    pair = aligned_pair()
    pair.generate(prompt(4), max_new_tokens=4)
    row = Engine(pair.target, pair.drafter, pair.tree).row_bytes(240)
    batch = pair.batch(4)
    total = int(1.9 * row.total() / memory.USABLE_SHARE)
    monkeypatch.setattr(memory, "free_bytes", lambda _: total - batch.nbytes)
    batch.add(pair.request(prompt(200)[0], 30, threshold=0.5))
    finish(batch)
    assert batch.nbytes
    first = batch.add(pair.request(prompt(60)[0], 90, method="ar"))
    batch.step()
    second = batch.add(pair.request(prompt(160)[0], 60, method="ar"))
    batch.step()
    assert not first.finished
    assert len(second.tokens) > 0


def test_short_prompts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not padded to the longest prompt, and are answered first."""
    pair, prefill, processed = aligned_pair(), Target.prefill, 0

    def count(self: Target, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal processed
        processed += ids.numel()
        return prefill(self, ids, *arguments)

    check_target(pair.target, projected=True)
    monkeypatch.setattr(Target, "prefill", count)
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 16)
    batch, lengths = pair.batch(4), (9, 120, 12, 17)
    answers = [batch.add(pair.request(prompt(n)[0], 4)) for n in lengths]
    while not answers[0].finished:
        batch.step()
    assert not answers[1].tokens
    finish(batch)
    assert processed <= 3 * 16 + 119
    for n, answer in zip(lengths, answers, strict=True):
        assert answer.tokens == answer_alone(pair, prompt(n), 4)


def test_memory_of_a_row_includes_the_distributions_of_its_draft() -> None:
    """There is one for every node that a head expands, or below which n-grams may have followed."""
    shared, tree = aligned_pair(cycle=8), TreeConfig(total_tokens=30, top_k=8, depth=1)
    for drafter in (shared.drafter, NGramDrafter()):
        rule, pair = RecordingRule(), EagleFSD(shared.model, drafter, tree)
        pair.generate(torch.tensor([8 * [3, 4]]), max_new_tokens=8, rule=rule)
        found = max(step.tree.draft_log_probs.shape[1] for step in rule.steps)
        assert found == drafter.max_expanded(tree)


class Break(LogitsProcessor):
    """Return one value for every token, once the text has ten tokens if it is read."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        breaks = input_ids is None or input_ids.shape[1] > 9
        return torch.full_like(scores, self.value) if breaks else scores


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": Break(math.nan)},
        {"logits_processor": [*PENALTY, Break(-math.inf)], "method": "ar"},
        {"logits_processor": PENALTY, "logits_warper": Break(math.nan), "temperature": 1.0},
    ],
)
def test_processor_that_leaves_no_token_fails_its_answer_only(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The error names it, after all other answers, also of prompts read later."""
    pair = aligned_pair()
    items = [
        Prompt(prompt(4, number)[0], **(options if number == 1 else {})) for number in range(4)
    ]
    found = []
    message = r"no token can be chosen: Break returned NaN or \+inf scores, or -inf for all tokens"
    with raises_one_line(message, FloatingPointError) as error:
        found.extend(pair.generate_many(items, 20, max_batch=2))  # extend keeps what came before
    assert f"prompt 1 failed: {error.value}" in caplog.text
    assert sorted(item.index for item in found) == [0, 2, 3]
    for item in found:
        assert item.tokens == answer_alone(pair, prompt(4, item.index), 20)
    batch = pair.batch(2)
    answer = batch.add(pair.request(items[1].ids, 20, **options))
    finish(batch)
    assert str(answer.error) == str(error.value)
    if "logits_warper" not in options:
        assert len(answer.tokens) == 6


def test_a_prompt_with_a_seed_of_its_own_is_sampled_as_alone() -> None:
    """The others are sampled as rows of a call with their seed."""
    pair, (ids, mask) = aligned_pair(), left_padded(prompt(6), prompt(6), prompt(6))
    options: dict[str, Any] = {"max_new_tokens": 12, "sampling": {"temperature": 1.0, "seed": 5}}
    rows = pair.generate(ids, mask, **options).sequences[:, 6:].tolist()
    prompts = [ids[0], Prompt(ids[1], sampling=options["sampling"]), ids[2]]
    found = {item.index: item.tokens for item in pair.generate_many(prompts, **options)}
    assert [found[index] for index in range(3)] == [rows[0], rows[0], rows[2]]
    assert rows[0] != rows[1]


def test_trees_follow_the_number_of_rows() -> None:
    """Lossless answers stay the same while trees shrink to plain decoding and grow again."""
    given = aligned_pair()
    pair = EagleFSD(given.model, given.drafter, given.tree)
    for threshold in (0.0, 0.4):
        ways = [{}, {"temperature": 1.0, "seed": 1}] * 2
        items = [
            Prompt(prompt(3 + n, n)[0], max_new_tokens=5 + 9 * n, threshold=threshold, **way)
            for n, way in enumerate(ways)
        ]
        pair.batch_trees = {}
        expected = [alone(pair, item)[0] for item in items]
        pair.batch_trees = {2: small_tree(total_tokens=4), 4: TreeConfig(total_tokens=1)}
        batch, longest = pair.batch(4), dict.fromkeys(range(1, 5), 0)
        answers = [batch.add(pair.request(item.ids, **item.options)) for item in items]
        while len(batch):
            for _, chunk in (chunks := batch.step()):
                longest[len(chunks)] = max(longest[len(chunks)], len(chunk.tokens))
        assert [answer.tokens for answer in answers] == expected
        assert (longest[4] == 1) == (threshold == 0.0)
        assert longest[1] > 1
    pair.tree = pair.tree
    assert not pair.batch_trees


@pytest.mark.parametrize("cancelled", [False, True])
def test_row_of_broken_logits_can_be_used_again(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN left in the cache by the previous answer is cleared; a mask would let it through."""
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 8)
    given = aligned_pair()
    check_target(given.target)  # before the weights are broken
    model = copy.deepcopy(given.model)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    pair = EagleFSD(model, copy.deepcopy(given.drafter), given.tree)
    clean = [token for token in prompt(9)[0].tolist() if token != 7]
    batch = pair.batch(2)
    # Drafts must not contain the token whose embedding is broken.
    answers = [batch.add(pair.request(clean, 40, method="ar"))]
    batch.step()
    broken = batch.add(pair.request([*clean[:3], 7, *clean, *clean], 10, method="ar"))
    batch.step()  # its first chunk
    if cancelled:
        batch.cancel(broken)
    while not broken.finished:
        batch.step()
    assert isinstance(broken.error, FloatingPointError) != cancelled
    answers.append(batch.add(pair.request(clean, 10, method="ar")))
    finish(batch)
    assert [(answer.error, len(answer.tokens)) for answer in answers] == [(None, 40), (None, 10)]
