"""Compare answers with exact decoding's without references: what changed, where, and the regret.

:func:`agreement` and :func:`regret_summary` summarize one method for its row of a report.
:func:`compare_answers` prepares the changed answers to be shown side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import chain, compress, zip_longest
from typing import Any

import numpy as np
from scipy import stats
from transformers import PreTrainedTokenizerBase

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.methods import EXACT, Method, fresh_pair
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import mean
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Prompt
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.detokenization import IncrementalDetokenizer

#: Length of the token sequences whose repetition is counted.
REPEATED_TOKENS = 4
#: Maximum number of changed answers that a report shows.
MAX_SHOWN_ANSWERS = 20

#: By question, the divergence at each fuzzy token of each turn.
Divergences = dict[int | str, list[list[float | None]]]


def agreement(exact: Sequence[Record], other: Sequence[Record]) -> dict[str, Any]:
    """Compare a method's answers with exact decoding's to the same questions, token by token.

    Only the first sample of each question counts. Answers of servers, which send text only, are
    compared word by word. ``first_difference`` holds the quartiles over changed answers of the
    tokens before the first difference. Values that cannot be computed are None.
    """
    # Turns that were answered have no error, but may be empty.
    answered = (record for record in exact if None in record["choices"][0]["errors"])
    by_id = {record["question_id"]: _turns(record) for record in answered}
    pairs = [
        (by_id[record["question_id"]], _turns(record))
        for record in other
        if record["question_id"] in by_id
    ]
    differences = [_first_difference(*pair) for pair in pairs]
    found = [item for item in differences if item is not None]
    count, changed = len(pairs), len(found)
    lengths = mean([sum(map(len, b)) - sum(map(len, a)) for a, b in pairs])
    before, after = ([repetition(pair[side]) for pair in pairs] for side in (0, 1))
    repeated = mean([b - a for a, b in zip(before, after, strict=True)])
    return {
        "answers": count,
        "identical": count - changed,
        "first_difference": np.quantile(found, (0.25, 0.5, 0.75)).tolist() if found else None,
        **lengths.as_dict("length_change"),
        "repetition": float(np.mean(after)) if count else None,
        **repeated.as_dict("repetition_change"),
    }


def changed_limit(found: Mapping[str, Any], confidence: float) -> float | None:
    """Return Clopper and Pearson's upper limit on the share of changes; None without answers."""
    count = found["answers"]
    if not count:
        return None
    test = stats.binomtest(count - found["identical"], count, alternative="less")
    return float(test.proportion_ci(confidence, method="exact").high)


def _turns(record: Record) -> Sequence[Sequence[int | str]]:
    """Return the token ids of each turn of the first sample.

    An answer of a server has none; its words are returned instead, each with the whitespace before.
    """
    choice = record["choices"][0]
    if any(choice["turns"]) and not any(choice["token_ids"]):
        return [re.findall(r"\s*\S+", turn) for turn in choice["turns"]]
    turns: list[list[int | str]] = choice["token_ids"]
    return turns


def _first_difference(
    first: Sequence[Sequence[int | str]], second: Sequence[Sequence[int | str]]
) -> int | None:
    """Return the index, over all turns, of the first token that differs; None if none does."""
    turns = zip(first, second, strict=True)
    pairs = chain.from_iterable(zip_longest(*both) for both in turns)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def repetition(turns: Sequence[Sequence[int | str]]) -> float:
    """Return the share of an answer's 4-grams that occurred before in the same turn.

    This is "seq-rep-4" in Welleck et al., "Neural Text Generation with Unlikelihood Training"
    (arXiv 1908.04319).
    """
    total = distinct = 0
    for tokens in turns:
        shifted = (tokens[start:] for start in range(REPEATED_TOKENS))
        grams = list(zip(*shifted, strict=False))
        total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / total if total else 0.0


def regret_summary(records: Sequence[Record]) -> dict[str, Any] | None:
    """Summarize the log-probability that fuzzy tokens give up.

    The regret of a token is ``max log p - log p(x)`` in nats, with ``p`` the target's distribution
    before sampling options; ``per_token`` is the sum of all divided by the number of all tokens.
    Returns None if there are no fuzzy tokens, or if their regrets were not recorded.
    """
    choices = [record["choices"] for record in records]
    by_question = [
        [value for one in own for turn in one["regrets"] for value in turn] for own in choices
    ]
    values = list(chain(*by_question))
    if not values or None in values:
        return None
    regrets = np.array(values)
    # The interval is over questions, because samples of one question are not independent.
    sums = np.array([sum(own) for own in by_question])
    tokens = np.array([sum(sum(one["new_tokens"]) for one in own) for own in choices])
    per_token = float(sums.sum() / tokens.sum())
    # The ratio of two sums over questions, linearized.
    interval = mean(((sums - per_token * tokens) / tokens.mean()).tolist()).interval
    return {
        "fuzzy_tokens": len(regrets),
        "mean": float(regrets.mean()),
        "p95": float(np.quantile(regrets, 0.95)),
        "max": float(regrets.max()),
        "per_token": per_token,
        "per_token_interval": [per_token + end for end in interval] if interval else None,
    }


def fuzzy_divergences(
    model: EagleFSD, method: Method, records: Sequence[Record], max_batch: int = 1
) -> Divergences:
    """Decode greedy answers again to learn the divergence at each of their fuzzy tokens.

    Answers whose tokens or origins differ this time, as with drafters that learn, are omitted.
    """
    pair = method.pair_for(fresh_pair(model))
    found: Divergences = {
        record["question_id"]: [[] for _ in record["choices"][0]["token_ids"]] for record in records
    }
    turns = [
        (record["question_id"], turn, record["choices"][0])
        for record in records
        for turn, tokens in enumerate(record["choices"][0]["token_ids"])
        if tokens
    ]
    for item in pair.generate_many(
        [
            Prompt(choice["prompt_ids"][turn], max_new_tokens=len(choice["token_ids"][turn]))
            for _, turn, choice in turns
        ],
        max_batch=max_batch,
        rule=method.rule_for(pair),
        details=0,
    ):
        key, turn, choice = turns[item.index]
        if (item.tokens, item.origins) != (choice["token_ids"][turn], choice["origins"][turn]):
            found.pop(key, None)
        elif key in found:
            fuzzy = (origin == Origin.FUZZY for origin in item.origins)
            found[key][turn] = [detail.divergence for detail in compress(item.details, fuzzy)]
    return found


def compare_answers(
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    scores: Mapping[str, Mapping[int | str, bool]],
    method: str,
    reference: str = EXACT.name,
    tokenizer: PreTrainedTokenizerBase | None = None,
    find_divergences: Callable[[Sequence[Record]], Divergences] | None = None,
) -> dict[str, Any]:
    """Prepare the changed answers of a method for a report.

    Answers that became wrong come first, then those that became right, then the others, each group
    by decreasing regret. A ``tokenizer`` is required if the answers have token ids.
    ``find_divergences`` is called with the first :data:`MAX_SHOWN_ANSWERS` of them, filled up with
    unchanged answers, and may omit any.

    The JSON values are ``method``; ``changed``, the number of changed answers; ``answers``, the
    first of them, with a list of pieces for each turn of both methods (``exact`` and ``other``);
    ``tokens``, the divergence and regret of the fuzzy tokens of the answers that were decoded
    again. A piece holds its ``text``, and ``changed`` if the other answer differs there; a fuzzy
    token is a piece that also holds ``fuzzy`` and, if known, ``regret`` and ``divergence``.
    """
    exact = {record["question_id"]: record for record in records[reference]}
    by_id = {question.question_id: question for question in questions}
    before, after = (scores.get(name, {}) for name in (reference, method))

    def outcome(key: int | str) -> str:
        was_right, is_right = before.get(key), after.get(key)
        if was_right is None or is_right is None or was_right == is_right:
            return "changed"
        return "gained" if is_right else "lost"

    def rank(record: Record) -> tuple[int, float]:
        regret = sum(value or 0.0 for value in _regrets(record))
        return ("lost", "gained", "changed").index(outcome(record["question_id"])), -regret

    compared = [record for record in records[method] if record["question_id"] in exact]
    changed: list[Record] = []
    unchanged: list[Record] = []
    for record in compared:
        same = _turns(record) == _turns(exact[record["question_id"]])
        (unchanged if same else changed).append(record)
    changed.sort(key=rank)
    divergences: Divergences = {}
    if find_divergences is not None:
        divergences = find_divergences([*changed, *unchanged][:MAX_SHOWN_ANSWERS])
    answers = []
    for record in changed[:MAX_SHOWN_ANSWERS]:
        key = record["question_id"]
        left, right = _pieces(tokenizer, exact[key], record, divergences.get(key))
        answers.append(
            {
                "question_id": key,
                "category": by_id[key].category,
                "turns": list(by_id[key].turns),
                "outcome": outcome(key),
                "exact": left,
                "other": right,
            }
        )
    tokens = [
        [divergence, regret]
        for record in compared
        if record["question_id"] in divergences
        for divergence, regret in zip(
            chain(*divergences[record["question_id"]]), _regrets(record), strict=True
        )
        if divergence is not None and regret is not None
    ]
    return {"method": method, "changed": len(changed), "answers": answers, "tokens": tokens}


def _regrets(record: Record) -> list[float | None]:
    """Return the regrets of an answer's fuzzy tokens, over all turns."""
    return list(chain(*record["choices"][0]["regrets"]))


def _pieces(
    tokenizer: PreTrainedTokenizerBase | None,
    before: Record,
    after: Record,
    divergences: Sequence[Sequence[float | None]] | None,
) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Return the pieces of both answers, per turn."""
    left, right = [], []
    choice = after["choices"][0]
    for turn, (own, other) in enumerate(zip(_turns(before), _turns(after), strict=True)):
        regrets = choice["regrets"][turn]
        known = divergences[turn] if divergences is not None else [None] * len(regrets)
        places = [at for at, item in enumerate(choice["origins"][turn]) if item == Origin.FUZZY]
        fuzzy = dict(zip(places, zip(regrets, known, strict=True), strict=True))
        is_changed = [[True] * len(own), [True] * len(other)]
        for a, b, size in SequenceMatcher(None, own, other, autojunk=False).get_matching_blocks():
            is_changed[0][a : a + size] = is_changed[1][b : b + size] = [False] * size
        left.append(_turn_pieces(tokenizer, own, is_changed[0], {}))
        right.append(_turn_pieces(tokenizer, other, is_changed[1], fuzzy))
    return left, right


def _turn_pieces(
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: Sequence[int | str],
    is_changed: Sequence[bool],
    fuzzy: Mapping[int, tuple[float | None, float | None]],
) -> list[dict[str, Any]]:
    """Return the pieces of a turn; ``fuzzy`` holds regret and divergence by position."""
    pieces: list[dict[str, Any]] = []
    shown = [changed or at in fuzzy for at, changed in enumerate(is_changed)]
    for at, text in enumerate(_texts(tokenizer, tokens, shown)):
        piece: dict[str, Any] = {"text": text}
        if is_changed[at]:
            piece["changed"] = True
        if at in fuzzy:
            regret, divergence = fuzzy[at]
            values = {"fuzzy": True, "regret": regret, "divergence": divergence}
            piece |= {name: value for name, value in values.items() if value is not None}
        elif pieces and pieces[-1].keys() == piece.keys():
            pieces[-1]["text"] += text
            continue
        pieces.append(piece)
    # A fuzzy token may be only the first byte of a character.
    return [piece for piece in pieces if piece["text"] or piece.get("fuzzy")]


def _texts(
    tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int | str], shown: Sequence[bool]
) -> Iterator[str]:
    """Yield the text of each token or word; special tokens have none unless they are ``shown``."""
    detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer and tokenizer.is_fast else None
    special = set(tokenizer.all_special_ids) if tokenizer else set()
    for token, visible in zip(tokens, shown, strict=True):
        if isinstance(token, str):
            yield token
        elif token in special and not visible:
            yield ""
        elif detokenizer is not None and token not in special:
            yield detokenizer.step(token)
        elif tokenizer is not None:
            yield str(tokenizer.decode([token]))
