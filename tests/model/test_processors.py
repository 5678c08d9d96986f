"""Logits processors: Hugging Face's output, each tree node with its own prefix, masks that hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import (
    FUZZY,
    NEW,
    PLAIN,
    VOCABULARY,
    Recorder,
    answers,
    batch,
    by_row_and_last_token,
    greedy_reference,
    hand_made_tree,
    kindred_pair,
    path_to,
    prompt,
    reference,
)
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkLogitsProcessor,
)

from eagle_fsd.model.sampling import History, Sampler

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.6},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "no repeated tokens": {"no_repeat_ngram_size": 1},
    "a least length": {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    "suppressed tokens": {"suppress_tokens": list(range(0, VOCABULARY, 2))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(0, VOCABULARY, 2))},
    "allowed by prefix": {"prefix_allowed_tokens_fn": by_row_and_last_token},
    "bad words": {"bad_words_ids": [[44], [77], [58, 65], [41, 74]]},
    "a bias on sequences": {"sequence_bias": [[[9], -30.0], [[58, 8], 30.0], [[15, 31], 30.0]]},
    "a forced end": {"forced_eos_token_id": 5, "eos_token_id": 5, "pad_token_id": 5},
    "a rising end": {
        "exponential_decay_length_penalty": (4, 1.5),
        "eos_token_id": 5,
        "pad_token_id": 5,
    },
    "the prompt repeated more": {"encoder_repetition_penalty": 8.0},
    "the prompt's bigrams not again": {"encoder_no_repeat_ngram_size": 1},
    "two at once": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_a_generation_config(name: str, rows: int) -> None:
    """Hugging Face builds them from its options, for its loop and for ours.

    The text repeats itself every twelve tokens and most of it is accepted from the draft.
    """
    pair = kindred_pair(cycle=12)
    ids, mask = batch()
    ids, mask = (ids, mask) if rows == 4 else (ids[2:3], mask[2:3])
    options = {"pad_token_id": 0, **PROCESSORS[name]}
    expected = greedy_reference(pair.model, ids, mask, new=14, **options)
    plain = greedy_reference(pair.model, ids, mask, new=14)
    assert expected.shape != plain.shape or not torch.equal(expected, plain), "has no effect"
    found = greedy_reference(
        pair.model, ids, mask, new=14, custom_generate=pair.custom_generate, **options
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_processors_given_to_generate(method: str) -> None:
    """The same list of objects serves both loops."""
    pair = kindred_pair()
    ids, mask = batch()
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            NoRepeatNGramLogitsProcessor(2),
            SuppressTokensLogitsProcessor([3, 4, 5, 6]),
            PrefixConstrainedLogitsProcessor(by_row_and_last_token, num_beams=1),
            MinNewTokensLengthLogitsProcessor(ids.shape[1], 10, list(range(10, 40))),
        ]
    )
    expected = greedy_reference(pair.model, ids, mask, new=NEW, logits_processor=processors)
    out = pair.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, logits_processor=processors, method=method
    )
    assert torch.equal(out.sequences, expected)
    assert not torch.equal(expected[:, -NEW:], reference(PLAIN, kindred=True)[:, -NEW:])


class Hashing(LogitsProcessor):
    """Adds to every token a number that depends on the whole text so far; keeps the texts."""

    def __init__(self, strength: float = 4.0) -> None:
        self.strength = strength
        self.seen: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [tuple(row.tolist()) for row in input_ids]
        self.seen.update(rows)
        noise = [torch.randn(scores.shape[-1], generator=_seeded(row)) for row in rows]
        return scores + self.strength * torch.stack(noise).to(scores)


def _seeded(row: tuple[int, ...]) -> torch.Generator:
    seed = 0
    for token in row:
        seed = (seed * 1_000_003 + token + 1) % 2**31
    return torch.Generator().manual_seed(seed)


def test_a_processor_that_looks_at_the_whole_text_gives_hugging_faces_output() -> None:
    pair = kindred_pair()
    ids, mask = batch()
    expected = greedy_reference(
        pair.model, ids, mask, new=16, logits_processor=LogitsProcessorList([Hashing(2.0)])
    )
    out = pair.generate(
        ids, attention_mask=mask, max_new_tokens=16, logits_processor=[Hashing(2.0)]
    )
    assert torch.equal(out.sequences, expected)


def test_every_tree_node_is_processed_with_its_own_prefix() -> None:
    """Not only those on the path that is kept: each node of two rows of different lengths."""
    tree = hand_made_tree([40, 7, 9, 11, 12, 11, 80, 81], [0, 0, 0, 1, 1, 2, 3, 5], 2, shift=2)
    history = History(torch.stack([prompt(5, 1)[0], prompt(5, 2)[0]]), capacity=6)
    history.append(1, torch.tensor([60, 61, 62]), 2)
    history.tokens[0, 4], history.tokens[1, 6] = tree.tokens[0, 0], tree.tokens[1, 0]
    logits = torch.randn(2, 8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    evidence = Sampler(processors=[Hashing()])(tree, logits, history)
    for row, node in itertools.product(range(2), range(8)):
        text = history.tokens[row, : history.lengths[row]].tolist() + path_to(tree, row, node)[1:]
        expected = Hashing()(torch.tensor([text]), logits[row, node][None])[0].log_softmax(-1)
        torch.testing.assert_close(evidence.log_probs[row, node], expected)
    assert torch.equal(evidence.raw_log_probs, logits.log_softmax(-1))


PROMPT = prompt(5, 1)
OF_HUGGING_FACE: list[Callable[[], LogitsProcessor]] = [
    lambda: RepetitionPenaltyLogitsProcessor(3.0),
    lambda: NoRepeatNGramLogitsProcessor(1),
    lambda: EncoderRepetitionPenaltyLogitsProcessor(3.0, PROMPT),
    lambda: EncoderNoRepeatNGramLogitsProcessor(2, PROMPT),
    lambda: SequenceBiasLogitsProcessor([[[7], -3.0], [[7, 11], 5.0], [[11, 80, 3], 5.0]]),
    lambda: MinNewTokensLengthLogitsProcessor(5, 2, [9, 11]),
    lambda: ForcedEOSTokenLogitsProcessor(8, 3),
    lambda: ExponentialDecayLengthPenalty((2, 1.5), [3], 5),
    lambda: SuppressTokensAtBeginLogitsProcessor([9, 11], 6),
    lambda: PrefixConstrainedLogitsProcessor(by_row_and_last_token, num_beams=1),
    lambda: WatermarkLogitsProcessor(VOCABULARY, "cpu"),
    lambda: TopKLogitsWarper(5),
    lambda: LogitsProcessorList([TopPLogitsWarper(0.7), RepetitionPenaltyLogitsProcessor(3.0)]),
]


@pytest.mark.parametrize("make", OF_HUGGING_FACE)
def test_hugging_faces_processors_at_every_node(make: Callable[[], LogitsProcessor]) -> None:
    """At each node what the processor gives for that node's text alone.

    A node below an edge that the processor forbids is not asked about: it cannot be reached.
    """
    tree = hand_made_tree([40, 7, 9, 11, 12, 11, 80, 81], [0, 0, 0, 1, 1, 2, 3, 5])
    text = torch.cat([PROMPT[0], tree.tokens[0, :1]])
    history = History(text[None], capacity=6)
    logits = torch.randn(1, 8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    made = make()
    processors = made if isinstance(made, list) else [made]
    evidence = Sampler(processors=processors)(tree, logits, history)
    changed = 0
    forbidden: set[int] = set()
    for node in range(8):
        parent, token = int(tree.parents[0, node]), int(tree.tokens[0, node])
        if node and (parent in forbidden or evidence.log_probs[0, parent, token] == -torch.inf):
            forbidden.add(node)
            continue
        path = torch.tensor(path_to(tree, 0, node)[1:], dtype=torch.long)
        expected = make()(torch.cat([text, path])[None], logits[0, node][None].clone())[0]
        changed += not torch.equal(expected, logits[0, node])
        torch.testing.assert_close(evidence.log_probs[0, node], expected.log_softmax(-1))
    assert changed


def test_a_processor_is_shown_no_text_that_does_not_exist() -> None:
    """Every prefix is the text up to the root and a path of the tree; nothing is filled up.

    Processors of the users' own look texts up, parse them or refuse them.
    """
    pair = kindred_pair()
    rule, processor, ids = Recorder.make(), Hashing(0.5), prompt(6, 3)
    texts, real = [ids[0].tolist()], set()
    chunks = pair.stream(ids, max_new_tokens=12, rule=rule, logits_processor=[processor])
    for chunk in chunks:
        texts.append(texts[-1] + chunk.tokens)
    for text, evidence in zip(texts, rule.shown, strict=False):
        paths = (path_to(evidence.tree, 0, node)[1:] for node in range(evidence.tree.size))
        real.update(tuple(text + path) for path in paths)
    assert processor.seen == real


@pytest.mark.parametrize("outside", ["nothing allowed", "raises"])
def test_constrained_decoding_when_the_draft_leaves_the_constraint(outside: str) -> None:
    """A table of allowed texts, as for structured output: it knows nothing of other texts.

    Hugging Face's loop never asks it about one; a drafted token that the constraint forbids must
    not either, or must not hurt.
    """
    pair, ids = kindred_pair(), prompt(6, 3)
    free = greedy_reference(pair.model, ids, new=12)[0, 6:].tolist()
    steps = [free[:5], [*free[:2], 90, 91, 92], [94, *free[3:8]]]  # the words that may be written
    allowed: dict[tuple[int, ...], list[int]] = {}
    for word in steps:
        for end, token in enumerate([*word, 95]):
            allowed.setdefault(tuple(word[:end]), []).append(token)

    def follow(_row: int, text: Tensor) -> list[int]:
        written = tuple(text[6:].tolist())
        return allowed[written] if outside == "raises" else allowed.get(written, [])

    options = {"prefix_allowed_tokens_fn": follow, "eos_token_id": 95, "pad_token_id": 0}
    expected = greedy_reference(pair.model, ids, new=12, **options)
    assert expected[0, 6:].tolist() == [*free[:5], 95]
    found = greedy_reference(
        pair.model, ids, new=12, custom_generate=pair.custom_generate, **options
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
def test_a_forbidden_token_is_never_emitted_however_fuzzy(selection: str) -> None:
    """What a processor or top-k masked stays masked when everything else passes."""
    pair, ids = kindred_pair(), prompt(6, 3)
    free = answers(pair.generate(ids, max_new_tokens=30, threshold=FUZZY, selection=selection))
    banned = free[0].unique()[::2].tolist()
    out = pair.generate(
        ids,
        max_new_tokens=30,
        threshold=FUZZY,
        selection=selection,
        logits_processor=[SuppressTokensLogitsProcessor(banned)],
    )
    assert len(banned) > 5
    assert not torch.isin(answers(out), torch.tensor(banned)).any()


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
def test_top_k_of_one_is_greedy_however_fuzzy(selection: str) -> None:
    """Sampling from one token: the fuzzy gate is wide open and may not let another one in."""
    pair, ids = kindred_pair(), prompt(6, 3)
    out = pair.generate(
        ids, max_new_tokens=16, temperature=1.0, top_k=1, threshold=FUZZY, selection=selection
    )
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=16))
