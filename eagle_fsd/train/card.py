"""The model card of a trained head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.train.record import RECORD_FILE

CARD_FILE = "README.md"

_CARD = """---
license: other
library_name: eagle-fsd
---

# EAGLE draft head for {target}

Trained by `eagle-fsd train` on `{data}`: {steps} steps, {tokens} tokens, {minutes:.0f} minutes of
training steps on {machine}, {date}.

{measured}

![curves](curves.png)

Use it with its target:

```python
from eagle_fsd import EagleFSD

model = EagleFSD.from_pretrained("{path}", "path/to/this/folder")
```

Recipe:

```json
{recipe}
```

Versions: {versions}.
"""


def write_card(folder: Path, metrics: Sequence[dict[str, Any]], made_from: dict[str, Any]) -> None:
    """``README.md`` from the folder's record and its last validation."""
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    target = made_from["target"]
    local = target == "bundled" or Path(target).exists()
    text = _CARD.format(
        target=Path(target).name if local else target,
        path="path/to/the/target" if local else target,
        data=Path(made_from["data"]).name,
        steps=record["steps"],
        tokens=record["tokens"],
        minutes=record["seconds"] / 60,
        machine=record["machine"],
        date=record["date"],
        measured=_measured(metrics),
        recipe=json.dumps(record["settings"], indent=2),
        versions=", ".join(f"{name} {value}" for name, value in record["versions"].items()),
    )
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def _measured(metrics: Sequence[dict[str, Any]]) -> str:
    last = next((line for line in reversed(metrics) if line["kind"] == "validation"), None)
    if last is None:
        return "No chats were held out, so nothing was measured."
    depths = ", ".join(f"{value:.3f}" for value in last["js_by_depth"])
    tau = f"{last['tau']:.2f}" if last["tau"] else "unknown"
    return (
        f"On held-out chats: tau {tau} (tokens emitted per target pass, exact greedy decoding);"
        f" the head's likeliest token is the target's {last['top1']:.1%} of the time, among its"
        f" three likeliest {last['top3']:.1%}; mean Jensen-Shannon divergence at accepted nodes by"
        f" depth, in nats: {depths}."
    )
