"""The options of answers and servers, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_fsd.utils.options import Options, number


@dataclass(frozen=True)
class AnswerOptions(Options):
    """How an answer is drawn."""

    max_new_tokens: int = number(512, 1, 1_048_576, "tokens of an answer at most")
    temperature: float = number(0.0, 0.0, 2.0, "0 is greedy")
    top_p: float = number(1.0, 1e-6, 1.0, "nucleus sampling; 1 is off")
    top_k: int = number(0, 0, 1_048_576, "sample from the k likeliest; 0 is off")
    repetition_penalty: float = number(1.0, 0.01, 10.0, "of tokens said before, as a factor")
    presence_penalty: float = number(0.0, -2.0, 2.0, "of tokens the answer has")
    frequency_penalty: float = number(0.0, -2.0, 2.0, "of tokens the answer has, each time")
    seed: int | None = number(None, 0, 2**63 - 1, "makes sampling repeatable", whole=True)


@dataclass(frozen=True)
class Limits(Options):
    """What a server grants a request."""

    queue: int = number(64, 1, 100_000, "requests that may wait; one more gets 429")
    max_new_tokens: int = number(4096, 1, 1_048_576, "tokens of an answer at most")
    max_threshold: float = number(0.5, 0.0, 1e9, "largest T that a request may set")
    max_body: int = number(1_048_576, 1024, 2**31, "bytes of a request at most")
