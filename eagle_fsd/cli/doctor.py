"""``eagle-fsd doctor``: explain a low tau."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from rich.text import Text

from eagle_fsd.cli.console import out, print_json, print_table, progress
from eagle_fsd.cli.options import Json, Pair, PairArguments, TreeOptions, load_pair
from eagle_fsd.cli.parsing import options
from eagle_fsd.model.config import AcceptanceConfig, Certificate, TreeConfig
from eagle_fsd.utils.options import ExistingFile, Options, OptionsError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from eagle_fsd.train.chat_file import ChatFile
    from eagle_fsd.utils.chat_templates import ChatTemplate

#: Training chats to read, and the tokens to read of each.
TRAINING_CHATS, TRAINING_LENGTH = 32, 1024
#: Colors of the levels of findings.
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


class DoctorConfig(Options):
    """What a diagnosis decodes and reads."""

    prompts: str | None = Field(
        None,
        description="Question set or file, as for evaluate, but without system prompts and earlier"
        " messages; default: the chats of --data, bundled problems with the bundled target,"
        " otherwise a few general questions.",
    )
    data: ExistingFile | None = Field(
        None,
        description="Chats that the drafter was trained on, to compare with the target's own"
        " answers.",
    )
    count: int = Field(12, ge=1, le=1000, description="Number of questions.")
    max_new_tokens: int = Field(64, ge=2, description="Maximum number of new tokens per answer.")


def doctor(
    *,
    as_json: Json = False,
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    config: Annotated[DoctorConfig, options("Decoding")] = DoctorConfig(),
) -> None:
    """Explain a low tau: test the drafter's settings, and recommend a next step.

    Exit status: 0 if no problem was found, 1 otherwise.
    """
    from eagle_fsd.evaluation.doctor.diagnosis import diagnose
    from eagle_fsd.train.chat_file import ChatFile
    from eagle_fsd.utils.chat_templates import load_chat_template

    chats = None if config.data is None else ChatFile(config.data)
    model = load_pair(pair, tree, AcceptanceConfig())
    template = None
    if pair.chat_template is not None or model.tokenizer.chat_template is not None:
        template = load_chat_template(model.tokenizer, pair.chat_template)
    found = diagnose(
        model,
        _questions(config, chats, bundled=pair.target is None),
        chat_template=template,
        training_texts=[] if chats is None else _training_texts(chats, model.tokenizer, template),
        max_new_tokens=config.max_new_tokens,
        progress=progress,
    )
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found["healthy"]:
        raise SystemExit(1)


def _questions(config: DoctorConfig, chats: ChatFile | None, bundled: bool) -> list[str]:
    """Return the questions to decode, without system prompts and earlier messages."""
    from eagle_fsd.evaluation.doctor.diagnosis import GENERAL_QUESTIONS
    from eagle_fsd.evaluation.questions.sets import find_questions

    count = config.count
    if config.prompts is not None or (bundled and chats is None):
        found = find_questions(config.prompts or "bundled", count)
        return [question.turns[0] for question in found]
    if chats is None:
        if count > len(GENERAL_QUESTIONS):
            most = len(GENERAL_QUESTIONS)
            raise OptionsError(f"--count above {most} requires --prompts or --data; got {count}")
        return list(GENERAL_QUESTIONS[:count])
    chosen = [chats[index] for index in range(0, len(chats), max(1, len(chats) // count))[:count]]
    return [next(turn["content"] for turn in chat if turn["role"] == "user") for chat in chosen]


def _training_texts(
    chats: ChatFile, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None
) -> list[tuple[Tensor, Tensor]]:
    """Tokenize some chats, evenly spaced; return token ids and masks.

    Chats that the template rejects are skipped, as in training.
    """
    import torch

    from eagle_fsd.evaluation.doctor.templates import RAW
    from eagle_fsd.train.dataset import ChatDataset

    data = ChatDataset(chats, tokenizer, template or RAW, TRAINING_LENGTH)
    stride = max(1, len(chats) // TRAINING_CHATS)
    encoded = [data[index] for index in range(0, len(chats), stride)[:TRAINING_CHATS]]
    return [
        (torch.tensor(chat.ids), torch.tensor(chat.assistant_mask))
        for chat in encoded
        if chat.error is None
    ]


def _print(found: dict[str, Any]) -> None:
    """Print the JSON values of a diagnosis as text."""
    tree = TreeConfig(**found["tree"])
    out.print(
        f"{found['drafter']}: tau {found['tau']:.2f} ({found['tokens']:,} tokens,"
        f" exact greedy decoding, tree {tree.shape})",
    )
    if found["acceptance"] != "lossless":
        certificate = found["certificate"]
        bound = Certificate(**certificate) if certificate else "no certificate for this pair"
        out.print(f"acceptance: {found['acceptance']}; {bound}")
    out.print()
    for finding in found["findings"]:
        line = Text.assemble(
            (f"{finding['level']:<8}", STYLES[finding["level"]]),
            f"{finding['check']:<15} {finding['evidence']}",
        )
        out.print(line)
    out.print()
    by_length = []
    for row in found["by_length"]:
        cell = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
        span = f"{row['first']}-{row['last']}"
        by_length.append((span, str(row["steps"]), f"{row['tau']:.2f}", cell))
    print_table(("context", "steps", "tau", "agreement"), by_length)
    out.print()
    by_depth = [
        (str(row["depth"]), str(row["steps"]), f"{row['accepted']:.1%}")
        for row in found["by_depth"]
    ]
    if by_depth:
        print_table(("depth", "steps", "accepted"), by_depth)
        out.print()
    step = found["next_step"]
    out.print(f"Next step: {step}." if step else "Nothing to repair.")
