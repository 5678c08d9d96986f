"""Constrain answers to JSON that satisfies a schema, with grammars of llguidance."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_fsd.chat import compile_grammar
from eagle_fsd.model.sampling import AnswerProcessor
from eagle_fsd.utils.text import one_line

#: Maximum number of characters in the schemas of a request; compiling more can take seconds.
MAX_LENGTH = 65_536
#: Whitespace between two tokens of JSON: none, a space, or a line break with indentation. A model
#: could fill its answer with more.
WHITESPACE = r"( |\r?\n[ \t]{0,32})?"

#: Keywords of a schema that compiles in less than a second at half the maximum length.
SIMPLE = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
    *("title", "description", "default", "examples", "minimum", "maximum"),
}


class Grammar(AnswerProcessor):
    """Mask the tokens with which an answer cannot be completed to a string of the grammar.

    The matcher is moved to the prefix of each node, which shares most tokens with that of the node
    before. Copies of a grammar share the matcher.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._tokens: list[int] = []  # what the matcher has read

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the masked logits ``[B, V]``."""
        masks = np.stack([self._mask(tokens, scores.shape[1]) for tokens in input_ids.tolist()])
        return scores.masked_fill(~torch.from_numpy(masks).to(scores.device), -torch.inf)

    def _mask(self, tokens: list[int], vocab_size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return whether each token may follow a prefix; none may if llguidance gives up."""
        common = 0
        for before, token in zip(self._tokens, tokens, strict=False):
            if before != token:
                break
            common += 1
        self._matcher.rollback(len(self._tokens) - common)
        self._matcher.consume_tokens(tokens[common:])
        self._tokens[common:] = tokens[common:]  # in place, for all copies
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return np.zeros(vocab_size, np.bool_)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


def json_grammar(
    alternatives: Sequence[tuple[str, Mapping[str, Any], str]],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    end_tokens: Sequence[int],
) -> Grammar:
    """Compile a grammar of JSON: each alternative is a text, a value's schema, and another text.

    ``end_tokens`` may follow a complete answer. Raises ValueError if a schema is invalid, cannot be
    satisfied, is too long or too costly to compile, or uses keywords that llguidance does not
    support.
    """
    rules = [f"start: {' | '.join(f'a{index}' for index in range(len(alternatives)))}"]
    for index, (before, schema, after) in enumerate(alternatives):
        guided = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f"a{index}: {json.dumps(before)} v{index} {json.dumps(after)}")
        rules.append(f"v{index}: %json {json.dumps(guided)}")
    if sum(map(len, rules)) > MAX_LENGTH:
        raise ValueError(f"the schemas must have at most {MAX_LENGTH} characters of JSON")
    grammar = LLMatcher.grammar_from_lark("\n".join(rules))
    simple = all(_is_simple(schema) for _, schema, _ in alternatives)
    if not simple or len(grammar) > MAX_LENGTH // 2:
        _check_cost(grammar)
    vocabulary = _vocabulary(tokenizer, vocab_size, tuple(end_tokens))
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if matcher.is_error():
        message = re.split(r"\n\s*\d+ \| |<state>", matcher.get_error())[0]  # without the rules
        raise ValueError(one_line(message.rpartition("failed to compile JSON schema: ")[2]))
    return Grammar(matcher)


def _is_simple(schema: Any) -> bool:
    """Return whether a schema and those inside it have keywords of :data:`SIMPLE` only."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, Mapping) or not schema.keys() <= SIMPLE:
        return False
    members = schema.get("properties", {})
    others = (schema.get(name, True) for name in ("items", "additionalProperties"))
    return isinstance(members, Mapping) and all(map(_is_simple, (*members.values(), *others)))


@lru_cache(maxsize=256)
def _check_cost(grammar: str) -> None:
    """Raise ValueError unless a grammar can be compiled within bounds, in a process of its own."""
    program = [sys.executable, compile_grammar.__file__]
    done = subprocess.run(program, input=grammar.encode(), capture_output=True, check=False)
    if done.returncode:  # not remembered: the machine may have been short of memory or time
        raise ValueError("the schema takes too much time or memory to compile")


@lru_cache(maxsize=4)
def _vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_tokens: tuple[int, ...]
) -> LLTokenizer:
    """Convert a tokenizer, which takes about a second for a large one."""
    size = max(vocab_size, len(tokenizer))
    fast: Any = tokenizer  # other tokenizers raise ValueError
    return from_tokenizer(fast, n_vocab=size, eos_token=list(end_tokens))
