"""Replace the assistant's turns in a chat file by turns that the target generates.

A head learns to predict one target. Heads trained on text that the target generated have a larger
accepted length than heads trained on other text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.train.chat_file import Chat, ChatFile
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.utils.chat_templates import encode_prompt
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress

#: Options missing from fingerprints of earlier versions, with the values that those versions used.
_LATER_OPTIONS = {"top_p": 1.0, "top_k": 0}


def regenerate(
    request: RegenerateRequest,
    config: RegenerateConfig | None = None,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
) -> ChatFile:
    """Rewrite a chat file with the target.

    Args:
        request: The chats, the target and the file to write.
        config: How turns are generated; default: sampled from the target's distribution.
        token: Access token for the Hub.
        progress: Reports ``reading`` (in bytes) and ``rewriting`` (in chats).

    Returns:
        The rewritten chats.

    Raises:
        ValueError: No chat is valid, the chat template rejects the chats, or the output was written
            from other chats or options.
        OSError: A file cannot be read or written.
        LoadError: The target cannot be loaded.
    """
    loaded = LoadedTarget.load(request, token=token)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, progress=report).file
    with progress("rewriting") as report:
        return rewrite_chats(loaded, chats, request.out, config, report)


def rewrite_chats(
    loaded: LoadedTarget,
    chats: ChatFile,
    out: str | Path,
    config: RegenerateConfig | None = None,
    progress: Progress | None = None,
) -> ChatFile:
    """Rewrite chats with a loaded target, resuming an interrupted run.

    The result does not depend on interruptions: batches always start at the same chats, and a
    batch's seed depends on its position. ``OUT.meta.json`` holds the fingerprint of the chats and
    the options.

    Args:
        loaded: The target.
        chats: The chats.
        out: JSON Lines of ``{"index", "messages"}`` to write.
        config: How turns are generated; default: sampled from the target's distribution.
        progress: Called with the chats rewritten and the number of chats.

    Returns:
        The rewritten chats.

    Raises:
        ValueError: ``out`` was written from other chats or options.
        OSError: A file cannot be written.
    """
    config = config or RegenerateConfig()
    out = Path(out)
    fingerprint = {**loaded.fingerprint(chats.path), **config.model_dump()}
    _check_fingerprint(out, fingerprint)
    truncate_partial_line(out)
    done = len(read_jsonl(out)) if out.exists() else 0
    size = config.batch_size
    for start in range(done - done % size, len(chats), size):
        batch = [chats[index] for index in range(start, min(start + size, len(chats)))]
        rewritten = _rewrite_batch(loaded, batch, config, config.seed + start)
        for index, chat in enumerate(rewritten, start):
            if index >= done:
                append_line(out, json.dumps({"index": index, "messages": chat}))
        if progress is not None:
            progress(start + len(batch), len(chats))
    return ChatFile(out)


def _check_fingerprint(out: Path, fingerprint: dict[str, Any]) -> None:
    """Write the fingerprint, or check it against that of an earlier run."""
    file = out.with_name(out.name + ".meta.json")
    if out.exists():
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if {**_LATER_OPTIONS, **before} != fingerprint:
            raise ValueError(f"{out} was written from other chats or options; choose another file")
    else:
        atomic_write(file, json.dumps(fingerprint, indent=2) + "\n")


def _rewrite_batch(
    loaded: LoadedTarget, chats: Sequence[Chat], config: RegenerateConfig, seed: int
) -> list[Chat]:
    """Generate the assistant turns in order; a chat ends when the context is full."""
    model = EagleFSD(loaded.target.model, None)
    tokenizer = loaded.tokenizer
    rewritten: list[Chat] = [[] for _ in chats]
    for turn in range(max(map(len, chats))):
        prompts = []
        for chat, new in zip(chats, rewritten, strict=True):
            if turn >= len(chat) or len(new) < turn:
                continue  # the chat has ended
            if chat[turn]["role"] != "assistant":
                new.append(chat[turn])
                continue
            ids = encode_prompt(new, tokenizer, loaded.chat_template)[0].tolist()
            if len(ids) + 1 < loaded.target.context_length:
                prompts.append((new, ids))
        if not prompts:
            continue
        padded = tokenizer.pad(
            {"input_ids": [ids for _, ids in prompts]}, padding_side="left", return_tensors="pt"
        ).to(loaded.target.device)
        output = model.generate(
            padded["input_ids"],
            padded["attention_mask"],
            max_new_tokens=config.max_new_tokens,
            sampling=SamplingConfig(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                seed=seed + turn,
            ),
            method="ar",
        )
        texts = tokenizer.batch_decode(
            output.sequences[:, padded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for (new, _), text in zip(prompts, texts, strict=True):
            new.append({"role": "assistant", "content": text.strip()})
    return rewritten
