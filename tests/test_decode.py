"""The decoding loop against Hugging Face's own ``generate``, and all that ends or feeds it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    ARCHITECTURES,
    DEVICES,
    PLAIN,
    VOCABULARY,
    greedy_reference,
    hand_made_tree,
    kindred_pair,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    shared_pair,
    small_tree,
    tiny_pair,
    tiny_target,
    untrained_head,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from eagle_fsd import EagleFSD, FSDSettings, GenerateOutput, Origin
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.sampling import History, Sampler
from eagle_fsd.model.verify import Evidence, ExactRule, FuzzyRule

FUZZY = 10.0  # above every divergence of these pairs: whatever is drafted passes
NEW = 24


@lru_cache
def batch() -> tuple[Tensor, Tensor]:
    """Prompts of one, two, seven and twenty tokens, padded on the left."""
    return left_padded(prompt(7, 1), prompt(1, 2), prompt(20, 3), prompt(2, 4))


@lru_cache
def reference(architecture: str, kindred: bool = False) -> Tensor:
    """Hugging Face's greedy answer to :func:`batch`; varied, so that equality means something."""
    pair = kindred_pair(architecture) if kindred else shared_pair(architecture)
    ids, mask = batch()
    sequences = greedy_reference(pair.model, ids, mask, new=NEW)
    for row in sequences[:, ids.shape[1] :]:
        assert row.unique().numel() >= 8, "the reference repeats itself"
    return sequences


def answers(out: GenerateOutput) -> Tensor:
    """``[B, new]``."""
    return out.sequences[:, -out.origins.shape[1] :]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


# -- lossless -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_the_targets_own_greedy(architecture: str, device: str) -> None:
    """A batch of mixed lengths under an untrained head."""
    ids, mask = batch()
    pair = shared_pair(architecture) if device == "cpu" else _on(device, architecture)
    out = pair.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=NEW)
    assert torch.equal(out.sequences.cpu(), reference(architecture))
    assert not (out.origins == Origin.FUZZY).any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_the_targets_own_greedy_when_much_is_accepted(architecture: str) -> None:
    """Several tokens a step: rows advance at different speed and the caches are closed up."""
    ids, mask = batch()
    pair = kindred_pair(architecture)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(out.sequences, reference(architecture, kindred=True))
    assert out.stats.tau > 1.5
    assert len({tuple(row) for row in out.stats.accepted}) > 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_single_prompts_and_the_plain_method(architecture: str) -> None:
    """The plain path emits one token a pass; both equal the reference of the prompt alone."""
    pair = shared_pair(architecture)
    ids = prompt(9, 5)
    expected = greedy_reference(pair.model, ids, new=NEW)
    assert torch.equal(pair.generate(ids, max_new_tokens=NEW).sequences, expected)
    plain = pair.generate(ids, max_new_tokens=NEW, method="ar")
    assert torch.equal(plain.sequences, expected)
    assert plain.stats.tau == 1.0
    assert plain.stats.passes == NEW
    assert (plain.origins == Origin.TARGET).all()


def test_the_plain_method_on_a_batch_and_without_a_head() -> None:
    ids, mask = batch()
    model = shared_pair().model
    out = EagleFSD(model, None).generate(ids, attention_mask=mask, max_new_tokens=NEW, method="ar")
    assert torch.equal(out.sequences, reference(PLAIN))
    with pytest.raises(ValueError, match="no draft head"):
        EagleFSD(model, None).generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_few_tokens(length: int) -> None:
    """One token leaves no feature to draft from, two leave one."""
    pair = kindred_pair()
    ids = prompt(length, 8)
    out = pair.generate(ids, max_new_tokens=NEW)
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=NEW))
    assert out.stats.tau > 1.5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_threshold_zero_is_lossless_with_any_divergence(divergence: str) -> None:
    ids, mask = batch()
    out = kindred_pair().generate(
        ids, attention_mask=mask, max_new_tokens=16, divergence=divergence, threshold=0.0
    )
    assert torch.equal(out.sequences, reference(PLAIN, kindred=True)[:, : ids.shape[1] + 16])


@pytest.mark.parametrize(
    ("total_tokens", "depth", "top_k"),
    [(1, 1, 1), (2, 1, 1), (5, 4, 1), (4, 1, 8), (12, 2, 3), (60, 6, 10), (200, 2, 12), (7, 9, 2)],
)
@pytest.mark.parametrize("kindred", [False, True])
def test_any_tree_is_lossless(total_tokens: int, depth: int, top_k: int, kindred: bool) -> None:
    """Chains, single levels, trees that hold the whole pool and trees of nothing but the root."""
    ids, mask = batch()
    pair = kindred_pair() if kindred else shared_pair()
    out = pair.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        settings=FSDSettings(total_tokens=total_tokens, depth=depth, top_k=top_k),
    )
    assert torch.equal(out.sequences, reference(PLAIN, kindred)[:, : ids.shape[1] + 12])
    assert max(map(max, out.stats.accepted)) <= min(depth + 2, total_tokens)
    if kindred and total_tokens > 2:
        assert out.stats.tau > 1.5


@pytest.mark.parametrize("selection", ["longest", "target", "sample"])
@pytest.mark.parametrize("fallback", ["exact", "stop"])
def test_threshold_zero_is_lossless_whatever_the_other_settings(
    selection: str, fallback: str
) -> None:
    ids, mask = batch()
    out = kindred_pair().generate(
        ids, attention_mask=mask, max_new_tokens=12, selection=selection, fallback=fallback
    )
    assert torch.equal(out.sequences, reference(PLAIN, kindred=True)[:, : ids.shape[1] + 12])


def test_a_head_full_of_nan_costs_speed_and_nothing_else() -> None:
    """Lossless "with any head": the broken draft is never accepted for want of a comparison."""
    model = tiny_target()
    head = untrained_head(model)
    torch.nn.init.constant_(head.fc.weight, torch.nan)
    pair = EagleFSD(model, head, small_tree())
    ids = prompt(9, 5)
    expected = greedy_reference(model, ids, new=12)
    assert torch.equal(pair.generate(ids, max_new_tokens=12).sequences, expected)
    fuzzy = pair.generate(ids, max_new_tokens=12, threshold=FUZZY)
    assert torch.equal(fuzzy.sequences, expected)


@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype, method: str) -> None:
    """Rounding may pick another token than a plain pass would; the call itself must hold."""
    model = tiny_target(dtype=dtype)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=12, method=method, threshold=0.3)
    assert out.sequences.shape == (4, ids.shape[1] + 12)
    for row, kept, token in zip(ids, mask, answers(out)[:, 0], strict=True):
        logits = plain_logits(model, row[kept.bool()])[0][-1]
        assert logits.max() - logits[token] < 0.5  # the best token, up to rounding


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_integer_type(dtype: torch.dtype) -> None:
    ids, mask = batch()
    out = kindred_pair().generate(ids.to(dtype), attention_mask=mask, max_new_tokens=8)
    assert torch.equal(out.sequences.long(), reference(PLAIN, kindred=True)[:, : ids.shape[1] + 8])


# -- what a step sees -----------------------------------------------------------------------------


class Recorder(FuzzyRule):
    """Lets everything pass and keeps what it was shown."""

    def gate(self, evidence: Evidence) -> Tensor:
        self.shown.append(evidence)
        return super().gate(evidence)

    @classmethod
    def make(cls) -> Recorder:
        rule = cls(FUZZY)
        object.__setattr__(rule, "shown", [])
        return rule


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_every_step_both_caches_are_as_if_never_speculated(
    architecture: str, device: str
) -> None:
    """Whole paths are accepted at every step. Each tree node's target distribution is recomputed
    from its full text without a cache, and so is the draft's at every node the head expanded.

    The prompt of one token makes all rows begin with a plain step.
    """
    pair = shared_pair(architecture) if device == "cpu" else _on(device, architecture)
    ids, mask = left_padded(prompt(6, 1), prompt(1, 3), prompt(11, 2))
    ids, mask = ids.to(device), mask.to(device)
    rule = Recorder.make()
    texts = [[row[kept.bool()]] for row, kept in zip(ids, mask, strict=True)]  # before each step
    for chunk in pair.stream(ids, attention_mask=mask, max_new_tokens=12, rule=rule):
        new = torch.tensor(chunk.tokens, device=device)
        texts[chunk.row].append(torch.cat([texts[chunk.row][-1], new]))
    assert len(rule.shown) >= 3
    assert 12 / len(rule.shown) > 1.5
    for step, evidence in enumerate(rule.shown):
        tree = evidence.tree
        for row, node in itertools.product(range(3), range(tree.size)):
            text = texts[row][step]
            path = torch.tensor(path_to(tree, row, node)[1:], dtype=torch.long, device=device)
            logits, features = plain_logits(pair.model, torch.cat([text, path]))
            expected = logits[-1].log_softmax(-1)
            torch.testing.assert_close(
                evidence.raw_log_probs[row, node], expected, atol=1e-3, rtol=1e-3
            )
            if tree.draft_rows[row, node] >= 0:
                drafted = tree.draft_log_probs[row, tree.draft_rows[row, node]]
                expected = _draft_from_scratch(pair, features[: len(text) - 1], text, path)
                # Relative to the largest: a chain of passes without a norm has large features.
                scale = expected.abs().max()
                torch.testing.assert_close(drafted / scale, expected / scale, atol=1e-3, rtol=0.0)


def _draft_from_scratch(pair: EagleFSD, features: Tensor, text: Tensor, path: Tensor) -> Tensor:
    """The head's log-probabilities after ``path``, without a cache: one causal pass a token.

    Args:
        features: The target's, of every token of ``text`` but the last.
    """
    with torch.inference_mode():
        for extent in range(len(path) + 1):
            tokens = torch.cat([text[1:], path[:extent]])
            positions = torch.arange(len(tokens), device=tokens.device)
            predicted = pair.head(features[None], tokens[None], positions[None])[0]
            features = torch.cat([features, predicted[-1:]])
        return pair.head.readout(predicted[-1])


def test_exact_decoding_goes_on_from_a_fuzzy_text_as_from_any_other() -> None:
    """What a fuzzy call emitted is a prompt like any other: decoding on from it exactly is
    Hugging Face's greedy continuation."""
    pair = kindred_pair()
    out = pair.generate(prompt(6), max_new_tokens=20, threshold=FUZZY)
    assert out.stats.tau > 3.0
    assert (out.origins == Origin.FUZZY).any()
    onward = pair.generate(out.sequences, max_new_tokens=12)
    assert torch.equal(onward.sequences, greedy_reference(pair.model, out.sequences, new=12))


def test_a_node_marked_exact_or_target_carries_the_targets_arg_max() -> None:
    """Origins against a fresh pass over the emitted text, fuzzy tokens against it too."""
    pair = kindred_pair()
    out = pair.generate(prompt(6), max_new_tokens=40, threshold=FUZZY)
    text = out.sequences[0]
    best = plain_logits(pair.model, text)[0].argmax(-1)[5:-1]
    agrees = best == text[6:]
    assert torch.equal(agrees, out.origins[0] != Origin.FUZZY)
    assert not agrees.all()


# -- ending ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", range(1, 13))
@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_max_new_tokens_is_kept_to_the_token(new: int, threshold: float) -> None:
    """Steps emit up to five tokens: the last one is cut, the text before it is the same."""
    pair = kindred_pair()
    ids, mask = batch()
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=new, threshold=threshold)
    longer = pair.generate(ids, attention_mask=mask, max_new_tokens=14, threshold=threshold)
    assert torch.equal(out.sequences, longer.sequences[:, : ids.shape[1] + new])
    assert out.origins.shape == (4, new)
    assert (out.origins != Origin.PADDING).all()
    assert out.stats.tokens == 4 * new
    assert longer.stats.tau > 1.5


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kindred", [False, True])
@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_end_of_sequence_as_in_hugging_face(method: str, kindred: bool, count: int) -> None:
    """Nothing after the first, padding behind it, rows that go on are not disturbed."""
    ids, mask = batch()
    pair = kindred_pair() if kindred else shared_pair()
    free = reference(PLAIN, kindred)[:, ids.shape[1] :]
    eos = [int(free[0, 6]), int(free[2, 17])][:count]
    expected = greedy_reference(pair.model, ids, mask, new=NEW, eos_token_id=eos, pad_token_id=0)
    out = pair.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        eos_token_id=eos[0] if count == 1 else eos,
        method=method,
    )
    for row, origins in enumerate(out.origins):
        length = int((origins != Origin.PADDING).sum())
        emitted = answers(out)[row, :length]
        assert (origins[:length] != Origin.PADDING).all()
        assert torch.equal(emitted, expected[row, ids.shape[1] :][:length])
        assert (expected[row, ids.shape[1] + length :] == 0).all()
        ended = torch.isin(emitted, torch.tensor(eos))
        assert not ended[:-1].any()
        assert ended[-1] or length == NEW
    assert out.sequences.shape == expected.shape
    assert (out.origins[0] == Origin.PADDING).any()


@pytest.mark.parametrize("position", range(6))
def test_end_of_sequence_anywhere_in_a_fuzzy_step(position: int) -> None:
    pair = kindred_pair()
    ids = prompt(6, 3)
    free = answers(pair.generate(ids, max_new_tokens=12, threshold=FUZZY))[0]
    eos = int(free[position])
    first = free.tolist().index(eos)
    out = pair.generate(ids, max_new_tokens=12, threshold=FUZZY, eos_token_id=eos)
    assert answers(out)[0].tolist() == free[: first + 1].tolist()


def test_the_targets_own_end_of_sequence_is_the_default() -> None:
    ids = prompt(6, 3)
    model = tiny_target()
    free = greedy_reference(model, ids, new=20)[0, 6:]
    model.generation_config.eos_token_id = [int(free[9]), int(free[15])]
    model.generation_config.pad_token_id = 0
    out = EagleFSD(model, untrained_head(model), small_tree()).generate(ids, max_new_tokens=20)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert expected.shape[1] < 26


def test_the_targets_padding_token_fills_rows_that_ended_and_marks_prompts() -> None:
    """Without an attention mask the padding token is what is not a prompt, as in Hugging Face."""
    model = tiny_target(pad_token_id=0)
    model.generation_config.pad_token_id = 0
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    free = greedy_reference(model, ids, mask, new=NEW)
    eos = int(free[0, ids.shape[1] + 4])
    expected = greedy_reference(model, ids, mask, new=NEW, eos_token_id=eos)
    out = pair.generate(ids, max_new_tokens=NEW, eos_token_id=eos)
    assert torch.equal(out.sequences, expected)
    assert (out.sequences[0, -5:] == 0).all()


class EverySeventh(StoppingCriteria):
    """Ends a row when the sum of its ids is a multiple of seven; answers with one flag a row."""

    def __call__(self, input_ids: Tensor, scores: Any, **_options: Any) -> Tensor:
        return input_ids.sum(1) % 7 == 0


@pytest.mark.parametrize("make", [EverySeventh, lambda: MaxLengthCriteria(max_length=33)])
@pytest.mark.parametrize("kindred", [False, True])
def test_stopping_criteria_are_asked_after_every_token(
    make: Callable[[], StoppingCriteria], kindred: bool
) -> None:
    ids, mask = batch()
    pair = kindred_pair() if kindred else shared_pair()
    expected = greedy_reference(
        pair.model, ids, mask, new=NEW, stopping_criteria=StoppingCriteriaList([make()])
    )
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW, stopping_criteria=[make()])
    width = out.sequences.shape[1]
    assert width < ids.shape[1] + NEW or isinstance(make(), EverySeventh)
    assert (out.origins == Origin.PADDING).any() or isinstance(make(), MaxLengthCriteria)
    for row in range(4):
        length = ids.shape[1] + int((out.origins[row] != Origin.PADDING).sum())
        assert torch.equal(out.sequences[row, :length], expected[row, :length])
        # Hugging Face only pads behind a row that its criteria ended when there is an eos token.
        stopped = [
            bool(make()(out.sequences[row : row + 1, :end], None).all())
            for end in range(ids.shape[1] + 1, length + 1)
        ]
        assert not any(stopped[:-1])
        assert stopped[-1] or length == ids.shape[1] + NEW


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_stopping_criteria_within_a_step_of_many_tokens(threshold: float) -> None:
    """Any length of text can be the last."""
    pair = kindred_pair()
    ids = prompt(6, 3)
    free = pair.generate(ids, max_new_tokens=10, threshold=threshold).sequences
    for length in range(7, 16):
        stop = StoppingCriteriaList([MaxLengthCriteria(max_length=length)])
        out = pair.generate(ids, max_new_tokens=10, threshold=threshold, stopping_criteria=stop)
        assert torch.equal(out.sequences, free[:, :length])


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One character a token, so that any text and any stop string can be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    core = Tokenizer(models.BPE(vocab={item: i for i, item in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_stop_strings(threshold: float) -> None:
    """A string over several tokens ends the text with the token that completes it."""
    pair, ids = kindred_pair(), prompt(6, 3)
    free = pair.generate(ids, max_new_tokens=20, threshold=threshold).sequences
    text = tokenizer().decode(free[0, 15:18])
    criteria = StopStringCriteria(tokenizer(), text)
    out = pair.generate(ids, max_new_tokens=20, threshold=threshold, stopping_criteria=[criteria])
    assert torch.equal(out.sequences, free[:, :18])
    if threshold == 0.0:
        expected = greedy_reference(
            pair.model, ids, new=20, stop_strings=[text], tokenizer=tokenizer()
        )
        assert torch.equal(out.sequences, expected)


def test_the_context_ends_the_answer() -> None:
    """A row never grows beyond the positions the target has; a full prompt is refused."""
    model = tiny_target(max_position_embeddings=24)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids = prompt(15)
    for threshold in (0.0, FUZZY):
        out = pair.generate(ids, max_new_tokens=100, threshold=threshold)
        assert out.sequences.shape == (1, 24)
        assert (out.origins != Origin.PADDING).all()
    expected = greedy_reference(model, ids, new=9)
    assert torch.equal(pair.generate(ids, max_new_tokens=100).sequences, expected)
    assert pair.generate(prompt(23), max_new_tokens=100).sequences.shape == (1, 24)
    for length in (24, 30):
        with pytest.raises(ValueError, match=rf"prompt has {length} tokens.*holds 24"):
            pair.generate(prompt(length), max_new_tokens=1)


# -- logits processors ----------------------------------------------------------------------------


def by_row_and_last_token(row: int, ids: Tensor) -> list[int]:
    """Which tokens may follow: depends on the prompt's number and on the last token."""
    return [token for token in range(VOCABULARY) if (token + int(ids[-1]) + row) % 3]


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


# -- Hugging Face's own interface -----------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("eos", [False, True])
def test_custom_generate_is_generate(rows: int, eos: bool) -> None:
    """Also the padding behind rows that ended, which is the call's own padding token."""
    pair = kindred_pair()
    ids, mask = batch()
    ids, mask = ids[:rows], mask[:rows]
    options: dict[str, Any] = {"pad_token_id": 77}
    if eos:
        free = reference(PLAIN, kindred=True)
        options["eos_token_id"] = [int(free[0, ids.shape[1] + 5]), int(free[-1, -9])]
    expected = greedy_reference(pair.model, ids, mask, new=NEW, **options)
    found = greedy_reference(
        pair.model, ids, mask, new=NEW, custom_generate=pair.custom_generate, **options
    )
    assert torch.equal(found, expected)


def test_custom_generate_pads_with_the_first_end_of_sequence_token_by_default() -> None:
    """Hugging Face's rule, also when the first of several is not the smallest."""
    pair = kindred_pair()
    ids, mask = batch()
    free = reference(PLAIN, kindred=True)
    eos = [int(free[0, ids.shape[1] + 5]), int(free[2, ids.shape[1] + 8])]
    for ends in (eos, eos[::-1]):
        options = {"eos_token_id": ends, "pad_token_id": None}
        expected = greedy_reference(pair.model, ids, mask, new=NEW, **options)
        assert (expected[:, -1] == ends[0]).any()
        found = greedy_reference(
            pair.model, ids, mask, new=NEW, custom_generate=pair.custom_generate, **options
        )
        assert torch.equal(found, expected)


def test_custom_generate_takes_fsd_options_and_plain_ones() -> None:
    pair, ids = shared_pair(), prompt(6, 3)
    fuzzy = pair.generate(ids, max_new_tokens=20, threshold=FUZZY).sequences
    assert not torch.equal(fuzzy, pair.generate(ids, max_new_tokens=20).sequences)
    found = greedy_reference(
        pair.model, ids, new=20, custom_generate=pair.custom_generate, threshold=FUZZY
    )
    assert torch.equal(found, fuzzy)
    plain = greedy_reference(
        pair.model, ids, new=20, custom_generate=pair.custom_generate, method="ar"
    )
    assert torch.equal(plain, greedy_reference(pair.model, ids, new=20))


def test_custom_generate_samples_with_the_calls_options() -> None:
    """One seed gives one text, two give two; top-k of one is greedy again."""
    pair, ids = kindred_pair(), prompt(6, 3)

    def sample(**options: Any) -> Tensor:
        return pair.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=True,
            pad_token_id=0,
            custom_generate=pair.custom_generate,
            **options,
        )

    first, again, other = (sample(temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(sample(top_k=1, seed=3), greedy_reference(pair.model, ids, new=16))
    torch.manual_seed(11)
    first = sample()
    torch.manual_seed(11)
    assert torch.equal(first, sample())


def test_custom_generate_refuses_what_it_cannot_do() -> None:
    pair, ids = shared_pair(), prompt(6, 3)
    options = {"max_new_tokens": 4, "custom_generate": pair.custom_generate}
    with pytest.raises(ValueError, match="beam"):
        pair.model.generate(ids, num_beams=2, **options)
    with pytest.raises(ValueError, match="another target"):
        tiny_target().generate(ids, **options)


# -- streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_a_stream_is_the_answer_in_parts(threshold: float) -> None:
    """Every row's chunks make up its answer; the last one says so, and nothing follows it."""
    pair = kindred_pair()
    ids, mask = batch()
    eos = int(reference(PLAIN, kindred=True)[0, ids.shape[1] + 5])
    options = {"attention_mask": mask, "max_new_tokens": 20, "threshold": threshold}
    out = pair.generate(ids, **options, eos_token_id=eos)
    tokens: list[list[int]] = [[] for _ in range(4)]
    origins: list[list[int]] = [[] for _ in range(4)]
    sizes: list[list[int]] = [[] for _ in range(4)]
    finished: set[int] = set()
    for chunk in pair.stream(ids, **options, eos_token_id=eos):
        assert chunk.row not in finished
        assert len(chunk.tokens) == len(chunk.origins) >= 1
        tokens[chunk.row] += chunk.tokens
        origins[chunk.row] += chunk.origins
        sizes[chunk.row].append(len(chunk.tokens))
        if chunk.finished:
            finished.add(chunk.row)
    assert finished == set(range(4))
    assert sizes == out.stats.accepted
    for row in range(4):
        length = len(tokens[row])
        assert tokens[row] == answers(out)[row, :length].tolist()
        assert origins[row] == out.origins[row, :length].tolist()
        assert (out.origins[row, length:] == Origin.PADDING).all()


def test_a_stream_checks_its_arguments_when_it_is_called() -> None:
    with pytest.raises(ValueError, match="threshold"):
        shared_pair().stream(prompt(4), threshold=-1.0)


def test_a_stream_comes_step_by_step_and_may_be_left() -> None:
    """Nothing is decoded ahead of what was asked for; other calls go on undisturbed."""
    pair = tiny_pair()
    passes = []
    pair.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    chunks = iter(pair.stream(prompt(6), max_new_tokens=40))
    next(chunks)
    assert len(passes) == 2  # prefill and one step
    next(chunks)
    assert len(passes) == 3
    chunks.close()
    out = pair.generate(prompt(6), max_new_tokens=8)
    assert torch.equal(out.sequences, greedy_reference(pair.model, prompt(6), new=8))


def test_streams_in_turn_do_not_disturb_each_other() -> None:
    """Two calls at once on one pair, as a server makes them."""
    pair = kindred_pair()
    prompts = [prompt(6, 3), prompt(9, 4)]
    found: list[list[int]] = [[], []]
    streams = [pair.stream(ids, max_new_tokens=20) for ids in prompts]
    for pieces in itertools.zip_longest(*streams):
        for tokens, piece in zip(found, pieces, strict=True):
            tokens += piece.tokens if piece else []
    for ids, tokens in zip(prompts, found, strict=True):
        assert tokens == greedy_reference(pair.model, ids, new=20)[0, ids.shape[1] :].tolist()


def test_a_call_within_a_call_does_not_disturb_it() -> None:
    """What two threads on one pair do to each other, made to happen in the middle of every pass.

    With everything accepted the text depends on the features that each pass hands on.
    """
    pair, ids = tiny_pair(), prompt(6, 3)
    undisturbed = pair.generate(ids, max_new_tokens=20, threshold=FUZZY)
    busy, count = False, 0

    def interrupt(*_args: Any) -> None:
        nonlocal busy, count
        if not busy:
            busy, count = True, count + 1
            pair.generate(prompt(4, count), max_new_tokens=2)
            busy = False

    # After the first layer: the outer pass has begun and has not ended.
    pair.model.base_model.layers[0].register_forward_hook(interrupt)
    out = pair.generate(ids, max_new_tokens=20, threshold=FUZZY)
    assert count == 1 + out.stats.passes
    assert torch.equal(out.sequences, undisturbed.sequences)
    assert out.stats.accepted == undisturbed.stats.accepted


class Collector(BaseStreamer):
    """What a streamer is given, call by call."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_then_each_step() -> None:
    pair, ids, collector = kindred_pair(), prompt(6, 3), Collector()
    out = pair.generate(ids, max_new_tokens=15, streamer=collector)
    assert collector.ended == 1
    assert collector.puts[0] == ids[0].tolist()
    assert joined(collector.puts[1:]) == answers(out)[0].tolist()
    assert [len(item) for item in collector.puts[1:]] == out.stats.accepted[0]


def test_a_streamer_through_hugging_faces_interface() -> None:
    """transformers 5.23 puts the prompt but keeps ``generate``'s streamer from a callable, so it
    may be bound to the callable; given either way it is accepted and the text is the same."""
    pair, ids, collector = kindred_pair(), prompt(6, 3), Collector()
    expected = greedy_reference(pair.model, ids, new=15)
    bound = partial(pair.custom_generate, streamer=collector)
    found = greedy_reference(pair.model, ids, new=15, custom_generate=bound)
    assert torch.equal(found, expected)
    assert joined(collector.puts) == expected[0, 6:].tolist()
    assert collector.ended == 1
    given = Collector()
    found = greedy_reference(
        pair.model, ids, new=15, custom_generate=pair.custom_generate, streamer=given
    )
    assert torch.equal(found, expected)
    assert given.puts[0] == ids[0].tolist()


def test_a_text_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Hugging Face's own, which is made for one token at a time."""
    pair, ids = kindred_pair(), prompt(6, 3)
    streamer = TextStreamer(tokenizer(), skip_prompt=True)
    out = pair.generate(ids, max_new_tokens=15, streamer=streamer)
    assert capsys.readouterr().out == tokenizer().decode(answers(out)[0]) + "\n"


def test_a_streamer_follows_one_prompt() -> None:
    with pytest.raises(ValueError, match="one prompt"):
        shared_pair().generate(batch()[0], streamer=Collector())


# -- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ar"},
        {"threshold": 0.0},
        {"threshold": 0.3},
        {"threshold": 0.3, "selection": "sample", "top_p": 0.9, "temperature": 0.7},
    ],
)
def test_a_seed_makes_sampling_repeatable(options: dict[str, Any], device: str) -> None:
    """Same seed, same text; other seeds, other texts; torch's own generator is left alone."""
    ids, mask = (item.to(device) for item in batch())
    pair = kindred_pair() if device == "cpu" else _on(device)

    def sample(seed: int) -> Tensor:
        settings = {"temperature": 1.0, "attention_mask": mask, "max_new_tokens": 12, **options}
        return pair.generate(ids, seed=seed, **settings).sequences

    state = torch.get_rng_state()
    first, again, other = sample(7), sample(7), sample(8)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_calls_differ_and_follow_torchs_own() -> None:
    pair, ids = kindred_pair(), prompt(6, 3)
    torch.manual_seed(3)
    first, second = (pair.generate(ids, temperature=1.0, max_new_tokens=12) for _ in range(2))
    torch.manual_seed(3)
    again = pair.generate(ids, temperature=1.0, max_new_tokens=12)
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, second.sequences)


def test_low_temperature_is_greedy() -> None:
    pair, ids = kindred_pair(), prompt(6, 3)
    out = pair.generate(ids, temperature=1e-3, max_new_tokens=20, seed=0)
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=20))


# -- batches and figures --------------------------------------------------------------------------


#: The one-token prompt is left out: without a feature the whole batch begins with a plain step.
COMPANY = [prompt(length, seed) for length, seed in ((7, 1), (2, 2), (20, 3), (3, 4), (9, 5))]


@lru_cache
def alone(kindred: bool, threshold: float) -> list[GenerateOutput]:
    """Each prompt of ``COMPANY`` by itself."""
    pair = kindred_pair() if kindred else shared_pair()
    return [pair.generate(ids, max_new_tokens=14, threshold=threshold) for ids in COMPANY]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.3, FUZZY])
@pytest.mark.parametrize("kindred", [False, True])
def test_rows_are_independent(kindred: bool, threshold: float, early: bool) -> None:
    """A row in company emits what it emits alone, also after others have ended and it has moved."""
    pair = kindred_pair() if kindred else shared_pair()
    singles = alone(kindred, threshold)
    ids, mask = left_padded(*COMPANY)
    eos: list[int] = []
    if early:
        eos = [int(answers(singles[row])[0, place]) for row, place in ((0, 3), (1, 8), (3, 11))]
    together = pair.generate(
        ids, attention_mask=mask, max_new_tokens=14, threshold=threshold, eos_token_id=eos
    )
    lengths = (together.origins != Origin.PADDING).sum(1).tolist()
    assert together.stats.tau > 1.5 or not kindred
    for row, single in enumerate(singles):
        tokens = answers(single)[0].tolist()
        ends = [place for place, token in enumerate(tokens, 1) if token in eos]
        assert lengths[row] == min([*ends, 14])
        assert answers(together)[row, : lengths[row]].tolist() == tokens[: lengths[row]]
        assert torch.equal(together.origins[row, : lengths[row]], single.origins[0, : lengths[row]])
        steps = len(together.stats.accepted[row])
        assert together.stats.accepted[row][:-1] == single.stats.accepted[0][: steps - 1]
    assert len(set(lengths)) >= 3 or not early


def test_rows_that_ended_cost_nothing_more() -> None:
    """The batch of later passes is smaller, and processors stay with their rows."""
    pair = tiny_pair()
    ids, mask = batch()
    free = reference(PLAIN)[:, ids.shape[1] :]
    eos = [int(free[0, 2]), int(free[2, 5])]
    rows = []
    pair.model.lm_head.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape))
    processor = PrefixConstrainedLogitsProcessor(by_row_and_last_token, num_beams=1)
    options = {"attention_mask": mask, "max_new_tokens": 20}
    pair.generate(ids, **options, eos_token_id=eos, method="ar")
    counts = [shape[0] for shape in rows]
    assert counts[0] == 4
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < 4
    expected = greedy_reference(
        pair.model, ids, mask, new=20, logits_processor=LogitsProcessorList([processor])
    )[:, ids.shape[1] :]
    eos = [int(expected[0, 2]), int(expected[2, 5])]
    out = pair.generate(ids, **options, eos_token_id=eos, logits_processor=[processor])
    for row, origins in enumerate(out.origins):
        length = int((origins != Origin.PADDING).sum())
        assert torch.equal(answers(out)[row, :length], expected[row, :length])
    assert (out.origins == Origin.PADDING).any()


@pytest.mark.parametrize("threshold", [0.0, 0.6, FUZZY])
def test_figures_agree_with_what_was_emitted(threshold: float) -> None:
    pair = kindred_pair()
    ids, mask = batch()
    eos = int(reference(PLAIN, kindred=True)[0, ids.shape[1] + 5])
    out = pair.generate(
        ids, attention_mask=mask, max_new_tokens=20, threshold=threshold, eos_token_id=eos
    )
    figures = out.stats.as_dict()
    emitted = out.origins != Origin.PADDING
    assert figures["tokens"] == int(emitted.sum()) == sum(figures["origins"].values())
    for origin in (Origin.EXACT, Origin.FUZZY, Origin.TARGET):
        count = int((out.origins == origin).sum())
        assert figures["origins"][origin.name.lower()] == count
        assert out.stats.share(origin) == pytest.approx(count / figures["tokens"])
    assert [sum(row) for row in out.stats.accepted] == emitted.sum(1).tolist()
    assert figures["steps"] == sum(len(row) for row in out.stats.accepted)
    assert figures["passes"] == max(len(row) for row in out.stats.accepted)
    assert figures["tau"] == pytest.approx(figures["tokens"] / figures["steps"])
    # A step emits at most one token of the target's own, always its last.
    for row, accepted in enumerate(out.stats.accepted):
        ends = torch.tensor(accepted).cumsum(0) - 1
        inner = torch.ones(int(emitted[row].sum()), dtype=torch.bool)
        inner[ends] = False
        assert not (out.origins[row, : len(inner)][inner] == Origin.TARGET).any()
    assert (figures["origins"]["fuzzy"] > 0) == (threshold > 0)
    assert figures["tokens_per_second"] > 0
    assert set(figures["seconds"]) >= {"prefill", "draft", "tree", "target", "verify", "cache"}
    assert all(value >= 0 for value in figures["seconds"].values())
    assert figures["seconds"]["target"] > 0


def test_accepted_lengths_grow_with_the_threshold() -> None:
    """On the same prompts: nothing fuzzy, some, all."""
    pair, (ids, mask) = kindred_pair(), batch()
    taus = [
        pair.generate(ids, attention_mask=mask, max_new_tokens=60, threshold=threshold).stats.tau
        for threshold in (0.0, 0.5, FUZZY)
    ]
    assert taus[0] < taus[1] < taus[2]
    assert taus[2] > pair.settings.depth + 1


def test_another_rule_may_stand_in() -> None:
    """Whatever the threshold says, the exact rule is lossless."""
    pair, ids = kindred_pair(), prompt(6, 3)
    out = pair.generate(ids, max_new_tokens=16, threshold=FUZZY, rule=ExactRule())
    assert torch.equal(out.sequences, greedy_reference(pair.model, ids, new=16))


def test_prompts_come_back_as_they_were_given() -> None:
    """Padding included, and the caller's tensors are not written to."""
    ids, mask = batch()
    before = ids.clone(), mask.clone()
    out = kindred_pair().generate(ids, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(ids, before[0])
    assert torch.equal(mask, before[1])
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert out.sequences.dtype == ids.dtype
    assert out.origins.dtype == torch.uint8


def test_a_finished_stream_has_the_whole_and_reading_it_again_changes_nothing() -> None:
    pair, ids = kindred_pair(), prompt(6, 3)
    decoding = pair.stream(ids, max_new_tokens=12)
    tokens = joined(chunk.tokens for chunk in decoding)
    whole = decoding.output().sequences
    assert tokens == whole[0, 6:].tolist()
    assert list(decoding) == []
    assert torch.equal(decoding.output().sequences, whole)


# -- bad input ------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"threshold": -0.1}, "threshold must be at least 0; got -0.1"),
    ({"threshold": math.nan}, "threshold must be at least 0; got nan"),
    ({"divergence": "jsd"}, "divergence must be one of js, .*; got 'jsd'"),
    ({"min_ratio": 1.5}, "min_ratio must be between 0 and 1; got 1.5"),
    ({"min_ratio": math.nan}, "min_ratio must be between 0 and 1; got nan"),
    ({"fallback": "give up"}, "fallback must be one of exact, stop"),
    ({"selection": "best"}, "selection must be one of longest, target, sample"),
    ({"divergence_on": "both"}, "divergence_on must be one of raw, warped"),
    ({"method": "beam"}, "method must be one of fsd, ar; got 'beam'"),
    ({"max_new_tokens": 0}, "max_new_tokens .* at least 1; got 0"),
    ({"max_new_tokens": -3}, "max_new_tokens .* at least 1; got -3"),
    ({"max_new_tokens": 2.5}, "max_new_tokens .* whole number .*got 2.5"),
    ({"max_new_tokens": math.nan}, "max_new_tokens"),
    ({"max_new_tokens": math.inf}, "max_new_tokens"),
    ({"temperature": -1.0}, "temperature must be .* at least 0; got -1.0"),
    ({"temperature": math.nan}, "temperature must be .* at least 0; got nan"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
    ({"temperature": 1.0, "top_p": math.nan}, "top_p must be above 0 and at most 1; got nan"),
    ({"temperature": 1.0, "top_k": -1}, "top_k must be a whole number"),
    ({"settings": FSDSettings(top_k=97)}, "top_k is 97, more than the vocabulary of 96"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "empty prompt"),
    ({"input_ids": torch.empty(0, 3, dtype=torch.long)}, "empty prompt"),
    ({"input_ids": torch.tensor([3, 4, 5])}, r"shape \[B, S\]; got \(3,\)"),
    ({"input_ids": torch.tensor([[[3, 4]]])}, r"shape \[B, S\]; got \(1, 1, 2\)"),
    ({"input_ids": torch.tensor([[3.0, 4.0]])}, "input_ids must be whole numbers"),
    ({"input_ids": torch.tensor([[3, VOCABULARY]])}, "outside the target's vocabulary of 96"),
    ({"input_ids": torch.tensor([[3, -1]])}, "outside the target's vocabulary of 96"),
    ({"input_ids": prompt(256)}, "prompt has 256 tokens; the target's context holds 256"),
    ({"attention_mask": torch.ones(1, 3)}, r"attention_mask is \(1, 3\), input_ids \(1, 5\)"),
    ({"attention_mask": torch.zeros(1, 5)}, "empty prompt"),
]


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_one_clear_line(options: dict[str, Any], message: str, way: str) -> None:
    arguments = {"input_ids": prompt(5), "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message) as error:
        getattr(shared_pair(), way)(**arguments)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.1}, "treshold"),
        ({"num_beams": 2}, "num_beams"),
        ({"threshold": "high"}, "threshold must be a number; got 'high'"),
        ({"threshold": True}, "threshold must be a number; got True"),
    ],
)
def test_unknown_options_and_other_types_are_type_errors(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        shared_pair().generate(prompt(5), **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_that_says_so(
    value: float, method: str, temperature: float
) -> None:
    """One poisoned weight of the projection; never an id out of range, never a quiet token."""
    model = tiny_target()
    with torch.no_grad():
        model.lm_head.weight[5] = value
    pair = EagleFSD(model, untrained_head(model), small_tree())
    with pytest.raises(FloatingPointError, match="NaN or infinite") as error:
        pair.generate(prompt(5), max_new_tokens=4, method=method, temperature=temperature, seed=0)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 5, VOCABULARY - 1])
def test_one_broken_logit_in_one_row_of_a_later_step_is_found(value: float, token: int) -> None:
    model = tiny_target()
    passes: list[int] = []

    def poison(_module: Any, _args: Any, output: Any) -> None:
        passes.append(1)
        if len(passes) == 4:
            output.logits[2, 0, token] = value

    model.register_forward_hook(poison)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = batch()
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        pair.generate(ids, attention_mask=mask, max_new_tokens=12)
    assert len(passes) == 4


@pytest.mark.parametrize("threshold", [0.0, FUZZY])
def test_a_target_may_rule_tokens_out(threshold: float) -> None:
    """Minus infinity is no fault: some models mask the rows that pad their vocabulary."""
    model = copy.deepcopy(kindred_pair().model)
    ids = prompt(6, 3)
    ruled_out = greedy_reference(model, ids, new=10)[0, 8:16:3]

    def mask(_module: Any, _args: Any, output: Any) -> None:
        output.logits[..., ruled_out] = -math.inf

    model.register_forward_hook(mask)
    pair = EagleFSD(model, kindred_pair().head, small_tree())
    out = pair.generate(ids, max_new_tokens=20, threshold=threshold)
    assert not torch.isin(answers(out), ruled_out).any()
    if threshold == 0.0:
        assert torch.equal(out.sequences, greedy_reference(model, ids, new=20))


# -- a trained model ------------------------------------------------------------------------------

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260k"


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260k model is not beside the checkout")
def test_a_trained_target_is_decoded_as_by_hugging_face() -> None:
    """A real, small Llama with tied embeddings; under an untrained head, exactly and fuzzily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    stories = AutoTokenizer.from_pretrained(STORIES)
    texts = ["Once upon a time, there was a little", "Lily and Tom went to", "The dog", "One day"]
    tokens = [stories(text, add_special_tokens=False).input_ids for text in texts]
    ids, mask = left_padded(*(torch.tensor([[1, *item]]) for item in tokens))
    pair = EagleFSD(model, untrained_head(model), small_tree())
    expected = greedy_reference(model, ids, mask, new=48)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=48)
    assert torch.equal(out.sequences, expected)
    fuzzy = pair.generate(ids, attention_mask=mask, max_new_tokens=48, threshold=FUZZY)
    assert fuzzy.stats.tau > out.stats.tau
    onward = pair.generate(fuzzy.sequences[:1], max_new_tokens=16)
    assert torch.equal(onward.sequences, greedy_reference(model, fuzzy.sequences[:1], new=16))


@lru_cache
def _on(device: str, architecture: str = PLAIN) -> EagleFSD:
    model = tiny_target(architecture).to(device)
    return EagleFSD(model, untrained_head(model), small_tree())
