"""Answering questions: several turns, several methods, timed alike, one line an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from eagle_fsd.evaluation.answer_store import AnswerStore, Record, Session
from eagle_fsd.evaluation.config import Decoding
from eagle_fsd.evaluation.memory import PeakMemory
from eagle_fsd.evaluation.methods import Decoded, Method, decode, synchronise
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.target import Target
from eagle_fsd.utils.chat_templates import ChatFormat, encode_prompt

#: Tokens whose distributions are in memory at a time when a likelihood is computed.
LIKELIHOOD_ROWS = 512


#: A question's place in its set, and the question.
Placed = tuple[int, Question]


class Answerer:
    """Answers questions with each of several methods.

    The methods take turns on every batch of questions, in an order that rotates, so that a machine
    that slows down slows them all. Every method's first turn is answered once before any is timed.

    Args:
        stores: One for each method, in the methods' order.
        session: Goes into every answer.
        process, processes: Which share of the questions is answered here: every ``processes``-th.
    """

    def __init__(
        self,
        model: EagleFSD,
        wording: ChatFormat,
        methods: Sequence[Method],
        stores: Sequence[AnswerStore],
        decoding: Decoding,
        session: Session,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.model, self.wording, self.decoding = model, wording, decoding
        self.session = session
        self.methods, self.stores = list(methods), list(stores)
        self.process, self.processes = process, processes
        self.memory = PeakMemory(model.target.device)
        self.ends = [*model.end_tokens, *wording.stop_token_ids]
        self.stops = [StopStringCriteria(model.tokenizer, wording.stop)] if wording.stop else []

    def run(
        self, questions: Sequence[Question], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Answer what has no answer yet."""
        share = list(enumerate(questions))[self.process :: self.processes]
        size, count = self.decoding.batch, len(self.methods)
        work: list[tuple[int, list[Placed]]] = []
        for turn, start in enumerate(range(0, len(share), size)):
            for step in range(count):
                index = (turn + step) % count
                group = [
                    (place, question)
                    for place, question in share[start : start + size]
                    if question.question_id not in self.stores[index]
                ]
                if group:
                    work.append((index, group))
        total = len(share) * count
        done = total - sum(len(group) for _, group in work)
        warmed: set[int] = set()
        for index, group in work:
            if index not in warmed:
                warmed.add(index)
                chats = [[{"role": "user", "content": item.turns[0]}] for _, item in group]
                self._turn(self.methods[index], chats, [0] * len(group))
        for index, group in work:
            for record in self.answer(group, self.methods[index]):
                self.stores[index].append(record)
            done += len(group)
            if progress is not None:
                progress(done, total)

    def answer(self, group: Sequence[Placed], method: Method) -> list[Record]:
        """A line of the answer file for each question, all answered at once, turn by turn."""
        choices: list[dict[str, Any]] = [{"index": 0} for _ in group]
        chats: list[list[dict[str, str]]] = [[] for _ in group]
        for at_turn in range(max(len(question.turns) for _, question in group)):
            asked = [at for at, (_, question) in enumerate(group) if at_turn < len(question.turns)]
            for at in asked:
                chats[at].append({"role": "user", "content": group[at][1].turns[at_turn]})
            seeds = [self.decoding.seed + 1_000_003 * group[at][0] + at_turn for at in asked]
            said = self._turn(method, [chats[at] for at in asked], seeds)
            for at, values in zip(asked, said, strict=True):
                chats[at].append({"role": "assistant", "content": values["turns"]})
                for name, value in values.items():
                    choices[at].setdefault(name, []).append(value)
        return [
            {
                "question_id": question.question_id,
                "category": question.category,
                "answer_id": uuid.uuid4().hex[:22],
                "model_id": method.name,
                "session": self.session.begin(),
                "choices": [choice],
                "tstamp": time.time(),
            }
            for (_, question), choice in zip(group, choices, strict=True)
        ]

    def _turn(
        self,
        method: Method,
        chats: Sequence[Sequence[dict[str, str]]],
        seeds: Sequence[int],
    ) -> list[dict[str, Any]]:
        """What one turn adds to each answer: a value goes to the end of the list of its name."""
        model = self.model
        prompts = [encode_prompt(chat, model.tokenizer, self.wording)[0] for chat in chats]
        turns: list[dict[str, Any]] = [
            # Said, not hidden: the report counts these.
            {**_EMPTY_TURN, "errors": f"the prompt's {len(prompt)} tokens fill the context"}
            for prompt in prompts
        ]
        together: list[int] = []
        calls = []
        for at, prompt in enumerate(prompts):
            room = model.target.context - len(prompt)
            if room >= self.decoding.max_new_tokens:
                together.append(at)
            elif room > 0:
                # By itself: a call's new tokens are as many as its longest prompt leaves room for,
                # and nobody's answer shall depend on whom it shares a batch with.
                calls.append(([at], room))
        if together:
            calls.insert(0, (together, self.decoding.max_new_tokens))
        for rows, room in calls:
            said = self._call(method, [prompts[at] for at in rows], room, seeds[rows[0]])
            for at, values in zip(rows, said, strict=True):
                turns[at] = values
        return turns

    def _call(
        self, method: Method, prompts: Sequence[Tensor], max_new_tokens: int, seed: int
    ) -> list[dict[str, Any]]:
        """A turn's values for each of ``prompts``, decoded in one call."""
        model, decoding = self.model, self.decoding
        padded = model.tokenizer.pad(
            {"input_ids": list(prompts)}, padding_side="left", return_tensors="pt"
        ).to(model.target.device)
        self.memory.start()
        synchronise(model)
        begun = time.perf_counter()
        found = decode(
            model,
            method,
            padded["input_ids"],
            padded["attention_mask"],
            self.ends,
            max_new_tokens=max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            seed=seed,
            stopping_criteria=self.stops,
        )
        synchronise(model)
        spent = time.perf_counter() - begun
        memory = self.memory.read()
        total = max(1, sum(map(len, found.tokens)))
        turns = []
        for row, tokens in enumerate(found.tokens):
            said = model.tokenizer.decode(tokens, skip_special_tokens=True)
            turns.append(
                {
                    "turns": _before(said, self.wording.stop).strip(),
                    "idxs": _passes(method, found, row),
                    "new_tokens": len(tokens),
                    # A batch's time, shared out by tokens.
                    "wall_time": spent * len(tokens) / total,
                    "accepted": found.stats.accepted[row] if found.stats else [],
                    "origins": found.origins[row] if found.origins else [],
                    "log_likelihood": answer_log_likelihood(model.target, prompts[row], tokens),
                    "memory": memory,
                    "cut_off": self._cut_off(said, tokens),
                    "errors": None,
                }
            )
        return turns

    def _cut_off(self, said: str, tokens: Tensor) -> bool:
        """Whether an answer ended for want of room: with none of what ends an answer."""
        ended = len(tokens) > 0 and int(tokens[-1]) in self.ends
        return not ended and not any(stop in said for stop in self.wording.stop)


def _passes(method: Method, found: Decoded, row: int) -> int | None:
    """How often the target was asked; None where the method does not tell."""
    if found.stats is not None:
        return len(found.stats.accepted[row])
    return len(found.tokens[row]) if method.assistant is None else None


def _before(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first of a template's stop strings, as FastChat's own answers end."""
    found = [at for item in stop if (at := text.find(item)) >= 0]
    return text[: min(found)] if found else text


_EMPTY_TURN = {
    "turns": "",
    "idxs": 0,
    "new_tokens": 0,
    "wall_time": 0.0,
    "accepted": [],
    "origins": [],
    "log_likelihood": None,
    "memory": None,
    "cut_off": False,
}


@torch.inference_mode()
def answer_log_likelihood(target: Target, prompt: Tensor, answer: Tensor) -> float | None:
    """The target's mean log-probability of ``answer``'s tokens after ``prompt``, nats a token."""
    if not len(answer):
        return None
    ids = torch.cat([prompt.to(target.device), answer.to(target.device)])
    output = target.model.base_model(input_ids=ids[None], use_cache=False)
    features = output.last_hidden_state[0, len(prompt) - 1 : -1].to(target.device)
    total = 0.0
    for start in range(0, len(answer), LIKELIHOOD_ROWS):
        rows = slice(start, start + LIKELIHOOD_ROWS)
        log_probs = target.project(features[rows]).log_softmax(-1)
        chosen = answer[rows, None].to(log_probs.device)
        total += float(log_probs.gather(1, chosen).double().sum())
    return total / len(answer)
