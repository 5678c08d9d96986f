"""One call on its way: steps of the engine, and where each row ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.model.engine import Engine, TokenDetail
from eagle_fsd.model.stats import DecodeStats, PhaseClock
from eagle_fsd.model.verify import Origin


@dataclass
class GenerateOutput:
    """What :meth:`EagleFSD.generate` returns.

    Attributes:
        sequences: ``[B, prompt + new]``: prompts as given, answers padded on the right.
        origins: ``[B, new]`` uint8, :class:`~eagle_fsd.model.verify.Origin` of each new token.
        stats: Accepted lengths, origins, seconds by phase.
    """

    sequences: Tensor
    origins: Tensor
    stats: DecodeStats


@dataclass
class StreamChunk:
    """New tokens of one row, as one step emitted them.

    Attributes:
        row: Which prompt.
        tokens: Their ids. origins: Their :class:`~eagle_fsd.model.verify.Origin`.
        finished: Whether the row is complete.
        details: What is known of each token, where that was asked for.
    """

    row: int
    tokens: list[int]
    origins: list[int]
    finished: bool
    details: list[TokenDetail] | None = None


class Decoding:
    """Iterating decodes; afterwards, or whenever the caller has enough, :meth:`output` has it all.

    Made by :meth:`EagleFSD.stream`, which has checked the arguments.

    Args:
        make_engine: Called when decoding begins: it allocates the caches and reads the prompts.
        input_ids: ``[B, S]`` as the caller gave them.
        eos: Ids that end a row. pad: What fills a row that ended.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        clock: PhaseClock,
        input_ids: Tensor,
        max_new_tokens: int,
        eos: set[int],
        pad: int,
        criteria: StoppingCriteriaList,
    ) -> None:
        self.input_ids, self.max_new_tokens = input_ids, max_new_tokens
        self.eos, self.pad, self.criteria = eos, pad, criteria
        self.clock = clock
        rows = input_ids.shape[0]
        self.new: list[list[int]] = [[] for _ in range(rows)]
        self.origins: list[list[int]] = [[] for _ in range(rows)]
        self.stats = DecodeStats.empty(rows)
        self.stats.seconds = clock.seconds
        self._make_engine = make_engine
        self._steps = self._run()

    def finish(self, streamer: BaseStreamer | None = None) -> GenerateOutput:
        """Decode to the end, telling ``streamer`` what each step emitted."""
        for chunk in self:
            if streamer is not None:
                streamer.put(torch.tensor(chunk.tokens))
        if streamer is not None:
            streamer.end()
        return self.output()

    def __iter__(self) -> Iterator[StreamChunk]:
        """Every call goes on where the last one left off."""
        return self._steps

    @torch.inference_mode()
    def _run(self) -> Iterator[StreamChunk]:
        engine = self._make_engine()
        self.stats.prefilled = engine.prefilled
        live = list(range(len(self.new)))
        while live:
            result = engine.step()
            self.stats.passes += 1
            ended, chunks = [], []
            for place, row in enumerate(live):
                tokens, finished = self._take(row, result.tokens[place])
                origins = result.origins[place][: len(tokens)]
                self.origins[row] += origins
                self.stats.add(row, origins)
                if finished:
                    ended.append(place)
                details = result.details and result.details[place][: len(tokens)]
                chunks.append(StreamChunk(row, tokens, origins, finished, details))
            if ended and len(ended) < len(live):
                live = [live[place] for place in engine.drop(ended)]
            elif ended:
                live = []
            self.clock.enter(None)  # what the caller does with the tokens is the caller's time
            self.clock.collect()
            yield from chunks

    def _take(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Add a step's tokens to a row up to its end: the tokens taken, and whether it ended."""
        new = self.new[row]
        for taken, token in enumerate(tokens, 1):
            new.append(token)
            if token in self.eos or len(new) >= self.max_new_tokens or self._stops(row):
                return tokens[:taken], True
        return tokens, False

    def _stops(self, row: int) -> bool:
        if not self.criteria:
            return False
        ids = torch.cat([self.input_ids[row], self.input_ids.new_tensor(self.new[row])])
        return bool(self.criteria(ids[None], None).any())

    def output(self) -> GenerateOutput:
        """Everything emitted so far."""
        width = max(map(len, self.new))
        device = self.input_ids.device

        def padded(rows: list[list[int]], fill: int, dtype: torch.dtype) -> Tensor:
            rows = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(rows, dtype=dtype, device=device)

        new = padded(self.new, self.pad, self.input_ids.dtype)
        origins = padded(self.origins, int(Origin.PADDING), torch.uint8)
        return GenerateOutput(torch.cat([self.input_ids, new], 1), origins, self.stats)
