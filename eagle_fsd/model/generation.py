"""The decoding loop of one call: run engine steps and decide where each row ends."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.model.engine import Engine, TokenDetail
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.sampling import History
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.verify import Origin


@dataclass
class GenerateOutput:
    """The result of :meth:`EagleFSD.generate`.

    Attributes:
        sequences: ``[B, prompt + new]``: prompts as given, answers padded on the right.
        origins: ``[B, new]`` uint8 :class:`~eagle_fsd.model.verify.Origin` of each new token.
        stats: Accepted lengths, origins, and seconds by phase.
    """

    sequences: Tensor
    origins: Tensor
    stats: DecodeStats


@dataclass
class StreamChunk:
    """The tokens that one step emitted for one row.

    Attributes:
        row: Index of the prompt.
        tokens: Token ids.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each token.
        finished: Whether the row has ended.
        details: The details of each token; None unless requested.
    """

    row: int
    tokens: list[int]
    origins: list[int]
    finished: bool
    details: list[TokenDetail] | None = None


@dataclass(frozen=True)
class EndConditions:
    """When a row ends.

    Attributes:
        max_new_tokens: For each row, the number of tokens after which it ends.
        eos_token_ids: Tokens that end a row.
        pad_token_id: Token that fills rows which ended before others.
        criteria: Hugging Face stopping criteria, checked after every token.
    """

    max_new_tokens: Sequence[int]
    eos_token_ids: frozenset[int]
    pad_token_id: int
    criteria: StoppingCriteriaList


class Generation:
    """A call in progress, returned by :meth:`EagleFSD.stream`.

    Iterate to decode; the first iteration processes the prompts. :meth:`output` returns everything
    emitted so far, even if the iteration was abandoned. :meth:`close` ends the call and frees its
    caches; leaving a ``with`` block or dropping the last reference does the same.

    Args:
        engine: Decodes the rows.
        input_ids: ``[B, S]`` token ids as the caller passed them, padding included.
        prompts: For each row, ``[S]`` token ids without padding, on the target's device.
        ends: When a row ends.
        prefix_cache: Caches of earlier calls; for a single prompt only.
    """

    def __init__(
        self,
        engine: Engine,
        input_ids: Tensor,
        prompts: list[Tensor],
        ends: EndConditions,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._answers = _Answers(input_ids, ends)
        self._answers.stats.seconds = engine.clock.seconds
        # Only the iterator holds the engine, and it does not refer back to this object, so that
        # the caches are freed as soon as the call ends.
        self._steps = _decode(engine, prompts, self._answers, prefix_cache)

    @property
    def stats(self) -> DecodeStats:
        """Statistics of the call so far."""
        return self._answers.stats

    def __iter__(self) -> Generator[StreamChunk]:
        """Continue decoding: yield one chunk per row and step until every row has ended."""
        return self._steps

    def close(self) -> None:
        """End the call and free its caches; iterating again yields nothing."""
        self._steps.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def finish(self, streamer: BaseStreamer | None = None) -> GenerateOutput:
        """Decode until every row has ended, and return everything emitted.

        Args:
            streamer: A Hugging Face streamer that receives the tokens of each step.
        """
        for chunk in self:
            if streamer is not None:
                streamer.put(torch.tensor(chunk.tokens))
        if streamer is not None:
            streamer.end()
        return self.output()

    def output(self) -> GenerateOutput:
        """Return everything emitted so far."""
        return self._answers.output()


class _Answers:
    """What every row has emitted so far."""

    def __init__(self, input_ids: Tensor, ends: EndConditions) -> None:
        self.input_ids, self.ends = input_ids, ends
        self.stats = DecodeStats.empty(len(input_ids))
        self.tokens: list[list[int]] = [[] for _ in input_ids]
        self.origins: list[list[int]] = [[] for _ in input_ids]

    def add(self, row: int, tokens: list[int], origins: list[int]) -> tuple[int, bool]:
        """Add tokens to a row up to its end.

        Returns:
            The number of tokens added, and whether the row has ended.
        """
        count, ended = self._end(row, tokens)
        self.origins[row] += origins[:count]
        self.stats.add(row, origins[:count])
        return count, ended

    def _end(self, row: int, tokens: list[int]) -> tuple[int, bool]:
        new = self.tokens[row]
        for count, token in enumerate(tokens, 1):
            new.append(token)
            if (
                token in self.ends.eos_token_ids
                or len(new) >= self.ends.max_new_tokens[row]
                or self._meets_criteria(row)
            ):
                return count, True
        return len(tokens), False

    def _meets_criteria(self, row: int) -> bool:
        if not self.ends.criteria:
            return False
        ids = torch.cat([self.input_ids[row], self.input_ids.new_tensor(self.tokens[row])])
        return bool(self.ends.criteria(ids[None], None).any())

    def output(self) -> GenerateOutput:
        width = max(map(len, self.tokens))
        device = self.input_ids.device

        def padded(rows: list[list[int]], fill: int, dtype: torch.dtype) -> Tensor:
            rows = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(rows, dtype=dtype, device=device)

        new = padded(self.tokens, self.ends.pad_token_id, self.input_ids.dtype)
        origins = padded(self.origins, int(Origin.PADDING), torch.uint8)
        return GenerateOutput(torch.cat([self.input_ids, new], 1), origins, self.stats)


@torch.inference_mode()
def _decode(
    engine: Engine, prompts: list[Tensor], answers: _Answers, prefix_cache: PrefixCache | None
) -> Generator[StreamChunk]:
    """Run engine steps until every row has ended, and yield what each step emitted."""
    limits = answers.ends.max_new_tokens
    history = None
    if engine.sampler.needs_history:
        capacity = max(limits) + engine.tree.depth + 2
        history = History(answers.input_ids.to(engine.target.device, torch.long), capacity)
    with prefix_cache.in_use() if prefix_cache is not None else nullcontext():
        engine.prefill(prompts, limits, history, prefix_cache)
        answers.stats.prefilled = engine.prefilled
        live = list(range(len(prompts)))  # the prompt of each row of the engine
        while live:
            result = engine.step()
            answers.stats.passes += 1
            ended, chunks = [], []
            for place, row in enumerate(live):
                tokens, origins = result.tokens[place], result.origins[place]
                count, finished = answers.add(row, tokens, origins)
                details = result.details[place][:count] if result.details else None
                if finished:
                    ended.append(place)
                chunks.append(StreamChunk(row, tokens[:count], origins[:count], finished, details))
            if len(ended) == len(live):
                live = []
            elif ended:
                live = [live[place] for place in engine.drop(ended)]
            engine.clock.enter(None)  # time spent by the caller is not counted
            engine.clock.collect()
            yield from chunks
