"""Sweeps, tuning and serving with drafters other than the bundled EAGLE-2 head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from eagle_fsd import EagleFSD
from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import Limits
from eagle_fsd.chat.serve.guard import Guard
from eagle_fsd.chat.serve.worker import FSDWorker, worker_app
from eagle_fsd.chat.wire_format import ASSISTANT, END, USER
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, GridConfig
from eagle_fsd.evaluation.sweep import sweep
from eagle_fsd.evaluation.tune import tune
from eagle_fsd.model.config import Settings, read_settings
from eagle_fsd.utils.chat_templates import Chat, encode_prompt, load_chat_template
from eagle_fsd.utils.files import read_jsonl

pytestmark = pytest.mark.slow

NOWHERE = "http://127.0.0.1:1"
CONFIG = EvaluationConfig(max_new_tokens=12)
CHAT: Chat = [{"role": "user", "content": "Mia has 8 apples and buys 4 more. How many are there?"}]

DRAFTERS = ("bundled-eagle3", "bundled-draft-model", "ngram", "adaptive-ngram")


def answer_texts(file: Path) -> list[list[str]]:
    return [record["choices"][0]["turns"] for record in read_jsonl(file)]


@pytest.mark.parametrize("drafter", ["bundled-eagle3", "ngram"])
@pytest.mark.usefixtures("few_measurements")
def test_sweep_and_tune_with_another_drafter(drafter: str, tmp_path: Path) -> None:
    request = EvaluationRequest(count=2, drafter=drafter, out=tmp_path / "sweep")
    grid = GridConfig(thresholds=(0.0, 0.4), min_ratios=(0.0,))
    report = sweep(request, CONFIG, grid, rules=False)
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows, *report["omitted"]] == ["plain", "exact", "T=0.4"]
    assert rows["exact"]["tau"] >= rows["plain"]["tau"] == 1.0
    plain = answer_texts(tmp_path / "sweep" / "plain.jsonl")
    assert answer_texts(tmp_path / "sweep" / "exact.jsonl") == plain
    assert len(plain) == 2

    own = Settings(threshold=0.2)
    tuning = tune(request.updated(out=tmp_path / "tune"), CONFIG, settings=own)
    assert tuning.settings is not None
    assert [item.method.name for item in tuning.search.races] == ["exact", "fsd"]
    assert list(tuning.batch) == [4]
    exact, fsd = tuning.search.races
    assert {item.tree.top_k for item in (*exact.predicted, *fsd.predicted)} == {1}
    found = read_settings(tmp_path / "tune" / "fsd.json")
    assert found.drafter is not None
    assert found.drafter.name == drafter
    pair = EagleFSD.from_pretrained(drafter=drafter, settings=tmp_path / "tune" / "fsd.json")
    assert (pair.exact_tree, pair.tree) == (exact.tree, fsd.tree)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_worker_with_another_drafter(drafter: str, model: EagleFSD) -> None:
    """Its lossless answers are those of plain decoding, and it drafts."""
    template = load_chat_template(model.tokenizer)
    ids = encode_prompt(CHAT, model.tokenizer, template)
    plain = model.generate(ids, max_new_tokens=64, method="ar").sequences[0, ids.shape[1] :]
    pair = EagleFSD.from_pretrained(drafter=drafter)
    backend = LocalBackend(pair, template, Limits(max_batch=2), ["pair"])
    worker = FSDWorker(backend, None, NOWHERE)
    prompt = f"{USER}{CHAT[0]['content']}{END}{ASSISTANT}"
    parameters = {"prompt": prompt, "temperature": 0, "max_new_tokens": 64}
    try:
        with TestClient(Guard(worker_app(worker)), "http://localhost") as client:

            def answer(threshold: float) -> dict[str, Any]:
                body = {**parameters, "fsd": {"threshold": threshold}}
                found: dict[str, Any] = client.post("/worker_generate", json=body).json()
                assert found["error_code"] == 0, found
                return found

            exact, fuzzy = answer(0.0), answer(0.4)
    finally:
        worker.backend.close()
    assert exact["text"] == model.tokenizer.decode(plain, skip_special_tokens=True)
    assert exact["fsd"]["fuzzy_tokens"] == 0
    assert exact["fsd"]["tau"] > 1.2
    assert fuzzy["fsd"]["tau"] > 1.2
