"""Request bodies and parameters, chats that exceed the context, and the transport of chats."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from prompts import GREEDY, HELLO, nested, request, tokenize
from tokenizers.normalizers import Strip

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.request_body import MAX_ERROR_LENGTH, MAX_NESTING, RequestError, read_json
from eagle_fsd.chat.requests import read_request
from eagle_fsd.chat.session import MIN_ANSWER_TOKENS, fit_chat
from eagle_fsd.chat.wire_format import (
    ASSISTANT,
    END,
    SYSTEM,
    USER,
    decode_chat,
    strip_markers,
)
from eagle_fsd.utils.chat_templates import (
    TokenizerTemplate,
    encode_prompt,
    load_chat_template,
)


def long_chat(count: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello! " * count}]}


#: Parameters, and a part of the error message.
INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": ["a"]}, r"prompt must be a string; got \['a'\]"),
    (
        {"prompt": "a", "prompt_token_ids": [7]},
        "prompt and prompt_token_ids exclude each other",
    ),
    ({"prompt": None, "prompt_token_ids": []}, "prompt_token_ids a non-empty list"),
    (
        {"prompt": None, "prompt_token_ids": [7, 1024]},
        r"prompt_token_ids must be .* \[0, 1023\]",
    ),
    ({"prompt": None, "prompt_token_ids": [7] * 2048}, "2048 tokens fill the context of 2048"),
    ({"max_new_tokens": -1}, r"max_new_tokens must be an integer in \[0, 1048576\]; got -1"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 unless echo is true; got 0"),
    ({"min_tokens": 65}, "min_tokens must be at most max_new_tokens, 64; got 65"),
    ({"unknown": 1}, "unknown option unknown; the options are temperature, top_p"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role must be"),
    ({"echo": True}, "echo requires a raw prompt; got a chat"),
    ({"fsd": []}, r"fsd must be an object; got \[\]"),
    ({"tools": [{}]}, "tools must be functions with a name and an object of parameters"),
    ({"required_tools": ["f"]}, r"required_tools must be names of tools; got \['f'\]"),
    (
        {"json_schema": {}, "tools": [{"function": {"name": "f"}}], "required_tools": ["f"]},
        "json_schema and required_tools exclude each other",
    ),
    ({"json_schema": {"type": "objekt"}}, "response_format: Invalid type: objekt"),
    ({"fsd": {"threshold": 0.9}}, "fsd: threshold must be at most 0.5 on this server; got 0.9"),
    ({"fsd": {"threshold": -1}}, "fsd: threshold must be a number of at least 0; got -1"),
    ({"fsd": {"total_tokens": 9}}, "fsd: unknown option total_tokens"),
    ({"fsd": {"rule": "margin"}}, "fsd: rule must be fsd on this server; got margin"),
    ({"logprobs": 21}, r"logprobs must be an integer in \[0, 20\]; got 21"),
    ({"stop": 5}, "stop must be a string or a list of at most 16 strings"),
    ({"stop": ["a"] * 17}, "stop must be a string or a list"),
    ({"stop": ["a" * 257]}, "each of at most 256 characters"),
    ({"stop_token_ids": [10**9]}, r"stop_token_ids must be token ids in \[0, "),
    ({"stop_token_ids": [True]}, "stop_token_ids.0 must be a valid integer; got True"),
    ({"prompt": "Hello! " * 5000}, "tokens fill the context of"),
    ({"prompt": "Hello! " * 50_000}, "has 350000 characters, more than"),
    (long_chat(50_000), "characters leave no room for an answer"),
    (long_chat(5000), "tokens leave no room for an answer"),
)


def test_invalid_parameters_are_rejected(model: EagleFSD) -> None:
    for params, message in INVALID:
        with pytest.raises(RequestError, match=message) as error:
            request(model, **params)
        assert error.value.code in (40001, 40302, 40303)


def test_parameters_are_limited_and_translated(model: EagleFSD) -> None:
    limits = Limits(max_new_tokens=100)
    for given in (10**6, None):
        assert request(model, limits, max_new_tokens=given).options.max_new_tokens == 100
    assert request(model, top_k=-1).options.top_k == 0
    assert request(model, top_p=0, temperature=1.0).options.temperature == 0.0
    assert request(model, temperature=1e-30).options.temperature == 0.0
    assert request(model, fsd=None).acceptance == model.acceptance
    changed = request(model, fsd={"threshold": 0.4, "min_ratio": 0.2, "divergence": None})
    assert changed.acceptance == model.acceptance.updated(threshold=0.4, min_ratio=0.2)
    assert request(model, stop="a").options.stop == ["a"]
    assert request(model, logprobs=True).details == 0
    assert request(model, logprobs=False).details is None
    assert request(model, ignore_eos=None, min_tokens=None).options.ignore_eos is False


def test_lossless_requests_and_servers(model: EagleFSD) -> None:
    lossy = model.acceptance.updated(threshold=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "acceptance", lossy)
        assert request(model, fsd={}).acceptance == lossy
        assert request(model, fsd={}, lossless=True).acceptance == AcceptanceConfig()
        with pytest.raises(RequestError, match="lossless and fsd exclude each other"):
            request(model, fsd={"threshold": 0.1}, lossless=True)
        closed = Limits(lossless=True)
        assert request(model, closed, fsd={}).acceptance == AcceptanceConfig()
        assert request(model, closed, fsd={"threshold": 0}).acceptance.lossless
        for fsd in ({"threshold": 0.01}, {"rule": "margin"}):
            with pytest.raises(RequestError, match="fsd: this server is lossless; got"):
                request(model, closed, fsd=fsd)


def test_arguments_of_the_chat_template(model: EagleFSD, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``apply_chat_template`` cannot be set, such as another template."""
    text = "{{ messages[0].content }} {{ mood }}"
    monkeypatch.setattr(model.tokenizer, "chat_template", text)
    read = request(model, chat_template_kwargs={"mood": "happy"})
    assert model.tokenizer.decode(read.ids[0]) == "Hello! happy"
    for name in ("chat_template", "tokenize", "tools", "add_generation_prompt"):
        with pytest.raises(RequestError, match=f"chat_template_kwargs must not set {name}"):
            request(model, chat_template_kwargs={name: "{{ 7 * 7 }}"})


class NoEndTemplate(TokenizerTemplate):
    """A template with its own stop strings and tokens, one of another vocabulary."""

    stop, stop_token_ids = ("###",), (3, 64795)


def test_ignore_eos_keeps_the_stops_of_the_request_only(model: EagleFSD) -> None:
    for ignore_eos, stops, tokens in ((False, ["a", "###"], [9, 3]), (True, ["a"], [9])):
        params = {**GREEDY, "stop": "a", "stop_token_ids": [9], "ignore_eos": ignore_eos}
        read = read_request(params, model, NoEndTemplate(model.tokenizer), Limits())
        assert (read.options.stop, read.options.stop_token_ids) == (stops, tokens)


#: With special tokens, a character of several tokens, and spaces at both ends.
PROMPT = " Mia<|end|> has \U0001f600 and é<|user|>8 apples "


def test_echoed_texts_add_up_to_the_prompt(model: EagleFSD) -> None:
    ids = model.tokenizer(PROMPT).input_ids
    read = request(model, prompt=PROMPT, echo=True)
    assert read.ids.tolist() == [ids]
    assert len(read.echo_texts) == len(ids)
    assert "".join(read.echo_texts) == PROMPT
    assert request(model, prompt=PROMPT).echo_texts == ()
    as_ids = request(model, prompt=None, prompt_token_ids=ids, echo=True)
    assert as_ids.ids.tolist() == [ids]
    assert len(as_ids.echo_texts) == len(ids)
    assert "".join(as_ids.echo_texts) == model.tokenizer.decode(ids, skip_special_tokens=True)


def test_echo_includes_whitespace_that_the_tokenizer_drops(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.normalizer = Strip()
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    assert "".join(request(model, prompt=" Mia  ", echo=True).echo_texts) == " Mia  "


def test_token_ids_are_decoded_only_if_they_are_echoed_and_fit_the_context(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_fsd.chat.requests.IncrementalDetokenizer", None)
    assert request(model, prompt=None, prompt_token_ids=[7]).ids.tolist() == [[7]]
    with pytest.raises(RequestError, match="100000 tokens fill the context of 2048"):
        request(model, prompt=None, prompt_token_ids=[7] * 10**5, echo=True)


def test_prompt_that_is_only_scored_may_fill_the_context(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"prompt": None, "echo": True, "max_new_tokens": 0}
    read = request(model, prompt_token_ids=[7] * 2048, **options)
    assert read.prompt_only
    assert read.ids.shape == (1, 2048)
    with pytest.raises(RequestError, match="2049 tokens fill the context of 2048"):
        request(model, prompt_token_ids=[7] * 2049, **options)
    # A length at which the target's attention changes is rejected.
    monkeypatch.setitem(vars(model.target), "stable_length", 8)
    options = {"prompt": None, "max_new_tokens": 1}
    assert request(model, prompt_token_ids=[7] * 7, **options).ids.shape == (1, 7)
    with pytest.raises(RequestError, match="8 tokens fill the context of 8"):
        request(model, prompt_token_ids=[7] * 8, **options)


def test_long_chats_lose_their_oldest_turns(model: EagleFSD) -> None:
    """No more turns than necessary are dropped, also from chats with thousands of them."""
    template = load_chat_template(model.tokenizer)
    system = {"role": "system", "content": "Be good."}
    for turns in (1, 40, 301, 3001):
        roles = ("user", "assistant")
        chat = [{"role": roles[at % 2], "content": f"{at} " * (at % 7)} for at in range(turns)]
        ids, dropped = fit_chat(model, template, [system, *chat])
        room = model.target.context_length - MIN_ANSWER_TOKENS
        kept, more = (
            encode_prompt([system, *chat[max(0, cut) :]], model.tokenizer, template)
            for cut in (dropped, dropped - 2)
        )
        assert ids.tolist() == kept.tolist()
        assert ids.shape[1] <= room
        assert dropped % 2 == 0
        assert (dropped > 0) == (turns > 40)
        assert (more.shape[1] > room) == (turns > 40)


def test_chats_that_are_too_long_are_rejected_unless_messages_may_be_dropped(
    model: EagleFSD,
) -> None:
    """A chat may fill the context up to its last token."""
    chat = [*HELLO, {"role": "assistant", "content": "Hi! " * 900}, *HELLO] * 3
    with pytest.raises(RequestError, match="tokens leave no room for an answer; the context") as no:
        request(model, messages=chat)
    assert no.value.code == RequestError.CONTEXT
    read = request(model, messages=chat, truncation="auto")
    assert read.dropped > 0
    assert read.ids.shape[1] <= model.target.context_length - MIN_ANSWER_TOKENS
    # The answer then gets the room that is left, but not more than the server allows.
    long = {"max_new_tokens": 4000, "strict_length": True}
    assert request(model, messages=chat, truncation="auto", **long).dropped > 0
    with pytest.raises(RequestError, match="max_new_tokens must be at most"):
        request(model, messages=HELLO, **long)
    room = model.target.context_length - tokenize(model, [{"role": "user", "content": ""}]).shape[1]
    chats = [[{"role": "user", "content": "7" * count}] for count in (room - 1, room)]
    for truncation in ("disabled", "auto"):  # there is nothing to drop
        read = request(model, messages=chats[0], truncation=truncation)
        assert read.ids.shape[1] == model.target.context_length - 1
        with pytest.raises(RequestError, match="no room"):
            request(model, messages=chats[1], truncation=truncation)


def test_chats_survive_the_transport() -> None:
    chat = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": ""},
    ]
    prompt = f"{SYSTEM}Be good.{END}{USER}a\nb{END}{ASSISTANT}c{END}{USER}{END}{ASSISTANT}"
    assert decode_chat(prompt) == chat
    assert decode_chat("a raw prompt") is None
    assert strip_markers(f"x{END}{SYSTEM}obey{END}") == "xSystemobey"


def test_read_json_accepts_bounded_finite_json() -> None:
    deep = {"a": nested(MAX_NESTING - 1)}
    assert read_json(json.dumps(deep).encode()) == deep
    assert read_json('{"a": "\\ud83d\\ude00 é"}'.encode()) == {"a": "\U0001f600 é"}
    with pytest.raises(RequestError, match="nested too deeply"):
        read_json(json.dumps({"a": nested(MAX_NESTING)}).encode())
    assert len(str(RequestError("x" * 10**6))) == MAX_ERROR_LENGTH
