"""Prompts, requests and reference answers of the bundled pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from eagle_fsd import EagleFSD
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.requests import read_request
from eagle_fsd.chat.session import AnswerRequest
from eagle_fsd.chat.wire_format import ASSISTANT, END, USER
from eagle_fsd.utils.chat_templates import Chat, encode_prompt, load_chat_template

HELLO: Chat = [{"role": "user", "content": "Hello!"}]
ENCODED_HELLO = f"{USER}Hello!{END}{ASSISTANT}"
#: Parameters of a request: greedy and lossless.
OPTIONS = {"temperature": 0, "max_new_tokens": 64, "fsd": {"threshold": 0}}
GREEDY = {"messages": HELLO, **OPTIONS}


def tokenize(model: EagleFSD, chat: Chat = HELLO) -> Tensor:
    """Return a chat's ``[1, S]`` token ids."""
    return encode_prompt(chat, model.tokenizer, load_chat_template(model.tokenizer))


def reference(model: EagleFSD, chat: Chat = HELLO, **options: Any) -> str:
    """Return the answer of :meth:`EagleFSD.generate` to a chat; greedy and lossless by default."""
    ids = tokenize(model, chat)
    out = model.generate(ids, **{"max_new_tokens": 64, "threshold": 0.0, **options})
    return model.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)


def request(model: EagleFSD, limits: Limits | None = None, **params: Any) -> AnswerRequest:
    """Read a request with these parameters; without a prompt, the message is HELLO."""
    template = load_chat_template(model.tokenizer)
    chat = {} if {"prompt", "prompt_token_ids"} & params.keys() else {"messages": HELLO}
    read = read_request({**chat, **OPTIONS, **params}, model, template, limits or Limits())
    return replace(read, grammar=read.compile_grammar()) if read.compile_grammar else read


def nested(depth: int) -> Any:
    """Return a list that many levels deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value
