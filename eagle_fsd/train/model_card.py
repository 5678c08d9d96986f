"""Write the model card of a trained head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.train.curves import CURVES_FILE
from eagle_fsd.train.record import read_record
from eagle_fsd.utils.files import atomic_write

CARD_FILE = "README.md"

_CARD = """---
license: other
library_name: eagle-fsd
---

# {kind} draft head for {target}

Trained with `eagle-fsd train` on `{data}`: {steps} steps, {tokens} tokens, {minutes:.0f} minutes of
training steps on {machine}, {date}.

{results}

![Training curves]({curves})

Use it with its target:

```python
from eagle_fsd import EagleFSD

model = EagleFSD.from_pretrained({pair})
```

Configuration:

```json
{config}
```

Versions: {versions}.
"""


def write_card(
    folder: Path, metrics: Sequence[dict[str, Any]], fingerprint: dict[str, Any]
) -> None:
    """Write ``README.md`` from the folder's record and the last validation."""
    record = read_record(folder)
    target = fingerprint["target"]
    is_local = Path(target).exists()
    folder_name = '"path/to/this/folder"'
    if target == "bundled":
        pair = f"drafter={folder_name}"
    else:
        pair = f'"{"path/to/the/target" if is_local else target}", {folder_name}'
    text = _CARD.format(
        kind="EAGLE-3" if record["settings"]["head_type"] == "eagle3" else "EAGLE",
        target=Path(target).name if is_local else target,
        pair=pair,
        data=Path(fingerprint["data"]).name,
        steps=record["steps"],
        tokens=record["tokens"],
        minutes=record["seconds"] / 60,
        machine=record["machine"],
        date=record["date"],
        results=_describe_results(metrics),
        curves=CURVES_FILE,
        config=json.dumps(record["settings"], indent=2),
        versions=", ".join(f"{name} {value}" for name, value in record["versions"].items()),
    )
    atomic_write(folder / CARD_FILE, text)


def _describe_results(metrics: Sequence[dict[str, Any]]) -> str:
    last = next((line for line in reversed(metrics) if line["kind"] == "validation"), None)
    if last is None:
        return "There is no validation result."
    text = (
        f"On held-out chats: the target's most likely token is the head's {last['top1']:.1%} of the"
        f" time, and among the head's three most likely {last['top3']:.1%}"
    )
    if last["tau"] is None:  # nothing was decoded
        return text + "."
    depths = ", ".join(f"{value:.3f}" for value in last["js_by_depth"])
    return (
        f"{text}; tau {last['tau']:.2f} (tokens emitted per target pass, exact greedy decoding);"
        f" mean Jensen-Shannon divergence at accepted nodes by depth, in nats: {depths}."
    )
