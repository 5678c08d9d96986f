"""Fixtures of the evaluation tests, such as a judge that answers locally."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerators import reset_accelerator_state
from stub_judge import PROMPTS, StubJudge, records_of, write_lines

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.code_execution.sandbox import SandboxError, check_sandbox


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an evaluation in this process set Accelerate up as in a process of its own."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    reset_accelerator_state()


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures of evaluations, which take longer than a few answers."""
    monkeypatch.setattr("eagle_fsd.evaluation.runner.draw_figures", lambda *_: None)


@pytest.fixture
def judge_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with prompts, and a reference answer for question 101 only."""
    folder = tmp_path / "data"
    folder.mkdir()
    prompts = [
        {"name": name, "system_prompt": system, "prompt_template": template}
        for name, (system, template) in PROMPTS.items()
    ]
    references = [{"question_id": 101, "choices": [{"turns": ["right {1}", "right 2"]}]}]
    write_lines(folder / "judge_prompts.jsonl", prompts)
    write_lines(folder / "mt_bench_reference_gpt4.jsonl", references)
    monkeypatch.setenv("EAGLE_FSD_DATA", str(folder))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return folder


@pytest.fixture
def records() -> dict[str, list[Record]]:
    return {model: records_of(model) for model in ("plain", "exact", "fsd")}


@pytest.fixture
def stub() -> Iterator[StubJudge]:
    judge = StubJudge()
    yield judge
    judge.close()


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skip tests of the sandbox where it does not work."""
    try:
        check_sandbox()
    except SandboxError as error:
        pytest.skip(f"no sandbox: {error}")
