"""Options of answers and limits of servers.

Imports neither torch nor transformers, so that the command line can be parsed without them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.utils.options import Options


class AnswerOptions(SamplingConfig):
    """How an answer is sampled and how long it may get."""

    max_new_tokens: int = Field(
        default=512, ge=1, le=1_048_576, description="Maximum number of tokens in an answer."
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=0.01,
        le=10.0,
        description="Divides the logits of tokens that occurred before (multiplies negative ones);"
        " 1 is off.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from the logits of tokens that the answer contains.",
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from a token's logit for each of its occurrences in the answer.",
    )


class RequestOptions(AnswerOptions):
    """Further options of a request for an answer."""

    min_tokens: int = Field(
        default=0, ge=0, description="Minimum number of tokens before a token may end the answer."
    )
    ignore_eos: bool = Field(
        default=False,
        description="Whether only ``stop`` and ``stop_token_ids`` end the answer early, not the"
        " model's end-of-sequence tokens nor what the chat template adds.",
    )
    stop: list[str] = Field(default=[], description="Strings that end the answer.")
    stop_token_ids: Annotated[list[int], FailFast()] = Field(
        default=[], description="Tokens that end the answer."
    )
    logit_bias: dict[int, float] = Field(
        default={}, description="Numbers in [-100, 100] to add to the logits of tokens."
    )
    fsd: dict[str, Any] = Field(
        default={}, description="Acceptance options that override the server's."
    )
    lossless: bool = Field(
        default=False, description="Decode losslessly, whatever the server's default."
    )


class Limits(Options):
    """Limits of what a server accepts."""

    max_batch: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Maximum number of requests that are decoded at once; each takes memory for its"
        " context.",
    )
    queue: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Maximum number of waiting requests; beyond it, one is refused.",
    )
    max_new_tokens: int = Field(
        default=4096, ge=1, le=1_048_576, description="Maximum number of tokens in an answer."
    )
    lossless: bool = Field(
        default=False,
        description="Decode losslessly only, and reject requests that ask for anything else.",
    )
    max_threshold: float = Field(
        default=0.5, ge=0.0, le=1e9, description="Largest T of requests, or the server's if larger."
    )
    stall_timeout: float = Field(
        default=600.0,
        gt=0.0,
        description="Seconds that a decoding step may take before all requests fail.",
    )
    max_body: int = Field(
        default=1_048_576, ge=1024, le=2**31, description="Maximum size of a request in bytes."
    )
