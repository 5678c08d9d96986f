"""Generate the answers of the API and the FastChat worker.

Both use :meth:`LocalBackend.answer`, which takes the parameters that
:func:`eagle_fsd.chat.requests.read_request` validates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.decode_queue import DecodeQueue, DecodingError, JobUpdate
from eagle_fsd.chat.request_body import RequestError, UnansweredError
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
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate

log = logging.getLogger(__name__)

Result = TypeVar("Result")
#: An embedding, ``[H]``; as Python numbers it would take eight times the memory.
Vector = NDArray[np.float32]
#: Tokens of an echoed prompt in one update.
PROMPT_PART = 64


class FairThread:
    """A thread that does work for clients in order of arrival, but one task of a client at a time.

    A client with many requests therefore delays those of another by the time of one task.
    """

    def __init__(self, name: str) -> None:
        self.executor = ThreadPoolExecutor(1, name)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, client: str, task: Callable[[], Result]) -> Result:
        """Do a task of a client, and return its result."""
        lock = self._locks.setdefault(client, asyncio.Lock())
        async with lock:
            return await asyncio.get_running_loop().run_in_executor(self.executor, task)


class LocalBackend:
    """A pair in this process, under one or several names.

    One thread tokenizes prompts and another compiles grammars, while answers continue to stream.
    """

    def __init__(
        self, model: EagleFSD, chat_template: ChatTemplate, limits: Limits, names: Sequence[str]
    ) -> None:
        self.model, self.chat_template = model, chat_template
        self.limits, self.names = limits, names
        self.default_acceptance = default_acceptance(model, limits)
        self.tokens = TokenDecoder(model.tokenizer)
        self.queue = DecodeQueue(model, limits)  # starts a thread
        self.reader, self.compiler = FairThread("read"), FairThread("compile")

    async def answer(
        self,
        params: Mapping[str, Any],
        client: str = "",
        method: str = "fsd",
        admitted: bool = False,
    ) -> AsyncGenerator[tuple[AnswerRequest, JobUpdate], None]:
        """Stream an answer; with ``echo``, the first updates hold the prompt.

        ``method`` is ``"fsd"``, or ``"ar"`` to decode without the drafter. An ``admitted`` answer
        continues a request, so a full queue does not refuse it. Yields the validated request with
        each update. Raises RequestError, DecodingError or QueueFullError.
        """
        with self._counted():
            if not admitted:
                self.queue.check_room(client)
            request = await self.read(params, client)
            request = replace(request, client=client, method=method, admitted=admitted)
            if request.compile_grammar is not None:
                grammar = await self.compiler.run(client, request.compile_grammar)
                request = replace(request, grammar=grammar)
            if request.echo_texts:
                async for update in self._echo(request):
                    yield request, update
                request = replace(request, admitted=True)
            if request.prompt_only:
                self._finish(request.ids.shape[1])
                return
            async with contextlib.aclosing(self.queue.submit(request).updates()) as found:
                async for update in found:
                    yield request, update

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request that is refused or fails; the queue counts those that it decodes."""
        finished = self.queue.metrics.request_finished
        try:
            yield
        except UnansweredError as error:
            if not isinstance(error, DecodingError):
                finished("refused" if isinstance(error, RequestError) else "queue_full", {})
            raise
        except Exception as error:  # from a tokenizer, a chat template or a pass over a text
            log.exception("a request failed")
            finished("failed", {})
            raise DecodingError("the request could not be processed") from error

    def _finish(self, prompt_tokens: int) -> None:
        """Count a request that ended without new tokens."""
        stats = {**answer_stats(DecodeStats.empty(1)), **token_usage(prompt_tokens, 0)}
        self.queue.metrics.request_finished("ended", stats)

    async def _echo(self, request: AnswerRequest) -> AsyncGenerator[JobUpdate, None]:
        """Yield the prompt in parts, scored in the decoding queue if requested."""
        scores: PromptScores | None = None
        if request.details is not None:
            count = request.details
            scores = await self.queue.call(
                lambda cancelled: score_prompt(self.model, request.ids, count, cancelled),
                request.client,
                request.admitted,
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
                token_usage(len(tokens), 0),
                "length" if request.prompt_only and end == len(tokens) else None,
                stats,
            )

    def acceptance(self, fsd: Mapping[str, Any], lossless: bool) -> AcceptanceConfig:
        """Return the acceptance options of a request; raises RequestError."""
        with self._counted():
            return read_acceptance(fsd, lossless, self.model, self.limits)

    async def read(self, params: Mapping[str, Any], client: str = "") -> AnswerRequest:
        """Validate and tokenize a request; raises RequestError."""
        read = partial(read_request, params, self.model, self.chat_template, self.limits)
        return await self.reader.run(client, read)

    async def tokenize(
        self, prompt: str, chat: Chat | None, special: bool, client: str = ""
    ) -> list[int]:
        """Tokenize a raw prompt, with special tokens or without, or a chat; raises RequestError."""
        template = self.chat_template

        def encode() -> list[int]:
            if chat is None:
                return self._encode("prompt", prompt, special)
            try:
                text = template.render(chat, add_generation_prompt=True)
            except ValueError as error:  # the template rejects the chat
                raise RequestError(str(error), RequestError.INVALID) from error
            return self._encode("messages", text, template.adds_special_tokens)

        with self._counted():
            return await self.reader.run(client, encode)

    def _encode(self, name: str, text: str, special: bool = True) -> list[int]:
        """Tokenize the text of a parameter; raises RequestError if it is too long for that."""
        limit = max_chars(self.model.target.context_length)
        if len(text) > limit:
            message = f"{name} must have at most {limit} characters; got {len(text)}"
            raise RequestError(message, RequestError.CONTEXT, name)
        tokens: list[int] = self.model.tokenizer(text, add_special_tokens=special).input_ids
        return tokens

    async def detokenize(self, tokens: Sequence[int], client: str = "") -> str:
        """Decode tokens, special ones included; raises RequestError."""
        last = self.model.target.vocab_size - 1
        decode = partial(self.model.tokenizer.decode, list(tokens))
        with self._counted():
            if not all(0 <= token <= last for token in tokens):
                raise RequestError(f"tokens must be token ids in [0, {last}]", param="tokens")
            return str(await self.reader.run(client, decode))

    async def embed(self, texts: Sequence[str], client: str = "") -> tuple[list[Vector], int]:
        """Embed texts as the mean of the target's features, scaled to length 1.

        Returns a vector for each text, and the number of tokens. Answers take a step between two
        texts. Raises RequestError for a text without tokens or longer than the context,
        QueueFullError or DecodingError.
        """
        vectors: list[Vector] = []
        with self._counted():
            self.queue.check_room(client)
            encoded = await self.reader.run(client, partial(self._encode_inputs, texts))
            for ids in encoded:
                work = partial(self._embed, ids)
                vectors.append(await self.queue.call(work, client, admitted=bool(vectors)))
        count = sum(map(len, encoded))
        self._finish(count)
        return vectors, count

    def _encode_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts to embed; raises RequestError for those without tokens or too long."""
        context = self.model.target.context_length
        encoded = [self._encode("input", text) for text in texts]
        for ids in encoded:
            if not 1 <= len(ids) <= context:
                message = f"input must have texts of 1 to {context} tokens; got {len(ids)} tokens"
                code = RequestError.CONTEXT if ids else RequestError.OUT_OF_RANGE
                raise RequestError(message, code, "input")
        return encoded

    @torch.inference_mode()
    def _embed(self, ids: list[int], _cancelled: Callable[[], bool]) -> Vector:
        """Embed the tokens of a text; see :meth:`embed`."""
        target = self.model.target
        inputs = torch.tensor([ids], device=target.device)
        mean = target.body(input_ids=inputs, use_cache=False).last_hidden_state[0].float().mean(0)
        vector: Vector = torch.nn.functional.normalize(mean, dim=0).cpu().numpy()
        return vector

    def close(self) -> None:
        """Stop the threads."""
        for thread in (self.reader, self.compiler):
            thread.executor.shutdown(wait=False, cancel_futures=True)
        self.queue.close()
