"""A call in progress: its answers, step by step, and its result."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.model.batch import Batch, EngineOptions, StreamChunk
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.request import Answer, Request
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.model.verify import Origin

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt of :meth:`EagleFSD.generate_many`.

    Attributes:
        index: Index of the prompt.
        tokens: The new tokens.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each.
        stats: Statistics; their seconds are those during which the answer was decoded, together
            with others.
        details: The details of each token; empty unless requested.
    """

    index: int
    tokens: list[int]
    origins: list[int]
    stats: DecodeStats
    details: list[TokenDetail]


class Generation:
    """A call in progress, returned by :meth:`EagleFSD.stream`.

    Iterate to decode; nothing is processed before. :meth:`output` returns everything emitted so
    far, even if the iteration was abandoned. :meth:`close` ends the call and frees its caches,
    except for those kept on CUDA, see :meth:`EagleFSD.release_memory`; leaving a ``with`` block or
    dropping the last reference does the same.

    Args:
        options: What the engines are built from; a prefix cache among them is kept.
        requests: What to decode, a request for each row.
        pad_token_id: Token that fills rows which ended before others.
    """

    def __init__(
        self, options: EngineOptions, requests: Sequence[Request], pad_token_id: int
    ) -> None:
        self._pad_token_id = pad_token_id
        batch = Batch(options, len(requests))
        self._answers = [batch.add(request) for request in requests]
        self.stats = DecodeStats(
            [answer.stats.accepted[0] for answer in self._answers],
            [answer.stats.origins[0] for answer in self._answers],
        )
        # Only the iterator holds the batch, and it does not refer back to this object, so that the
        # caches are freed as soon as the call ends.
        self._steps = _decode(batch, self._answers, self.stats, options.caches)

    def __iter__(self) -> Generator[StreamChunk]:
        """Continue decoding: yield one chunk per row and step until every row has ended."""
        return self._steps

    def close(self) -> None:
        """End the call; iterating again yields nothing."""
        self._steps.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def finish(self, streamer: BaseStreamer | None = None) -> GenerateOutput:
        """Decode until every row has ended, and return everything emitted.

        A Hugging Face ``streamer`` receives the tokens of each step, but not the prompt; it is for
        a single row only.
        """
        for chunk in self:
            if streamer is not None:
                streamer.put(torch.tensor(chunk.tokens))
        if streamer is not None:
            streamer.end()
        return self.output()

    def output(self) -> GenerateOutput:
        """Return everything emitted so far."""
        ids = torch.stack([answer.request.ids for answer in self._answers])
        width = max(len(answer.tokens) for answer in self._answers)

        def padded(rows: list[list[int]], fill: int, dtype: torch.dtype) -> Tensor:
            rows = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(rows, dtype=dtype, device=ids.device)

        new = padded([answer.tokens for answer in self._answers], self._pad_token_id, ids.dtype)
        origins = [answer.origins for answer in self._answers]
        return GenerateOutput(
            torch.cat([ids, new], 1), padded(origins, int(Origin.PADDING), torch.uint8), self.stats
        )


def _decode(
    batch: Batch, answers: list[Answer], stats: DecodeStats, prefix_cache: PrefixCache | None
) -> Generator[StreamChunk]:
    """Take steps until every answer has ended, and yield what each step emitted."""
    with prefix_cache.in_use() if prefix_cache is not None else nullcontext(), closing(batch):
        while len(batch):
            found = batch.step()
            stats.passes = batch.passes
            stats.prefilled = sum(answer.stats.prefilled for answer in answers)
            stats.seconds = batch.seconds
            for _, chunk in found:
                if chunk.tokens:
                    yield chunk
            for answer, _ in found:
                if answer.error is not None:
                    raise answer.error


def decode_many(batch: Batch, requests: Iterator[Request]) -> Iterator[Completion]:
    """Decode requests, read as rows become free; raise the first error after all answers."""
    source = enumerate(requests)
    running: dict[Answer, tuple[int, list[TokenDetail]]] = {}
    error: Exception | None = None
    with closing(batch):
        while True:
            for index, request in islice(source, batch.free):
                running[batch.add(request)] = index, []
            if not len(batch):
                break
            for answer, chunk in batch.step():
                running[answer][1].extend(chunk.details or [])
                if not chunk.finished:
                    continue
                index, details = running.pop(answer)
                if answer.error is None:
                    yield Completion(
                        index=index,
                        tokens=answer.tokens,
                        origins=answer.origins,
                        stats=answer.stats,
                        details=details,
                    )
                else:
                    log.warning("prompt %d failed: %s", index, answer.error)
                    error = error or answer.error
    if error is not None:
        raise error
