"""Let the target rewrite what the assistant says in a chat file.

A head learns to foresee one target. On that target's own text it is accepted far more often than on
text that somebody else wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.train.chats import Chat, ChatFile
from eagle_fsd.train.run import Source
from eagle_fsd.utils.chat_templates import chat_format


def regenerate(
    source: Source,
    chats: ChatFile,
    out: str | Path,
    batch_size: int = 16,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ChatFile:
    """Write ``out``, JSON Lines of ``{"index", "messages"}``, and open it.

    What it depends on stands in ``OUT.meta.json``. What ``out`` holds already is kept, so a run
    that was stopped goes on; a line that a kill cut short is written again. Each batch has its own
    seed, so it makes no difference where.

    Args:
        temperature: 1 draws from the target as it is, 0 is greedy.
        progress: Called with (chats done, chats in all).

    Raises:
        ValueError: ``out`` was made from other chats or with other options.
    """
    out = Path(out)
    made_from = {
        **source.describe(chats.path, source.target.context),
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    about = out.with_name(out.name + ".meta.json")
    if out.exists():
        before = json.loads(about.read_text(encoding="utf-8")) if about.exists() else None
        if before != made_from:
            raise ValueError(f"{out} was made from something else: name another file")
    else:
        about.write_text(json.dumps(made_from, indent=2) + "\n", encoding="utf-8")
    done = _lines_done(out)
    # Batches begin where they began, whatever the moment of the kill.
    with out.open("a", encoding="utf-8") as file:
        for start in range(done - done % batch_size, len(chats), batch_size):
            part = [chats[index] for index in range(start, min(start + batch_size, len(chats)))]
            answered = _answer(source, part, max_new_tokens, temperature, seed + start)
            for index, chat in enumerate(answered, start):
                if index >= done:
                    file.write(json.dumps({"index": index, "messages": chat}) + "\n")
            file.flush()
            if progress is not None:
                progress(min(start + batch_size, len(chats)), len(chats))
    return ChatFile(out)


def _answer(
    source: Source, chats: Sequence[Chat], max_new_tokens: int, temperature: float, seed: int
) -> list[Chat]:
    """Each chat with its assistant turns said anew, in turn; it ends where the context is full."""
    wording = chat_format(source.tokenizer, source.template)
    model = EagleFSD(source.target.model, None)
    answered: list[Chat] = [[] for _ in chats]
    for turn in range(max(map(len, chats))):
        prompts = []
        for chat, new in zip(chats, answered, strict=True):
            if turn < len(chat) and len(new) == turn:
                if chat[turn]["role"] != "assistant":
                    new.append(chat[turn])
                    continue
                text = wording.render(new, open_turn=True)
                ids = source.tokenizer(text, add_special_tokens=wording.adds_special_tokens)
                if len(ids["input_ids"]) + 1 < source.target.context:
                    prompts.append((new, ids["input_ids"]))
        if not prompts:
            continue
        padded = source.tokenizer.pad(
            {"input_ids": [ids for _, ids in prompts]}, padding_side="left", return_tensors="pt"
        ).to(source.target.device)
        said = model.generate(
            padded["input_ids"],
            padded["attention_mask"],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed + turn,
            method="ar",
        )
        texts = source.tokenizer.batch_decode(
            said.sequences[:, padded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for (new, _), text in zip(prompts, texts, strict=True):
            new.append({"role": "assistant", "content": text.strip()})
    return answered


def _lines_done(out: Path) -> int:
    """Whole lines of ``out``; what comes after the last of them is cut off."""
    if not out.exists():
        return 0
    text = out.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        with out.open("r+b") as file:
            file.truncate(whole)
    return text.count(b"\n")
