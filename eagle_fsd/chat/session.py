"""Generate one answer as a stream, for the terminal chat and all servers.

Start with :class:`ChatAnswer`. :func:`fit_chat` turns a chat into a prompt that fits the context,
and :func:`score_prompt` computes the log-probabilities of a prompt's tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

from eagle_fsd.chat.config import RequestOptions
from eagle_fsd.chat.processors import AnswerPenalty, LogitBias, MinTokens, RepetitionPenalty
from eagle_fsd.chat.text import Piece, TextStream
from eagle_fsd.model.batch import Batch, StreamChunk
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.request import Answer, PromptDecodeOptions
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.step import TokenDetail
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate, encode_prompt
from eagle_fsd.utils.detokenization import special_tokens

#: Number of tokens to leave for an answer, as long as there are older messages to drop.
MIN_ANSWER_TOKENS = 64
#: Average number of characters per token beyond which text is taken to exceed the context, and is
#: not tokenized, which would take seconds for megabytes.
MAX_CHARS_PER_TOKEN = 32
#: Prompt tokens that are scored in one pass, which bounds the memory for logits ``[S, V]``.
SCORE_CHUNK = 256


class ContextLengthError(ValueError):
    """The prompt leaves no room for an answer."""


def max_chars(tokens: int) -> int:
    """Return the maximum number of characters worth tokenizing."""
    return tokens * MAX_CHARS_PER_TOKEN


def fit_chat(
    model: EagleFSD, chat_template: ChatTemplate, chat: Chat, drop: bool = True
) -> tuple[Tensor, int]:
    """Tokenize a chat, dropping its oldest turns until there is room for an answer.

    A question is dropped together with its answer. System messages move to the front; they and the
    last question are never dropped; without ``drop``, nothing is. Returns ``[1, S]`` token ids and
    the number of dropped messages. Raises ContextLengthError if what remains does not fit, and
    ValueError if the template rejects the chat.
    """
    system = [message for message in chat if message["role"] == "system"]
    turns = [message for message in chat if message["role"] != "system"]
    context = model.target.stable_length
    room = context - min(MIN_ANSWER_TOKENS, context // 4)
    cuts = [0, *(at for at in range(1, len(turns)) if drop and turns[at]["role"] == "user")]
    encoded: dict[int, Tensor] = {}

    def fits(cut: int) -> bool:
        kept = [*system, *turns[cut:]]
        limit = room if cut < cuts[-1] else context - 1  # the shortest prompt may leave one token
        if len(chat_template.render(kept)) > max_chars(limit):
            return False
        encoded[cut] = encode_prompt(kept, model.tokenizer, chat_template)
        return encoded[cut].shape[1] <= limit

    # Binary search: a client may send thousands of turns.
    index = 0 if fits(0) else bisect_left(cuts, True, lo=1, key=fits)
    if index < len(cuts):
        return encoded[cuts[index]], cuts[index]
    if cuts[-1] in encoded:
        size = f"{encoded[cuts[-1]].shape[1]} tokens"
    else:
        size = f"{len(chat_template.render([*system, *turns[cuts[-1] :]]))} characters"
    raise ContextLengthError(
        f"the prompt's {size} leave no room for an answer; the context length is {context} tokens"
    )


@dataclass(frozen=True)
class AnswerRequest:
    """A validated request for one answer."""

    ids: Tensor  #: ``[1, S]``
    options: RequestOptions
    acceptance: AcceptanceConfig | None = None  #: default: the model's
    #: Makes the grammar, which may take seconds.
    compile_grammar: Callable[[], LogitsProcessor] | None = None
    grammar: LogitsProcessor | None = None  #: masks tokens that violate a JSON schema
    #: Alternatives to report with each token's log-probability; None: report neither.
    details: int | None = None
    method: str = "fsd"  #: or ``"ar"``, without the drafter
    context: Sequence[int] = ()  #: last tokens of a text to continue, on which spaces depend
    echo_texts: Sequence[str] = ()  #: of each prompt token, if the answer begins with the prompt
    prompt_only: bool = False  #: whether the prompt is echoed and nothing generated
    dropped: int = 0  #: messages that were dropped to fit the context
    client: str = ""  #: owner of a key, or an address; clients share the rows of a batch
    admitted: bool = False  #: whether it continues a request, which a full queue must not refuse


class ChatAnswer:
    """An answer in progress: its text, usage and statistics.

    :meth:`stream` decodes it alone, :meth:`join` in a batch, whose chunks are given to
    :meth:`push`. ``finish_reason`` is ``"stop"`` or ``"length"`` once it is complete. Raises
    ContextLengthError if the prompt fills the context.
    """

    def __init__(self, model: EagleFSD, request: AnswerRequest) -> None:
        context = model.target.stable_length
        self._room = context - request.ids.shape[1]
        if self._room <= 0:
            raise ContextLengthError(
                f"the prompt's {request.ids.shape[1]} tokens fill the context of {context} tokens"
            )
        self._model, self._request = model, request
        options = request.options
        self._end_tokens = {*options.stop_token_ids}
        if options.stop:
            special = special_tokens(model.tokenizer, options.stop).values()
            self._end_tokens.update(token for token in special if token < model.target.vocab_size)
        if not options.ignore_eos:
            self._end_tokens.update(model.eos_token_ids)
        self._stream = TextStream(model.tokenizer, options.stop, request.context)
        self.new_tokens = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.decoding = DecodeStats.empty(1)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return self._request.ids.shape[1]

    def stream(self, prefix_cache: PrefixCache | None = None) -> Iterator[list[Piece]]:
        """Decode the answer, and yield the pieces of each step.

        The cache serves the next turn of the chat. Raises as :meth:`EagleFSD.stream`.
        """
        ids = self._request.ids.to(self._model.target.device)
        options = self._options()
        options["prefix_cache"] = prefix_cache
        generation = self._model.stream(ids, torch.ones_like(ids), **options)
        self.decoding = generation.stats

        def pieces() -> Iterator[list[Piece]]:
            with generation:
                for chunk in generation:
                    yield self.push(chunk)
                    if self.finish_reason is not None:
                        return

        return pieces()

    def join(self, batch: Batch) -> Answer:
        """Add the request to a batch, and return its :class:`Answer` there.

        Cancel that in the batch if a stop string ends it. Raises as :meth:`EagleFSD.request`.
        """
        ids, options = self._request.ids[0], self._options()
        if options["logits_processor"]:  # which read it on the device
            ids = ids.to(self._model.target.device)
        answer = batch.add(self._model.request(ids, **options))
        self.decoding = answer.stats
        return answer

    def push(self, chunk: StreamChunk) -> list[Piece]:
        """Add the tokens of one step, and return the pieces that it completes, possibly none.

        The last step also returns what was held back, up to a stop string.
        """
        self.new_tokens += len(chunk.tokens)
        pieces = self._stream.push(chunk.tokens, chunk.origins, chunk.details)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif chunk.finished:
            pieces += self._stream.flush()
            self.finish_reason = "stop" if chunk.tokens[-1] in self._end_tokens else "length"
        self.text += "".join(piece.text for piece in pieces)
        return pieces

    def stats(self) -> dict[str, Any]:
        """Return decoding statistics: ``tau``, ``fuzzy_tokens``, ``tokens_per_second``, ..."""
        return {**answer_stats(self.decoding), "dropped_messages": self._request.dropped}

    def usage(self) -> dict[str, int]:
        """Return token counts in OpenAI's format."""
        return token_usage(self.prompt_tokens, self.new_tokens)

    def _options(self) -> PromptDecodeOptions:
        """Return the decoding options of the request."""
        request, options, target = self._request, self._request.options, self._model.target
        ends = sorted(self._end_tokens)
        processors: list[LogitsProcessor] = []
        if options.repetition_penalty != 1.0:
            processors.append(RepetitionPenalty(options.repetition_penalty))
        if options.presence_penalty or options.frequency_penalty:
            processors.append(AnswerPenalty(options.presence_penalty, options.frequency_penalty))
        if options.logit_bias:
            processors.append(LogitBias(tuple(sorted(options.logit_bias.items()))))
        if options.min_tokens and ends:
            processors.append(MinTokens(options.min_tokens, tuple(ends)))
        if request.grammar is not None:
            processors.append(request.grammar)
        return {
            "max_new_tokens": min(options.max_new_tokens, self._room),
            "sampling": options.sampling(top_k=min(options.top_k, target.vocab_size)),
            "acceptance": request.acceptance,
            "method": request.method,
            "eos_token_id": ends,
            "logits_processor": processors,
            "details": request.details,
        }


def answer_stats(stats: DecodeStats) -> dict[str, Any]:
    """Return the statistics of an answer as JSON values."""
    origins = stats.origins[0]
    return {
        "tau": stats.tau,
        "steps": stats.steps,
        "fuzzy_tokens": origins["fuzzy"],
        "exact_tokens": origins["exact"],
        "target_tokens": origins["target"],
        "tokens_per_second": stats.tokens_per_second,
        "prefilled_tokens": stats.prefilled,
    }


def token_usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Return token counts in OpenAI's format."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


@dataclass(frozen=True)
class PromptScores:
    """The target's log-probabilities of a prompt's tokens but the first, and of alternatives.

    They are kept as tensors: as Python objects they take more than ten times the memory.
    """

    own: Tensor  #: ``[S - 1]``
    top_tokens: Tensor  #: ``[S - 1, count]``
    top: Tensor  #: ``[S - 1, count]``

    def __len__(self) -> int:
        return len(self.own)

    def details(self, start: int = 0, end: int | None = None) -> list[TokenDetail]:
        """Return the details of a range of the tokens."""
        columns = (item[start:end].tolist() for item in (self.own, self.top_tokens, self.top))
        return [
            TokenDetail(own, None, list(zip(tokens, top, strict=True)))
            for own, tokens, top in zip(*columns, strict=True)
        ]


@torch.inference_mode()
def score_prompt(
    model: EagleFSD, ids: Tensor, count: int, cancelled: Callable[[], bool] = lambda: False
) -> PromptScores:
    """Compute the target's log-probabilities of a prompt's tokens, given the tokens before them.

    ``ids`` are ``[1, S]``, and ``count`` is the number of alternatives. Fewer tokens are scored if
    ``cancelled`` returns true between two passes. Raises FloatingPointError if a log-probability of
    a prompt's token is NaN or infinite.
    """
    ids, end = ids.to(model.target.device), ids.shape[1] - 1
    cache = DynamicCache(config=model.model.config)
    count = min(count, model.target.vocab_size)
    scores = PromptScores(torch.empty(end), torch.empty(end, count).int(), torch.empty(end, count))
    done = 0
    while done < end and not cancelled():
        rows = slice(done, min(done + SCORE_CHUNK, end))
        output = model.model(ids[:, rows], past_key_values=cache, use_cache=True)
        logits = output.logits[0].to(ids.device, torch.float32)  # [S, V]
        log_probs = logits.log_softmax(-1)
        scores.own[rows] = log_probs.gather(1, ids[0, done + 1 : rows.stop + 1, None])[:, 0].cpu()
        scores.top[rows], scores.top_tokens[rows] = log_probs.topk(count, -1)
        done = rows.stop
    if not scores.own[:done].isfinite().all():
        raise FloatingPointError("the target produced NaN or infinite logits")
    return PromptScores(scores.own[:done], scores.top_tokens[:done], scores.top[:done])
