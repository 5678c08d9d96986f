"""A drafter as a repository for ``model.generate(..., custom_generate="user/repo")``.

:func:`write_repository` writes it; its ``custom_generate/generate.py`` is :func:`generate`.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd.model.config import SETTINGS_FILE, Settings, read_settings
from eagle_fsd.model.custom_generate import caller_argument
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

# Fuzzy speculative decoding for {target}

`generate` drafts tokens with the drafter of this repository and verifies them with the target, by
[eagle-fsd](https://pypi.org/project/eagle-fsd/):

```bash
pip install eagle-fsd
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
out = model.generate(
    **inputs,
    max_new_tokens=200,
    custom_generate="path/or/name/of/this/repository",
    trust_remote_code=True,
)
```

Settings: {settings}. {certificate} They are in `{file}`; arguments of `generate`, such as
`threshold=0.0` for lossless decoding, override them. Sampling and beams are as in transformers,
without beam search.
"""


def generate(model: PreTrainedModel, **arguments: Any) -> Tensor:
    """Decode with the drafter of the repository that ``custom_generate`` names.

    Called by ``GenerationMixin.generate`` with its other arguments. The drafter is loaded once for
    each model.
    """
    repository = str(caller_argument("custom_generate"))
    pairs: dict[str, EagleFSD] = vars(model).setdefault("_eagle_fsd_pairs", {})
    if repository not in pairs:
        pairs[repository] = EagleFSD.from_pretrained(model, repository)
    decode: Any = pairs[repository].custom_generate
    if (streamer := arguments.pop("streamer", None)) is not None:  # transformers drops it
        decode = functools.partial(decode, streamer=streamer)
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
    """Write a repository with the files of a drafter's folder, which requires a package version.

    ``settings`` replace the folder's ``fsd.json``, and ``target`` is the name in the card. Raises
    ValueError if the output folder is not empty, the drafter's holds no model, or settings are
    invalid.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; choose another folder")
    if not (drafter / "config.json").is_file():
        raise ValueError(f"{drafter} is not the folder of an EAGLE head or a draft model")
    source = drafter / SETTINGS_FILE if settings is None else settings
    read = read_settings(source) if settings is not None or source.exists() else Settings()
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(drafter.iterdir()):
        if file.is_file() and file.name not in (CARD_FILE, SETTINGS_FILE):
            shutil.copyfile(file, out / file.name)
    if source.exists():
        shutil.copyfile(source, out / SETTINGS_FILE)
    code = out / "custom_generate"
    code.mkdir()
    atomic_write(code / "generate.py", _CODE)
    bound = f">={version}" if version.replace(".", "").isdigit() else ""  # numbers only, there
    atomic_write(code / "requirements.txt", f"eagle-fsd{bound}\n")
    name = target or (read.target.name if read.target is not None else "path/to/the/target")
    certificate = "They are not certified." if read.certificate is None else f"{read.certificate}."
    card = _CARD.format(
        target=name,
        settings="lossless decoding" if read.lossless else read.label,
        certificate="" if read.lossless else certificate,
        file=SETTINGS_FILE,
    )
    atomic_write(out / CARD_FILE, card)
