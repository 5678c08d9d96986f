"""Tokenizers and chat templates for the tests of prompts, in the manner of published families."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.utils.chat_templates import ChatFormat, FastChatFormat, TokenizerFormat

HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Shows nothing of what the assistant said before.
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

#: By name: a tokenizer, the wording of its chats, and what ends an assistant's turn.
Wording = tuple[PreTrainedTokenizerFast, ChatFormat, str]


def wording(name: str) -> Wording:
    """One of :data:`WORDINGS`."""
    if name == "bundled":
        tokenizer = load_tokenizer(BUNDLED_TARGET)
        return tokenizer, TokenizerFormat(tokenizer), "<|end|>"
    if name.startswith("headers"):
        return templated(HEADERS, ("<|begin|>", "<|start|>", "<|stop|>", "<|eot|>"), "<|eot|>")
    if name.startswith("chatml"):
        return templated(CHATML, CHATML_TOKENS, "<|im_end|>")
    template, pieces = name.split(" ")
    if pieces == "bytes":
        tokenizer = byte_tokenizer(("<s>", "</s>"), True)
    else:
        tokenizer = spaced_tokenizer(legacy=pieces == "legacy")
    return tokenizer, FastChatFormat(template), "</s>"


#: Llama's and Vicuna's tokenizers glue a space to the word behind it; GPT's and Qwen's work on
#: bytes. The legacy ones put a space behind every special token, too.
WORDINGS = [
    "vicuna_v1.1 spaced",
    "vicuna_v1.1 legacy",
    "vicuna_v1.1 bytes",
    "llama-2 spaced",
    "llama-2 legacy",
    "llama-2 bytes",
    "headers",
    "chatml",
    "bundled",
]


def templated(template: str, specials: tuple[str, ...], end: str) -> Wording:
    tokenizer = byte_tokenizer(specials, "begin" in specials[0])
    tokenizer.chat_template = template
    return tokenizer, TokenizerFormat(tokenizer), end


@lru_cache
def byte_tokenizer(specials: tuple[str, ...], begins: bool) -> PreTrainedTokenizerFast:
    """A byte a token; ``begins`` makes the first special token one that every text begins with."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={item: i for i, item in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _finished(core, specials, begins)


@lru_cache
def spaced_tokenizer(legacy: bool) -> PreTrainedTokenizerFast:
    """Characters, and pairs of a space and a letter, in SentencePiece's manner."""
    characters = ["▁", *map(chr, range(33, 127)), "\n"]
    pairs = [("▁", letter) for letter in characters[1:]]
    vocabulary = [*characters, *map("".join, pairs), "<unk>"]
    core = Tokenizer(
        models.BPE(
            vocab={item: i for i, item in enumerate(vocabulary)}, merges=pairs, unk_token="<unk>"
        )
    )
    if legacy:
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(parts)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return _finished(core, ("<s>", "</s>"), True)


def _finished(core: Tokenizer, specials: tuple[str, ...], begins: bool) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(item, normalized=False) for item in specials])
    begin = specials[0]
    if begins:
        pair = (begin, core.token_to_id(begin))
        core.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[pair]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=begin if begins else None, eos_token=specials[-1]
    )
