"""Answering questions: several turns, several methods, timed alike, one line an answer."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.evaluation.memory import PeakMemory
from eagle_fsd.evaluation.methods import Method, count_new, decode, synchronise
from eagle_fsd.evaluation.questions import Question
from eagle_fsd.evaluation.store import AnswerStore, Record
from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.options import Options, number
from eagle_fsd.model.prompts import ChatFormat, encode_prompt
from eagle_fsd.model.target import Target

#: Tokens whose distributions are in memory at a time when a likelihood is computed.
LIKELIHOOD_ROWS = 512


@dataclass(frozen=True)
class Decoding(Options):
    """How answers are drawn, the same for every method."""

    max_new_tokens: int = number(512, 1, math.inf, "tokens of a turn at most")
    temperature: float = number(0.0, 0.0, math.inf, "0 is greedy")
    top_p: float = number(1.0, 0.0, 1.0, "nucleus sampling; 1 is off")
    top_k: int = number(0, 0, math.inf, "sample from the k likeliest; 0 is off")
    seed: int = number(0, 0, 2**31, "of sampling, and of the bundled problems")
    batch: int = number(1, 1, 1024, "questions answered at once; speeds are this batch's")


#: A question's place in its set, and the question.
Placed = tuple[int, Question]


class Answerer:
    """Answers questions with each of several methods.

    The methods take turns on every batch of questions, in an order that rotates, so that a machine
    that slows down slows them all. The first question is answered once before anything is timed.

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
        self.memory = PeakMemory(model.target.device)
        self.ends = [*model.end_tokens, *wording.stop_token_ids]

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
        for index in {index for index, _ in work}:
            first = work[0][1][0][1].turns[0]
            self._turn(self.methods[index], [[{"role": "user", "content": first}]], seed=0)
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
            seed = self.decoding.seed + 1_000_003 * group[0][0] + at_turn
            said = self._turn(method, [chats[at] for at in asked], seed)
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
                "choices": [choice],
                "tstamp": time.time(),
            }
            for (_, question), choice in zip(group, choices, strict=True)
        ]

    def _turn(
        self, method: Method, chats: Sequence[Sequence[dict[str, str]]], seed: int
    ) -> list[dict[str, Any]]:
        """What one turn adds to each answer: a value goes to the end of the list of its name."""
        model, decoding = self.model, self.decoding
        prompts = [encode_prompt(chat, model.tokenizer, self.wording)[0] for chat in chats]
        turns: list[dict[str, Any]] = [
            # Said, not hidden: the report counts these.
            {**_EMPTY_TURN, "errors": f"the prompt's {len(prompt)} tokens fill the context"}
            for prompt in prompts
        ]
        rows = [at for at, prompt in enumerate(prompts) if len(prompt) < model.target.context]
        if not rows:
            return turns
        padded = model.tokenizer.pad(
            {"input_ids": [prompts[at] for at in rows]}, padding_side="left", return_tensors="pt"
        ).to(model.target.device)
        self.memory.start()
        synchronise(model)
        begun = time.perf_counter()
        new, origins, stats = decode(
            model,
            method,
            padded["input_ids"],
            padded["attention_mask"],
            max_new_tokens=decoding.max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            seed=seed,
            eos_token_id=self.ends,
        )
        synchronise(model)
        spent = time.perf_counter() - begun
        memory = self.memory.read()
        counts = [count_new(row, self.ends) for row in new]
        for row, (at, count) in enumerate(zip(rows, counts, strict=True)):
            tokens = new[row, :count]
            said = model.tokenizer.decode(tokens, skip_special_tokens=True)
            turns[at] = {
                "turns": _before(said, self.wording.stop).strip(),
                "idxs": len(stats.accepted[row]) if stats else count,
                "new_tokens": count,
                # A batch's time, shared out by tokens.
                "wall_time": spent * count / max(1, sum(counts)),
                "accepted": stats.accepted[row] if stats else [],
                "origins": origins[row, :count].tolist() if origins is not None else [],
                "log_likelihood": answer_log_likelihood(model.target, prompts[at], tokens),
                "memory": memory,
                "errors": None,
            }
        return turns


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
