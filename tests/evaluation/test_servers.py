"""Comparing OpenAI-compatible servers: the bound, the certificate, and servers that fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_servers import APIThread
from stub_endpoint import Reply, StubEndpoint, completion, failure

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.evaluation.config import EvaluationRequest, ServerOptions
from eagle_fsd.evaluation.questions.sets import QuestionSetError
from eagle_fsd.evaluation.servers import evaluate_servers
from eagle_fsd.model.config import read_settings
from eagle_fsd.utils.files import read_jsonl

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.xdist_group("servers")


@pytest.fixture(scope="module")
def pair_servers(model: EagleFSD) -> Iterator[tuple[APIThread, APIThread]]:
    """A lossless server, and one that relaxes acceptance."""
    fuzzy = copy.copy(model)
    model, model.acceptance = copy.copy(model), AcceptanceConfig()
    fuzzy.acceptance = AcceptanceConfig(threshold=0.1, min_ratio=0.3)
    servers = APIThread(model, max_batch=4), APIThread(fuzzy, max_batch=4)
    yield servers
    for server in servers:
        server.stop()


def test_two_servers_are_compared_and_certified(
    run: Run,
    pair_servers: tuple[APIThread, APIThread],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The second run finds all answers, and judges the same bound by another limit."""
    exact, fuzzy = pair_servers
    settings = tmp_path / "fsd.json"
    settings.write_text(json.dumps({"threshold": 0.1, "min_ratio": 0.3, "about": {"kept": True}}))
    arguments: list[object] = ["evaluate", "--count", 8, "--batch", 4, "--max-new-tokens", 160]
    arguments += ["--server", f"base={exact.url}/v1", "--server", f"FSD={fuzzy.url}/v1"]
    arguments += ["--out", tmp_path / "a", "--certify", settings, "--engine", "vllm"]
    status, printed, errors = run(*arguments, "--max-drop", 1)
    assert status == 0, errors
    assert "Not certified: the loss is at most" in printed
    assert "8 fresh questions cannot show a loss" in caplog.text
    assert read_settings(settings).certificate is None
    status, printed, errors = run(*arguments, "--max-drop", 90, "--json")
    assert status == 0, errors
    assert "8 answers of server FSD are from an earlier run" in caplog.text
    report = json.loads(printed)
    reference, row = report["rows"]
    assert (reference["method"], row["method"]) == ("base", "FSD")
    against, certificate = row["against_exact"], read_settings(settings).certificate
    assert (certificate.decoder, certificate.questions, against["paired"]) == ("vllm", 8, 8)
    assert certificate.bound == pytest.approx(100 * against["loss_limit"])
    assert json.loads(settings.read_text())["about"] == {"kept": True}
    assert reference["accuracy"] > 0.5
    assert row["tokens"] > 8 * 5
    assert row["speed_over_exact"] > 0
    text, page = ((tmp_path / "a" / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "as fast as base" in text or "faster than base" in text
    assert report["comparison"]["changed"]
    assert "| base | FSD |" in text
    assert "differ from base's" in page
    assert "drafter None" not in page
    assert not any("exact decoding" in item or "uzzy tokens" in item for item in (text, page))
    assert report["figures"] == ["tradeoff.png"]


class DyingServer(StubEndpoint):
    """A server that fails after some requests, and once if it is ``shaky``."""

    def __init__(self, patience: int, shaky: bool = False) -> None:
        super().__init__()
        self.patience, self.shaky = patience, shaky

    def reply(self, body: dict[str, Any]) -> Reply:
        if self.shaky and len(self.requests) == 2:
            return failure(503, "busy")
        if len(self.requests) > self.patience:
            return failure(503, "gone")
        if "long" in body["messages"][-1]["content"]:
            return failure(400, "the maximum context length is exceeded")
        return completion(body["messages"][-1]["content"].upper())


def test_a_server_that_dies_loses_nothing(run: Run, tmp_path: Path) -> None:
    """Complete answers are kept, and the other questions are asked again, also elsewhere.

    A failure that passes is not noticed.
    """
    questions = tmp_path / "q.jsonl"
    rows = [{"question": f"say {word}", "answer": f"SAY {word.upper()}"} for word in "abcdefgh"]
    rows.append({"question": "long", "answer": "LONG"})
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, good, bad = tmp_path / "out", DyingServer(1000), DyingServer(6)
    call = ["evaluate", questions, "--batch", 2, "--out", out, "--server", f"a={good.url}"]
    status, _, errors = run(*call, "--server", f"b={bad.url}")
    assert status == 1
    assert f"server b at {bad.url} failed (503, gone)" in errors
    assert "run the same command again" in errors
    kept = [record["question_id"] for record in read_jsonl(out / "b.jsonl")]
    assert 0 < len(kept) < 9
    before = len(bad.requests)
    healed = DyingServer(1000, shaky=True)
    status, printed, errors = run(*call, "--server", f"b={healed.url}", "--json")
    assert status == 0, errors
    # Two more for a warm-up, and one that failed.
    assert (len(bad.requests), len(healed.requests)) == (before, 9 - len(kept) + 3)
    first, second = json.loads(printed)["rows"]
    assert first["accuracy"] == second["accuracy"] == pytest.approx(8 / 9)
    assert first["failed"] == second["failed"] == 1
    assert second["against_exact"]["agreement"]["identical"] == 8
    for server in (good, bad, healed):
        server.close()


def test_invalid_comparisons_are_rejected(run: Run, tmp_path: Path) -> None:
    server = DyingServer(1000)
    url, other = f"a={server.url}", f"b={server.url}"
    settings = tmp_path / "fsd.json"
    settings.write_text("{}")
    certified = ("--server", url, "--server", other, "--certify", settings)
    assert ServerOptions().updated(max_drop=1.0) == ServerOptions()
    with pytest.raises(QuestionSetError):  # not that --target is given
        evaluate_servers(
            EvaluationRequest().updated(questions="no-set"), ServerOptions(servers=(url, other))
        )
    for options, message in (
        (("--server", url), "give at least two"),
        (("--server", url, "--server", url), "two servers have the name 'a'"),
        (("--server", url, "--server", "b"), "--server must be NAME=URL; got b"),
        (("--server", url, "--server", f"hf={server.url}"), "a server cannot be named hf"),
        (("--server", url, "--server", other, "--threshold", "0.1"), "--server takes no"),
        (("--server", url, "--server", other, "--target", "x"), "target does not affect"),
        (("--server", url, "--server", other, "--conv-template", "x"), "conv-template does not"),
        (("--certify", settings), "--certify requires two servers"),
        ((*certified, "--temperature", "1", "--min-p", "0.1"), "--min-p is not supported"),
        (("--max-drop", "2"), "--max-drop requires --server"),
        (("--server", url, "--server", other, "--max-drop", "2"), "--max-drop requires --certify"),
        (("--judge-mode", "pair"), "--judge-mode requires --judge-base-url"),
        (("--judge-model", "a"), "--judge-model requires --judge-base-url"),
        (("--server", url, "--server", other, "--server-model", "x"), "lists stub; got"),
    ):
        status, _, errors = run("evaluate", "--out", tmp_path / "out", *options)
        assert (status, message in errors) == (2, True), errors
    server.close()
