"""Compile a grammar from standard input within bounds on time and memory.

A program that :mod:`eagle_fsd.chat.grammar` runs, because compiling can take exponential time.
It fails if the grammar exceeds the bounds, and imports nothing of the package, to start fast.
"""

from __future__ import annotations

import resource
import sys

#: Bounds in seconds of processor time and bytes of address space.
MAX_SECONDS, MAX_MEMORY = 2, 4 << 30


class ByteTokenizer:
    """A vocabulary of single bytes, as llguidance expects it."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([value]) for value in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, data: bytes) -> list[int]:
        """Encode UTF-8."""
        return list(data)


def main() -> None:
    """Compile the grammar, whether it is valid or not."""
    sys.path.pop(0)  # this folder, whose modules have names of libraries
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    if sys.platform != "darwin":  # refuses limits below what a process has reserved at its start
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    LLMatcher(tokenizer, sys.stdin.read(), log_level=0).compute_bitmask()


if __name__ == "__main__":
    main()
