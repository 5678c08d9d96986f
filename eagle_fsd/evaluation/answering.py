"""Answer questions with several methods, turn by turn, and time every answer."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from eagle_fsd.evaluation.answer_store import NO_TURN, AnswerStore, Record, Session
from eagle_fsd.evaluation.completion import answer_ends
from eagle_fsd.evaluation.config import BenchConfig, CalibrationConfig, EvaluationConfig
from eagle_fsd.evaluation.memory import PeakMemory
from eagle_fsd.evaluation.methods import Method, fresh_pair, synchronize
from eagle_fsd.evaluation.padded_batch import PaddedBatch
from eagle_fsd.evaluation.questions.question import Message, Question
from eagle_fsd.model.batch import Batch
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Answer, Request
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule, Origin
from eagle_fsd.utils.chat_templates import ChatTemplate, encode_prompt
from eagle_fsd.utils.detokenization import answer_text
from eagle_fsd.utils.progress import Progress
from eagle_fsd.utils.text import before_stop

#: Maximum number of positions whose distributions are computed at once.
LIKELIHOOD_CHUNK = 512
#: Maximum number of answers per row of the batch that a method decodes before the next method, but
#: at least those to one question.
ANSWERS_PER_ROW = 4
#: Minimum number of groups of questions per method, if each can fill a batch: intervals of speeds
#: are over groups.
MIN_GROUPS = 4

M = TypeVar("M")
#: The values of a turn by field of a choice, see :data:`NO_TURN`; optionally with "phases", the
#: seconds of each.
Turn = dict[str, Any]


class Conversation:
    """The messages and turns of one sample of the answers to a question."""

    def __init__(self, question: Question, sample: int) -> None:
        self.question, self.sample = question, sample
        self.chat: list[Message] = question.opening()
        self.turns: list[Turn] = []

    def ask(self) -> bool:
        """Add the next message of the user; return whether there is one."""
        if len(self.turns) == len(self.question.turns):
            return False
        self.chat.append({"role": "user", "content": self.question.turns[len(self.turns)]})
        return True

    def answer(self, turn: Turn) -> None:
        """Add the assistant's turn."""
        self.chat.append({"role": "assistant", "content": turn["turns"]})
        self.turns.append(turn)


@dataclass(kw_only=True)
class Answerer(ABC, Generic[M]):
    """Answer questions with each of several methods, whose ``stores`` must be open.

    All methods answer a few questions in rotating order, then the next ones, so that changes in the
    machine's speed affect all of them alike. Each method first answers a batch untimed.
    """

    config: EvaluationConfig
    session: Session
    methods: Sequence[M] = ()
    stores: Sequence[AnswerStore] = ()

    def run(
        self, questions: Sequence[Question], progress: Progress = lambda done, total: None
    ) -> None:
        """Answer questions, except for those that have answers."""
        size, count = self.group_size(len(questions)), len(self.methods)
        work: list[tuple[int, int, list[Question]]] = []
        for number, start in enumerate(range(0, len(questions), size)):
            for step in range(count):
                method = (number + step) % count
                group = [
                    question
                    for question in questions[start : start + size]
                    if question.question_id not in self.stores[method]
                ]
                if group:
                    work.append((method, number, group))
        total = len(questions) * count
        done = total - sum(len(group) for _, _, group in work)
        first: dict[int, list[Question]] = {}
        for method, _, group in work:
            first.setdefault(method, group[: self.config.batch])
        for method, group in first.items():
            asked = [replace(item, turns=item.turns[:1]) for item in group]
            self.warm_up(asked, self.methods[method])
        for method, number, group in work:
            for record in self.answer(group, self.methods[method], number):
                self.stores[method].append(record)
            done += len(group)
            progress(done, total)

    def group_size(self, count: int) -> int:
        """Return the number of questions that a method answers before the next method."""
        rows = self.config.batch
        if rows == 1:
            return 1
        answers = max(rows, count * self.config.answers // MIN_GROUPS)
        return max(1, min(answers, ANSWERS_PER_ROW * rows) // self.config.answers)

    @abstractmethod
    def warm_up(self, questions: Sequence[Question], method: M) -> None:
        """Answer one sample of each question, and discard what the drafter learned from it."""

    @abstractmethod
    def answer(self, questions: Sequence[Question], method: M, group: int = 0) -> Iterable[Record]:
        """Answer a group of questions, all samples and turns, in one batch."""

    def conversations(self, questions: Sequence[Question], samples: int) -> list[Conversation]:
        """Begin all samples of the answers to questions."""
        return [Conversation(item, sample) for item in questions for sample in range(samples)]

    def records(
        self,
        answers: Sequence[Conversation],
        name: str,
        group: int,
        seconds: float,
        memory: int | None = None,
    ) -> list[Record]:
        """Return a method's records of a group, given all samples of the answers to its questions.

        The group's ``seconds``, as ``wall_time``, are divided in proportion to the time that each
        turn took, its ``latency``.
        """
        total = sum(turn["latency"] for answer in answers for turn in answer.turns)
        share = seconds / total if total else 0.0
        records: dict[int | str, Record] = {}
        for answer in answers:
            question = answer.question
            if question.question_id not in records:
                records[question.question_id] = {
                    "question_id": question.question_id,
                    "category": question.category,
                    "answer_id": uuid.uuid4().hex[:22],
                    "model_id": name,
                    "session": self.session.begin(),
                    "batch": group,
                    "choices": [],
                    "tstamp": time.time(),
                }
            choice: dict[str, Any] = {"index": answer.sample}
            for turn in answer.turns:
                likelihood, regrets = self.likelihood(turn)
                values = {**turn, "log_likelihood": likelihood, "regrets": regrets}
                values |= {"wall_time": share * turn["latency"], "memory": memory}
                phases = values.pop("phases", {})
                if isinstance(self.config, BenchConfig):
                    values["phases"] = {phase: share * spent for phase, spent in phases.items()}
                for key, value in values.items():
                    choice.setdefault(key, []).append(value)
            records[question.question_id]["choices"].append(choice)
        return list(records.values())

    def likelihood(self, turn: Turn) -> tuple[float | None, list[float | None]]:
        """Return a turn's mean log-probability by the target, and the regrets of fuzzy tokens."""
        return None, []

    def seed(self, answer: Conversation) -> int:
        """Return the seed of the next turn."""
        repetition, number = divmod(answer.sample, self.config.samples)
        seed = self.config.seed + repetition
        return answer_seed(seed, answer.question.question_id, number, len(answer.turns))


@dataclass(kw_only=True)
class PairAnswerer(Answerer[Method]):
    """Answer questions with a pair in this process.

    A :class:`BenchConfig` decodes every answer ``repeats`` times and records the seconds of each
    phase.
    """

    model: EagleFSD
    chat_template: ChatTemplate

    def __post_init__(self) -> None:
        self.memory = PeakMemory(self.model.target.device)
        self.ends = answer_ends(self.model, self.chat_template)
        self._pairs: dict[str, EagleFSD] = {}
        # Methods often give equal answers, so their log-probabilities are cached.
        kept = max(1, len(self.methods)) * ANSWERS_PER_ROW * self.config.batch
        self._log_probs = lru_cache(kept)(self._compute_log_probs)

    def warm_up(self, questions: Sequence[Question], method: Method) -> None:
        self._converse(questions, method, 1)
        self._pairs.clear()  # forget what was learned from these answers

    def answer(self, questions: Sequence[Question], method: Method, group: int = 0) -> list[Record]:
        repeats = self.config.repeats if isinstance(self.config, BenchConfig) else 1
        self.memory.start()
        runs = [self._converse(questions, method, self.config.answers) for _ in range(repeats)]
        memory = self.memory.read()
        for first, *others in zip(*(answers for answers, _ in runs), strict=True):
            first.turns = _average([first.turns, *(other.turns for other in others)])
        seconds = fmean(seconds for _, seconds in runs)
        return self.records(runs[0][0], method.name, group, seconds=seconds, memory=memory)

    def _converse(
        self, questions: Sequence[Question], method: Method, samples: int
    ) -> tuple[list[Conversation], float]:
        """Answer questions in one batch, in which each turn takes the place of the one before.

        Also returns the seconds that decoding took.
        """
        pair, rows = method.pair_for(self._pair(method)), self.config.batch
        rule, answers = method.rule_for(pair), self.conversations(questions, samples)
        batch: Batch | PaddedBatch
        if method.decoder == "hf":
            batch = PaddedBatch(pair, method, rows)
        else:
            batch = pair.batch(rows, compiled_rows=rows)
        waiting, seconds = deque(answers), 0.0
        running: dict[Answer, tuple[Conversation, float]] = {}
        synchronize(self.model)
        with closing(batch):
            while True:
                while waiting and batch.free:
                    answer = waiting.popleft()
                    prompt = self._next_prompt(answer)
                    if prompt is not None:
                        request = self._request(pair, method, rule, prompt, seed=self.seed(answer))
                        running[batch.add(request)] = answer, seconds
                if not running:
                    return answers, seconds
                begin = time.perf_counter()
                decoded = batch.step()
                seconds += time.perf_counter() - begin
                for row, _ in decoded:
                    if row.error is not None:
                        raise row.error
                    if row.finished:
                        answer, joined = running.pop(row)
                        answer.answer(self._turn(row, method, seconds - joined))
                        waiting.appendleft(answer)

    def _request(
        self,
        pair: EagleFSD,
        method: Method,
        rule: AcceptanceRule | None,
        prompt: Tensor,
        seed: int,
    ) -> Request:
        """Return the request to continue a prompt, ``[S]``."""
        room = self.model.target.stable_length - len(prompt)
        sampling = self.config.sampling(seed=seed)
        limit = min(room, self.config.max_new_tokens)
        decoder = "ar" if method.decoder == "hf" else method.decoder
        request = pair.request(
            prompt, limit, sampling=sampling, rule=rule, method=decoder, **self.ends
        )
        return replace(request, key=seed) if method.decoder == "hf" else request

    def _next_prompt(self, answer: Conversation) -> Tensor | None:
        """Ask the next turn, and return its prompt, ``[S]``; None after the last turn.

        Turns whose prompt leaves no room for an answer are recorded as errors.
        """
        while answer.ask():
            prompt = encode_prompt(answer.chat, self.model.tokenizer, self.chat_template)[0]
            if len(prompt) < self.model.target.stable_length:
                return prompt
            error = f"the prompt's {len(prompt)} tokens fill the context"
            answer.answer({**NO_TURN, "errors": error})
        return None

    def _pair(self, method: Method) -> EagleFSD:
        """Return the pair for a method; a drafter that learns does so from its answers only."""
        if method.name not in self._pairs:
            self._pairs[method.name] = fresh_pair(self.model)
        return self._pairs[method.name]

    def likelihood(self, turn: Turn) -> tuple[float | None, list[float | None]]:
        """See :meth:`Answerer.likelihood`; calibration leaves them out unless it bounds regrets."""
        fuzzy = [at for at, origin in enumerate(turn["origins"]) if origin == Origin.FUZZY]
        left_out = isinstance(self.config, CalibrationConfig) and self.config.measure != "regret"
        if not turn["token_ids"] or left_out:
            return None, [None] * len(fuzzy)
        own, best = self._log_probs(tuple(turn["prompt_ids"]), tuple(turn["token_ids"]))
        return float(own.mean()), [max(0.0, float(best[at] - own[at])) for at in fuzzy]

    def _compute_log_probs(
        self, prompt: tuple[int, ...], answer: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return answer_log_probs(self.model.target, torch.tensor(prompt), torch.tensor(answer))

    def _turn(self, answer: Answer, method: Method, seconds: float) -> Turn:
        """Convert an answer to a turn, whose text ends before a stop string."""
        tokens, (accepted,) = answer.tokens, answer.stats.accepted
        text = answer_text(self.model.tokenizer, tokens)
        shown = before_stop(text, self.chat_template.stop)
        ended = bool(tokens) and tokens[-1] in self.ends["eos_token_id"]
        passes: int | None = len(accepted)
        if method.decoder == "hf":  # assisted generation takes an unknown number of passes
            passes = len(tokens) if method.assistant is None else None
        return {
            **NO_TURN,
            "turns": shown.strip(),
            "idxs": passes,
            "new_tokens": len(tokens),
            "latency": seconds,
            "accepted": accepted,
            "origins": answer.origins,
            "prompt_ids": answer.request.tokens,
            "token_ids": tokens,
            "cut_off": not ended and shown == text,
            "phases": answer.stats.seconds,
        }


def _average(runs: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return the turns of an answer with the mean times of several runs."""
    found = []
    for same in zip(*runs, strict=True):
        spent = [turn.get("phases", {}) for turn in same]
        names = dict.fromkeys(name for item in spent for name in item)  # "graph" may come later
        phases = {name: fmean(item.get(name, 0.0) for item in spent) for name in names}
        latency = fmean(turn["latency"] for turn in same)
        found.append({**same[0], "phases": phases, "latency": latency})
    return found


def answer_seed(seed: int, question_id: int | str, sample: int, turn: int) -> int:
    """Return the seed, below 2**56, with which a turn of an answer is sampled.

    It depends neither on the other questions of a run nor on their order.
    """
    key = json.dumps([seed, question_id, sample, turn])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


@torch.inference_mode()
def answer_log_probs(target: Target, prompt: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the target's log-probabilities along an answer that follows a prompt, in one pass.

    Returns those of the answer's tokens and of the likeliest tokens, ``[A]`` each, in float64.
    Their difference is the *regret* of a token.
    """
    ids = torch.cat([prompt.to(target.device), answer.to(target.device)])
    output = target.body(input_ids=ids[None], use_cache=False)
    features = output.last_hidden_state[0, len(prompt) - 1 : -1].to(target.device)
    own, best = [], []
    chunks = zip(features.split(LIKELIHOOD_CHUNK), answer.split(LIKELIHOOD_CHUNK), strict=True)
    for part, tokens in chunks:
        log_probs = target.project(part).log_softmax(-1)
        own.append(log_probs.gather(1, tokens[:, None].to(log_probs.device))[:, 0].double().cpu())
        best.append(log_probs.amax(-1).double().cpu())
    return torch.cat(own), torch.cat(best)
