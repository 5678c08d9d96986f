"""The decoding loop of one call: run engine steps and decide where each row ends."""

from __future__ import annotations

from collections.abc import Iterator
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
        max_new_tokens: Number of tokens after which a row ends.
        eos_token_ids: Tokens that end a row.
        pad_token_id: Token that fills rows which ended before others.
        criteria: Hugging Face stopping criteria, checked after every token.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int
    criteria: StoppingCriteriaList


class Generation:
    """A call in progress, returned by :meth:`EagleFSD.stream`.

    Iterate to decode; the first iteration processes the prompts. :meth:`output` returns everything
    emitted so far, even if the iteration was abandoned.

    Args:
        engine: Decodes the rows.
        input_ids: ``[B, S]`` token ids as the caller passed them, padding included.
        prompts: For each row, ``[S]`` token ids without padding, on the target's device.
        ends: When a row ends.
        prefix_cache: Caches of earlier calls; for a single prompt only.

    Attributes:
        stats: Statistics of the call so far.
    """

    def __init__(
        self,
        engine: Engine,
        input_ids: Tensor,
        prompts: list[Tensor],
        ends: EndConditions,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.input_ids, self.prompts, self.ends = input_ids, prompts, ends
        self.prefix_cache = prefix_cache
        self.stats = DecodeStats.empty(len(prompts))
        self.stats.seconds = engine.clock.seconds
        self._new: list[list[int]] = [[] for _ in prompts]
        self._origins: list[list[int]] = [[] for _ in prompts]
        # Only the iterator holds the engine, so that its caches are freed when the call ends.
        self._steps = self._run(engine)

    def __iter__(self) -> Iterator[StreamChunk]:
        """Continue decoding: yield one chunk per row and step until every row has ended."""
        return self._steps

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
        width = max(map(len, self._new))
        device = self.input_ids.device

        def padded(rows: list[list[int]], fill: int, dtype: torch.dtype) -> Tensor:
            rows = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(rows, dtype=dtype, device=device)

        new = padded(self._new, self.ends.pad_token_id, self.input_ids.dtype)
        origins = padded(self._origins, int(Origin.PADDING), torch.uint8)
        return GenerateOutput(torch.cat([self.input_ids, new], 1), origins, self.stats)

    @torch.inference_mode()
    def _run(self, engine: Engine) -> Iterator[StreamChunk]:
        history = None
        if engine.sampler.needs_history:
            capacity = self.ends.max_new_tokens + engine.tree.depth + 2
            history = History(self.input_ids.to(engine.target.device, torch.long), capacity)
        engine.prefill(self.prompts, self.ends.max_new_tokens, history, self.prefix_cache)
        self.stats.prefilled = engine.prefilled
        live = list(range(len(self.prompts)))  # the prompt of each row of the engine
        while live:
            result = engine.step()
            self.stats.passes += 1
            ended, chunks = [], []
            for place, row in enumerate(live):
                tokens, finished = self._take(row, result.tokens[place])
                origins = result.origins[place][: len(tokens)]
                details = result.details[place][: len(tokens)] if result.details else None
                self._origins[row] += origins
                self.stats.add(row, origins)
                if finished:
                    ended.append(place)
                chunks.append(StreamChunk(row, tokens, origins, finished, details))
            if len(ended) == len(live):
                live = []
            elif ended:
                live = [live[place] for place in engine.drop(ended)]
            engine.clock.enter(None)  # time spent by the caller is not counted
            engine.clock.collect()
            yield from chunks

    def _take(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Add tokens to a row up to its end; return the added tokens and whether the row ended."""
        new = self._new[row]
        for count, token in enumerate(tokens, 1):
            new.append(token)
            if (
                token in self.ends.eos_token_ids
                or len(new) >= self.ends.max_new_tokens
                or self._meets_criteria(row)
            ):
                return tokens[:count], True
        return tokens, False

    def _meets_criteria(self, row: int) -> bool:
        if not self.ends.criteria:
            return False
        ids = torch.cat([self.input_ids[row], self.input_ids.new_tensor(self._new[row])])
        return bool(self.ends.criteria(ids[None], None).any())
