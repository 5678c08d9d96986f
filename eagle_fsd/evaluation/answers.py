"""Answering questions: several turns, several methods, timed alike, one line an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.evaluation.methods import Method, count_new, decode, synchronise
from eagle_fsd.evaluation.questions import Question
from eagle_fsd.evaluation.store import AnswerStore, Record
from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.prompts import ChatFormat, encode_prompt
from eagle_fsd.model.target import Target

#: Tokens whose distributions are in memory at a time when a likelihood is computed.
LIKELIHOOD_ROWS = 512


@dataclass(frozen=True)
class Decoding:
    """How answers are drawn, the same for every method."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Answerer:
    """Answers questions with each of several methods.

    The methods take turns on every question, in an order that rotates, so that a machine that
    slows down slows them all. The first question is answered once before anything is timed.

    Args:
        stores: One for each method, in the methods' order.
        process, processes: Which share of the questions is answered here: every ``processes``-th.
    """

    def __init__(
        self,
        model: EagleFSD,
        wording: ChatFormat,
        methods: Sequence[Method],
        stores: Sequence[AnswerStore],
        decoding: Decoding,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.model, self.wording, self.decoding = model, wording, decoding
        self.methods, self.stores = list(methods), list(stores)
        self.process, self.processes = process, processes

    def run(
        self, questions: Sequence[Question], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Answer what has no answer yet."""
        share = list(enumerate(questions))[self.process :: self.processes]
        waiting = [
            (place, question, index)
            for place, question in share
            for index in self._order(place)
            if question.question_id not in self.stores[index]
        ]
        total = len(share) * len(self.methods)
        if waiting:
            for index in {index for _, _, index in waiting}:
                self._turn(self.methods[index], [], waiting[0][1].turns[0], seed=0)
        for done, (place, question, index) in enumerate(waiting, 1):
            self.stores[index].append(self.answer(question, self.methods[index], place))
            if progress is not None:
                progress(total - len(waiting) + done, total)

    def _order(self, place: int) -> list[int]:
        """The methods for the question at ``place``, beginning with another one each time."""
        count = len(self.methods)
        return [(place + step) % count for step in range(count)]

    def answer(self, question: Question, method: Method, place: int) -> Record:
        """One line of the answer file."""
        choice: dict[str, Any] = {"index": 0}
        messages: list[dict[str, str]] = []
        for number, text in enumerate(question.turns):
            seed = self.decoding.seed + 1_000_003 * place + number
            said = self._turn(method, messages, text, seed)
            messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": said["turns"]},
            ]
            for name, value in said.items():
                choice.setdefault(name, []).append(value)
        return {
            "question_id": question.question_id,
            "category": question.category,
            "answer_id": uuid.uuid4().hex[:22],
            "model_id": method.name,
            "choices": [choice],
            "tstamp": time.time(),
        }

    def _turn(
        self, method: Method, before: Sequence[dict[str, str]], text: str, seed: int
    ) -> dict[str, Any]:
        """What one turn adds to an answer: each value goes to the end of a list of that name."""
        model, decoding = self.model, self.decoding
        messages = [*before, {"role": "user", "content": text}]
        ids = encode_prompt(messages, model.tokenizer, self.wording).to(model.target.device)
        if ids.shape[1] >= model.target.context:
            # Said, not hidden: the report counts these.
            error = f"the prompt's {ids.shape[1]} tokens fill the context"
            return _empty_turn(error)
        synchronise(model)
        begun = time.perf_counter()
        new, origins, stats = decode(
            model,
            method,
            ids,
            torch.ones_like(ids),
            max_new_tokens=decoding.max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            seed=seed,
        )
        synchronise(model)
        spent = time.perf_counter() - begun
        tokens = new[0, : count_new(model, new[0])]
        return {
            "turns": model.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
            "idxs": stats.steps if stats else len(tokens),
            "new_tokens": len(tokens),
            "wall_time": spent,
            "accepted": stats.accepted[0] if stats else [],
            "origins": origins[0, : len(tokens)].tolist() if origins is not None else [],
            "log_likelihood": answer_log_likelihood(model.target, ids[0], tokens),
            "errors": None,
        }


def _empty_turn(error: str) -> dict[str, Any]:
    return {
        "turns": "",
        "idxs": 0,
        "new_tokens": 0,
        "wall_time": 0.0,
        "accepted": [],
        "origins": [],
        "log_likelihood": None,
        "errors": error,
    }


@torch.inference_mode()
def answer_log_likelihood(target: Target, prompt: Tensor, answer: Tensor) -> float | None:
    """The target's mean log-probability of ``answer``'s tokens after ``prompt``, nats a token."""
    if not len(answer):
        return None
    ids = torch.cat([prompt, answer.to(prompt.device)])
    output = target.model.base_model(input_ids=ids[None], use_cache=False)
    features = output.last_hidden_state[0, len(prompt) - 1 : -1].to(target.device)
    total = 0.0
    for start in range(0, len(answer), LIKELIHOOD_ROWS):
        rows = slice(start, start + LIKELIHOOD_ROWS)
        log_probs = target.project(features[rows]).log_softmax(-1)
        chosen = answer[rows, None].to(log_probs.device)
        total += float(log_probs.gather(1, chosen).double().sum())
    return total / len(answer)
