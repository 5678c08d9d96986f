"""Tokenizers and chat templates like those of published model families."""

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
from eagle_fsd.utils.chat_templates import ChatTemplate, FastChatTemplate, TokenizerTemplate

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
#: Omits all assistant turns but the last.
OMITTING = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

#: A tokenizer, a chat template, and what ends an assistant turn.
Case = tuple[PreTrainedTokenizerFast, ChatTemplate, str]


def case(name: str) -> Case:
    """Build one of :data:`CASES`."""
    if name == "bundled":
        tokenizer = load_tokenizer(BUNDLED_TARGET)
        return tokenizer, TokenizerTemplate(tokenizer), "<|end|>"
    if name == "headers":
        return templated(HEADERS, ("<|begin|>", "<|start|>", "<|stop|>", "<|eot|>"), "<|eot|>")
    if name == "chatml":
        return templated(CHATML, CHATML_TOKENS, "<|im_end|>")
    template, pieces = name.split(" ")
    if pieces == "bytes":
        tokenizer = byte_tokenizer(("<s>", "</s>"), True)
    else:
        tokenizer = spaced_tokenizer(legacy=pieces == "legacy")
    return tokenizer, FastChatTemplate(template), "</s>"


#: The tokenizers of Llama and Vicuna join a space to the following word (the legacy ones also add a
#: space after every special token); those of GPT and Qwen work on bytes.
CASES = [
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


def templated(template: str, specials: tuple[str, ...], end: str) -> Case:
    """A byte-level tokenizer with a chat template of its own."""
    tokenizer = byte_tokenizer(specials, add_bos="begin" in specials[0])
    tokenizer.chat_template = template
    return tokenizer, TokenizerTemplate(tokenizer), end


@lru_cache
def byte_tokenizer(specials: tuple[str, ...], add_bos: bool) -> PreTrainedTokenizerFast:
    """One token per byte; ``add_bos`` starts every text with the first special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={item: i for i, item in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _fast_tokenizer(core, specials, add_bos)


@lru_cache
def spaced_tokenizer(legacy: bool) -> PreTrainedTokenizerFast:
    """Characters, and pairs of a space and a letter, as SentencePiece makes them."""
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
    return _fast_tokenizer(core, ("<s>", "</s>"), True)


def _fast_tokenizer(
    core: Tokenizer, specials: tuple[str, ...], add_bos: bool
) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(item, normalized=False) for item in specials])
    bos = specials[0]
    if add_bos:
        pair = (bos, core.token_to_id(bos))
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[pair]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos if add_bos else None, eos_token=specials[-1]
    )
