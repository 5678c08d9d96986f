"""Generate the answers of the API and the FastChat worker.

Both use :meth:`LocalBackend.answer`, which takes the parameters that
:func:`eagle_fsd.chat.requests.read_request` validates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import (
    DecodeObserver,
    DecodeQueue,
    DecodingError,
    JobUpdate,
    QueueFullError,
)
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.requests import default_acceptance, read_acceptance, read_request
from eagle_fsd.chat.session import (
    AnswerRequest,
    PromptScores,
    answer_stats,
    max_chars,
    score_prompt,
    token_usage,
)
from eagle_fsd.chat.text import Piece, TokenDecoder
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, encode_prompt

log = logging.getLogger(__name__)

#: Tokens of an echoed prompt in one update.
PROMPT_PART = 64


@dataclass(frozen=True)
class About:
    """A backend's name, default acceptance options, and limits of requests."""

    name: str
    acceptance: AcceptanceConfig
    limits: Limits


class LocalBackend:
    """A pair in this process.

    A thread of its own tokenizes requests: a tokenizer is not thread-safe, and a long prompt takes
    seconds, while other answers must continue to stream.
    """

    def __init__(
        self,
        model: EagleFSD,
        chat_template: ChatTemplate,
        limits: Limits,
        name: str,
        observer: DecodeObserver | None = None,
    ) -> None:
        self.model, self.chat_template = model, chat_template
        self.about = About(name, default_acceptance(model, limits), limits)
        self.queue = DecodeQueue(
            model,
            max_waiting=limits.queue,
            max_batch=limits.max_batch,
            observer=observer,
            stall_timeout=limits.stall_timeout,
        )
        self.reader = ThreadPoolExecutor(1, "read")
        self.tokens = TokenDecoder(model.tokenizer)

    async def answer(
        self, params: Mapping[str, Any], client: str = "", method: str = "fsd"
    ) -> AsyncGenerator[tuple[AnswerRequest, JobUpdate], None]:
        """Stream an answer; with ``echo``, the first updates hold the prompt.

        ``method`` is ``"fsd"``, or ``"ar"`` to decode without the drafter. Yields the validated
        request with each update. Raises RequestError, QueueFullError or DecodingError.
        """
        finished = self.queue.observer.request_finished
        try:
            self.queue.check_room(client)
            request = replace(await self.read(params), client=client, method=method)
            if request.echo_texts:
                async for update in self._echo(request):
                    yield request, update
            if request.prompt_only:
                finished("ended", {**answer_stats(DecodeStats.empty(1)), **_prompt_usage(request)})
                return
            async with contextlib.aclosing(self.queue.submit(request).updates()) as found:
                async for update in found:
                    yield request, update
        except RequestError:
            finished("refused", {})
            raise
        except QueueFullError:
            finished("queue_full", {})
            raise
        except DecodingError:
            raise
        except Exception as error:  # from a tokenizer, a chat template or the scoring of a prompt
            log.exception("a request failed")
            finished("failed", {})
            raise DecodingError("the request could not be processed") from error

    async def _echo(self, request: AnswerRequest) -> AsyncGenerator[JobUpdate, None]:
        """Yield the prompt in parts, scored in the decoding queue if requested."""
        scores: PromptScores | None = None
        if request.details is not None:
            count = request.details
            scores = await self.queue.call(
                lambda cancelled: score_prompt(self.model, request.ids, count, cancelled),
                request.client,
            )
        stats = answer_stats(DecodeStats.empty(1))
        tokens, texts = request.ids[0].tolist(), request.echo_texts
        for start in range(0, len(tokens), PROMPT_PART):
            end = min(start + PROMPT_PART, len(tokens))
            details: list[TokenDetail | None] = [None] * (end - start)
            if scores is not None:
                details = [*([] if start else [None]), *scores.details(max(0, start - 1), end - 1)]
            part = zip(texts[start:end], tokens[start:end], details, strict=True)
            yield JobUpdate(
                [Piece(text, token, Origin.PADDING, detail) for text, token, detail in part],
                _prompt_usage(request),
                "length" if request.prompt_only and end == len(tokens) else None,
                stats,
            )

    def acceptance(self, fsd: Mapping[str, Any], lossless: bool) -> AcceptanceConfig:
        """Return the acceptance options of a request; raises RequestError."""
        return read_acceptance(fsd, lossless, self.model, self.about.limits)

    async def read(self, params: Mapping[str, Any]) -> AnswerRequest:
        """Validate and tokenize a request, one at a time; raises RequestError."""
        return await asyncio.get_running_loop().run_in_executor(
            self.reader, read_request, params, self.model, self.chat_template, self.about.limits
        )

    async def tokenize(self, prompt: str, chat: Chat | None, special: bool) -> list[int]:
        """Tokenize a raw prompt, with special tokens or without, or a chat; raises RequestError."""

        def encode() -> list[int]:
            tokenizer = self.model.tokenizer
            if chat is None:
                tokens: list[int] = tokenizer(prompt, add_special_tokens=special).input_ids
                return tokens
            try:
                return list(encode_prompt(chat, tokenizer, self.chat_template)[0].tolist())
            except ValueError as error:  # the template rejects the chat
                raise RequestError(str(error), RequestError.INVALID) from error

        return await asyncio.get_running_loop().run_in_executor(self.reader, encode)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included; raises RequestError."""
        last = self.model.target.vocab_size - 1
        if not all(0 <= token <= last for token in tokens):
            raise RequestError(f"tokens must be token ids in [0, {last}]")
        decode = partial(self.model.tokenizer.decode, list(tokens))
        return str(await asyncio.get_running_loop().run_in_executor(self.reader, decode))

    async def embed(self, texts: Sequence[str], client: str = "") -> tuple[list[list[float]], int]:
        """Embed texts as the mean of the target's features, scaled to length 1.

        Returns a vector for each text, truncated to the context, and the number of tokens. Answers
        take a step between two texts. Raises RequestError for a text without tokens, and
        QueueFullError.
        """
        vectors: list[list[float]] = []
        count = 0
        for text in texts:
            work = partial(self._embed, text)
            vector, tokens = await self.queue.call(work, client, admitted=bool(vectors))
            vectors.append(vector)
            count += tokens
        return vectors, count

    @torch.inference_mode()
    def _embed(self, text: str, _cancelled: Callable[[], bool]) -> tuple[list[float], int]:
        context, base = self.model.target.context_length, self.model.model.base_model
        encoded = self.model.tokenizer(text[: max_chars(context)], return_tensors="pt")
        ids = encoded.input_ids[:, :context]
        if not ids.shape[1]:
            raise RequestError("input must not contain texts without tokens")
        features = base(input_ids=ids.to(base.device), use_cache=False).last_hidden_state
        mean = features[0].float().mean(0)
        return torch.nn.functional.normalize(mean, dim=0).cpu().tolist(), ids.shape[1]

    def close(self) -> None:
        """Stop the decoding thread and the tokenizing thread."""
        self.reader.shutdown(wait=False, cancel_futures=True)
        self.queue.close()


def _prompt_usage(request: AnswerRequest) -> dict[str, int]:
    return token_usage(request.ids.shape[1], 0)
