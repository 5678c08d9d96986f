"""A target with the tokenizer and the chat template that encode its chats."""

from __future__ import annotations

import logging
import timeit
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.loading import SPREAD, LoadError, load_embeddings, load_target, load_tokenizer
from eagle_fsd.model.target import Target
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.train.dataset import ChatDataset
from eagle_fsd.utils.chat_templates import ChatTemplate, load_chat_template
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import Progress

log = logging.getLogger(__name__)

#: Number of chats that are encoded on opening a file, which fails if none can be encoded.
TRIAL_CHATS = 20


@dataclass
class LoadedTarget:
    """A frozen target with its tokenizer and chat template, and the options that name them."""

    options: TargetOptions
    target: Target
    tokenizer: PreTrainedTokenizerBase
    chat_template: ChatTemplate

    @classmethod
    def load(
        cls,
        options: TargetOptions,
        device_map: str | torch.device | None = None,
        token: str | None = None,
        layers: bool = True,
    ) -> LoadedTarget:
        """Load a target and its tokenizer; see :func:`load_frozen_target`."""
        tokenizer = load_tokenizer(options.target or BUNDLED_TARGET, token)
        # Before the weights, so that an unknown template is reported at once.
        chat_template = load_chat_template(tokenizer, options.chat_template)
        target = load_frozen_target(options, device_map, token, layers)
        return cls(options, target, tokenizer, chat_template)

    def open_chats(
        self,
        path: str | Path,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> ChatDataset:
        """Open a chat file, truncating chats to ``max_length`` and ``target.stable_length`` tokens.

        Raises ValueError if no chat is valid, or none of a sample can be encoded.
        """
        file = open_chat_file(path, progress)
        length = self._clamp_length(max_length)
        data = ChatDataset(file, self.tokenizer, self.chat_template, length)
        sample = range(0, len(data), max(1, len(data) // TRIAL_CHATS))[:TRIAL_CHATS]
        errors = [data[index].error for index in sample]
        if all(errors):
            raise ValueError(f"none of {len(errors)} chats can be encoded: {errors[0]}")
        return data

    def fingerprint(self, path: str | Path, max_length: int | None = None) -> dict[str, Any]:
        """Identify the chats, by path and size, the target, and how the chats are encoded."""
        return {
            "data": str(path),
            "bytes": Path(path).stat().st_size,
            "target": target_name(self.options),
            "template": self.options.chat_template,
            "max_length": self._clamp_length(max_length),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }

    def _clamp_length(self, max_length: int | None) -> int:
        longest = self.target.stable_length
        return longest if max_length is None else min(max_length, longest)


def target_name(options: TargetOptions) -> str:
    """Return the folder or Hub name of a target; ``bundled`` for the bundled one."""
    is_bundled = str(options.target or BUNDLED_TARGET) == str(BUNDLED_TARGET)
    return "bundled" if is_bundled else str(options.target)


def load_frozen_target(
    options: TargetOptions,
    device_map: str | torch.device | None = None,
    token: str | None = None,
    layers: bool = True,
) -> Target:
    """Load a target without its tokenizer and chat template.

    Without ``layers``, only the embedding and the output projection, where that is possible.
    """
    path = options.target or BUNDLED_TARGET
    model = None
    if not layers:
        try:
            model = load_embeddings(path, options.dtype, device_map, token)
        except LoadError as error:
            log.warning("loading the whole target: %s", error)
    if model is None:
        model = load_target(path, options.dtype, device_map, token=token)
    return Target(model.requires_grad_(False).eval())


def fastest_dtype(device: str | torch.device | None = None) -> str | None:
    """Return bfloat16 if ``device`` is an x86 CPU that multiplies faster in it than in float32.

    Otherwise return None, the default of :func:`load_target`. None, ``auto`` and the like mean the
    GPU if there is one. Instructions for bfloat16 may be slower than those for float32.
    """
    on_cpu = str(device) == "cpu" or (device in (None, *SPREAD) and not torch.cuda.is_available())
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    capable = any(hasattr(torch.cpu, name) and getattr(torch.cpu, name)() for name in names)
    if not (on_cpu and capable):
        return None
    seconds = {dtype: _time_product(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return "bfloat16" if seconds[torch.bfloat16] < 0.8 * seconds[torch.float32] else None


@cache
def _time_product(dtype: torch.dtype) -> float:
    """Return the seconds that multiplying two matrices takes: the shortest of several runs."""
    one, other = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: F.linear(one, other), number=1, repeat=10))


def open_chat_file(path: str | Path, progress: Progress | None = None) -> ChatFile:
    """Open a chat file, and report the records that are skipped or shortened."""
    file = ChatFile(path, progress)
    summary = file.summary()
    if summary is not None:
        log.warning("%s: %s", path, summary)
    return file


def check_device_map(device_map: str | None, processes: int) -> None:
    """Reject a device map if there are several processes, which have a device each."""
    if device_map is not None and processes > 1:
        raise OptionsError(
            "--device-map requires a single process; each of several uses a device of its own"
        )
