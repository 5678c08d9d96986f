"""Answer questions with several methods, turn by turn, and time every answer."""

from __future__ import annotations

import copy
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from eagle_fsd.evaluation.answer_store import AnswerStore, Record, Session
from eagle_fsd.evaluation.config import BenchConfig, EvaluationConfig
from eagle_fsd.evaluation.memory import PeakMemory
from eagle_fsd.evaluation.methods import Method, MethodOutput, decode, synchronize
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.chat_templates import ChatTemplate, encode_prompt

#: Maximum number of positions whose distributions are in memory at once.
LIKELIHOOD_CHUNK = 512
#: A question with its index in the set.
IndexedQuestion = tuple[int, Question]

#: Values of a turn that was not decoded.
EMPTY_TURN: dict[str, Any] = {
    "turns": "",
    "idxs": 0,
    "new_tokens": 0,
    "wall_time": 0.0,
    "accepted": [],
    "origins": [],
    "prompt_ids": [],
    "token_ids": [],
    "log_likelihood": None,
    "regrets": [],
    "memory": None,
    "cut_off": False,
}


class Answerer:
    """Answer questions with each of several methods.

    Every batch of questions is answered by all methods in rotating order, so that changes in the
    machine's speed affect all of them alike. Each method first decodes one turn untimed.

    Args:
        model: The pair; its tokenizer is used.
        chat_template: How chats are formatted.
        methods: The methods.
        stores: One opened store per method, in the same order.
        config: How answers are decoded. A :class:`BenchConfig` decodes each turn ``repeats`` times
            and records the seconds spent in each phase.
        session: The session recorded in every answer.
        process: Index of this process, which answers every ``processes``-th question.
        processes: Number of processes.
    """

    def __init__(
        self,
        model: EagleFSD,
        chat_template: ChatTemplate,
        methods: Sequence[Method],
        stores: Sequence[AnswerStore],
        config: EvaluationConfig,
        session: Session,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.model, self.chat_template, self.config = model, chat_template, config
        self.session = session
        self.methods, self.stores = list(methods), list(stores)
        self.process, self.processes = process, processes
        self.memory = PeakMemory(model.target.device)
        self.eos_token_ids = [*model.eos_token_ids, *chat_template.stop_token_ids]
        stop = list(chat_template.stop)
        self.stopping_criteria = [StopStringCriteria(model.tokenizer, stop)] if stop else []
        self._pairs: dict[str, EagleFSD] = {}

    def run(
        self, questions: Sequence[Question], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Answer this process's share of the questions, except for those that have answers.

        Args:
            questions: All questions.
            progress: Called with the number of answers so far and the total.
        """
        share = list(enumerate(questions))[self.process :: self.processes]
        size, count = self.group_size, len(self.methods)
        work: list[tuple[int, list[IndexedQuestion]]] = []
        for round_, start in enumerate(range(0, len(share), size)):
            for step in range(count):
                method = (round_ + step) % count
                group = [
                    (index, question)
                    for index, question in share[start : start + size]
                    if question.question_id not in self.stores[method]
                ]
                if group:
                    work.append((method, group))
        total = len(share) * count
        done = total - sum(len(group) for _, group in work)
        warmed_up: set[int] = set()
        for method, group in work:
            if method not in warmed_up:
                warmed_up.add(method)
                chats = [item.first_chat() for _, item in group]
                self._answer_turn(self.methods[method], chats, [0] * len(group))
        self._pairs.clear()  # forget what was learned from these answers
        for method, group in work:
            for record in self.answer(group, self.methods[method]):
                self.stores[method].append(record)
            done += len(group)
            if progress is not None:
                progress(done, total)

    @property
    def group_size(self) -> int:
        """Number of questions after which the next method takes its turn."""
        return self.config.batch if self.config.samples * self.config.seeds == 1 else 1

    def answer(self, group: Sequence[IndexedQuestion], method: Method) -> list[Record]:
        """Answer a group of questions, all samples and turns.

        A batch consists of several questions or, if there are several samples, of the samples of
        one question, which thus do not depend on other questions.

        Args:
            group: Questions with their index in the set, at most :attr:`group_size`.
            method: The method.

        Returns:
            A record of the answer file for each question, with a choice per sample. ``batch`` is
            the same for the questions of a group; in a choice, it tells apart the samples that were
            not decoded at once.
        """
        size, count = self.config.batch, self.config.samples * self.config.seeds
        samples = [(question, sample) for _, question in group for sample in range(count)]
        choices = [
            {"batch": first // size, **choice}
            for first in range(0, len(samples), size)
            for choice in self._answer_batch(samples[first : first + size], method)
        ]
        return [
            {
                "question_id": question.question_id,
                "category": question.category,
                "answer_id": uuid.uuid4().hex[:22],
                "model_id": method.name,
                "session": self.session.begin(),
                "batch": index // (self.group_size * self.processes),
                "choices": choices[row * count : (row + 1) * count],
                "tstamp": time.time(),
            }
            for row, (index, question) in enumerate(group)
        ]

    def _answer_batch(
        self, samples: Sequence[tuple[Question, int]], method: Method
    ) -> list[dict[str, Any]]:
        """Answer questions at once, all turns; each comes with the index of the sample."""
        choices: list[dict[str, Any]] = [{"index": sample} for _, sample in samples]
        chats = [question.opening() for question, _ in samples]
        for turn in range(max(len(question.turns) for question, _ in samples)):
            rows = [row for row, (question, _) in enumerate(samples) if turn < len(question.turns)]
            seeds = []
            for row in rows:
                question, sample = samples[row]
                chats[row].append({"role": "user", "content": question.turns[turn]})
                repetition, number = divmod(sample, self.config.samples)
                seed = self.config.seed + repetition
                seeds.append(answer_seed(seed, question.question_id, number, turn))
            answers = self._answer_turn(method, [chats[row] for row in rows], seeds)
            for row, values in zip(rows, answers, strict=True):
                chats[row].append({"role": "assistant", "content": values["turns"]})
                for name, value in values.items():
                    choices[row].setdefault(name, []).append(value)
        return choices

    def _answer_turn(
        self,
        method: Method,
        chats: Sequence[Sequence[dict[str, str]]],
        seeds: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Answer one turn of each chat, and return the turn's values for each."""
        model, limit = self.model, self.config.max_new_tokens
        prompts = [encode_prompt(chat, model.tokenizer, self.chat_template)[0] for chat in chats]
        answers: list[dict[str, Any]] = []
        calls: list[tuple[list[int], int]] = []
        full: list[int] = []
        for row, prompt in enumerate(prompts):
            error = f"the prompt's {len(prompt)} tokens fill the context"
            answers.append({**EMPTY_TURN, "errors": error, **self._phases({}, 0.0)})
            room = model.target.context_length - len(prompt)
            if room >= limit:
                full.append(row)
            elif room > 0:
                # Decoded separately: the longest prompt limits the new tokens of all rows, and an
                # answer must not depend on the rest of its batch.
                calls.append(([row], room))
        if full:
            calls.insert(0, (full, limit))
        for rows, room in calls:
            decoded = self._decode(method, [prompts[row] for row in rows], room, seeds[rows[0]])
            for row, values in zip(rows, decoded, strict=True):
                answers[row] = values
        return answers

    def _pair(self, method: Method) -> EagleFSD:
        """Return the pair for a method; a drafter that learns does so from its answers only."""
        if method.name not in self._pairs:
            pair = copy.copy(self.model)
            pair.drafter = self.model.drafter.fresh().attach(pair.target)
            self._pairs[method.name] = pair
        return self._pairs[method.name]

    def _decode(
        self, method: Method, prompts: Sequence[Tensor], max_new_tokens: int, seed: int
    ) -> list[dict[str, Any]]:
        """Decode prompts in one call, and return a turn's values for each."""
        model, config = self._pair(method), self.config
        padded = model.tokenizer.pad(
            {"input_ids": [prompt.tolist() for prompt in prompts]},
            padding_side="left",
            return_tensors="pt",
        ).to(model.target.device)
        repeats = 1
        if isinstance(config, BenchConfig) and not model.drafter.learns:
            repeats = config.repeats
        seconds = 0.0
        phases: dict[str, float] = {}
        self.memory.start()
        for _ in range(repeats):
            synchronize(model)
            begin = time.perf_counter()
            out = decode(
                model,
                method,
                padded["input_ids"],
                padded["attention_mask"],
                config.sampling(seed),
                max_new_tokens,
                self.eos_token_ids,
                self.stopping_criteria,
            )
            synchronize(model)
            seconds += (time.perf_counter() - begin) / repeats
            for phase, spent in (out.stats.seconds if out.stats else {}).items():
                phases[phase] = phases.get(phase, 0.0) + spent / repeats
        memory = self.memory.read()
        total = max(1, sum(map(len, out.tokens)))
        turns = []
        for row, tokens in enumerate(out.tokens):
            origins = out.origins[row] if out.origins else []
            own, best = answer_log_probs(model.target, prompts[row], tokens)
            text = str(model.tokenizer.decode(tokens, skip_special_tokens=True))
            share = len(tokens) / total  # a batch's time is divided in proportion to tokens
            turns.append(
                {
                    "turns": _truncate_at_stop(text, self.chat_template.stop).strip(),
                    "idxs": _count_passes(method, out, row),
                    "new_tokens": len(tokens),
                    "wall_time": seconds * share,
                    "accepted": out.stats.accepted[row] if out.stats else [],
                    "origins": origins,
                    "prompt_ids": prompts[row].tolist(),
                    "token_ids": tokens.tolist(),
                    "log_likelihood": float(own.mean()) if len(tokens) else None,
                    "regrets": [
                        max(0.0, float(best[at] - own[at]))
                        for at, origin in enumerate(origins)
                        if origin == Origin.FUZZY
                    ],
                    "memory": memory,
                    "cut_off": self._is_cut_off(text, tokens),
                    "errors": None,
                    **self._phases(phases, share),
                }
            )
        return turns

    def _phases(self, seconds: dict[str, float], share: float) -> dict[str, Any]:
        """Return the field ``phases`` with a row's seconds, which only benchmarks record."""
        if not isinstance(self.config, BenchConfig):
            return {}
        return {"phases": {phase: share * spent for phase, spent in seconds.items()}}

    def _is_cut_off(self, text: str, tokens: Tensor) -> bool:
        """Return whether an answer ended without an end token or a stop string."""
        ended = len(tokens) > 0 and int(tokens[-1]) in self.eos_token_ids
        return not ended and not any(stop in text for stop in self.chat_template.stop)


def answer_seed(seed: int, question_id: int | str, sample: int, turn: int) -> int:
    """Return the seed with which a turn of an answer is sampled.

    It depends neither on the other questions of a run nor on their order, so that a larger run
    draws the same answers. A batch is sampled with the seed of its first answer.

    Args:
        seed: The run's seed.
        question_id: The question's id.
        sample: Index of the sample.
        turn: Index of the turn.

    Returns:
        A non-negative integer below 2**56.
    """
    key = json.dumps([seed, question_id, sample, turn])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])


def _count_passes(method: Method, out: MethodOutput, row: int) -> int | None:
    """Return the number of target passes; None if the method does not report it."""
    if out.stats is not None:
        return len(out.stats.accepted[row])
    return len(out.tokens[row]) if method.assistant is None else None


def _truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string, as FastChat does."""
    found = [index for item in stop if (index := text.find(item)) >= 0]
    return text[: min(found)] if found else text


@torch.inference_mode()
def answer_log_probs(target: Target, prompt: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the target's log-probabilities along an answer, in one pass over it.

    Args:
        target: The target.
        prompt: ``[S]`` token ids.
        answer: ``[A]`` token ids.

    Returns:
        ``[A]`` log-probabilities of the answer's tokens, and ``[A]`` of the likeliest token at each
        position; float64, in nats. What a token gives up, its *regret*, is their difference.
    """
    if not len(answer):
        return torch.zeros(0, dtype=torch.double), torch.zeros(0, dtype=torch.double)
    ids = torch.cat([prompt.to(target.device), answer.to(target.device)])
    output = target.model.base_model(input_ids=ids[None], use_cache=False)
    features = output.last_hidden_state[0, len(prompt) - 1 : -1].to(target.device)
    own, best = [], []
    for start in range(0, len(answer), LIKELIHOOD_CHUNK):
        chunk = slice(start, start + LIKELIHOOD_CHUNK)
        log_probs = target.project(features[chunk]).log_softmax(-1)
        tokens = answer[chunk, None].to(log_probs.device)
        own.append(log_probs.gather(1, tokens)[:, 0].double().cpu())
        best.append(log_probs.amax(-1).double().cpu())
    return torch.cat(own), torch.cat(best)
