"""The page, the Markdown and the verdict of a report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_report import make_report, make_row

from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.evaluation.html_report import html_text
from eagle_fsd.evaluation.markdown_report import report_text
from eagle_fsd.evaluation.methods import fsd_method
from eagle_fsd.evaluation.plots import draw_figures
from eagle_fsd.evaluation.verdict import main_row, verdict

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[31m"
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def comparison(text: str = "plain", token: str = " fuzzy") -> dict[str, Any]:
    """Return a changed answer as reports hold it."""
    fuzzy = {"text": token, "changed": True, "fuzzy": True, "regret": 0.5, "divergence": 0.01}
    answer = {
        "question_id": text,
        "category": "c",
        "turns": [text],
        "outcome": "lost",
        "exact": [[{"text": text}]],
        "other": [[{"text": text}, fuzzy, {"text": text, "changed": True}]],
    }
    return {"method": "fsd", "changed": 3, "answers": [answer], "tokens": [[0.01, 0.5]]}


def report_of(*rows: dict[str, Any], **values: Any) -> dict[str, Any]:
    return make_report([make_row("plain", 0.4), make_row("exact", 1.0), *rows], **values)


# -- the page --------------------------------------------------------------------------------------


def test_page_contains_its_figures_escapes_everything_and_loads_nothing(tmp_path: Path) -> None:
    rows = [make_row("fsd", 1.5), make_row("<b>$x^2$", 1.2), make_row(HOSTILE, 1.1)]
    for row in rows[1:]:
        row["settings"] = {"method": "Rule()"}
    report = report_of(
        *rows,
        comparison={**comparison(HOSTILE, HOSTILE), "method": HOSTILE},
        conclusions=[HOSTILE, HOSTILE + "2"],
        tables=[([HOSTILE], [[HOSTILE]])],
    )
    report["about"] |= {"questions": HOSTILE, "target": HOSTILE}
    report["environment"]["machine"]["cpu"] = HOSTILE
    draw_figures(report, tmp_path)
    text = html_text(report, tmp_path)
    page = Page(text)
    assert ("title", "fuzzy token, gave up 0.5 nats, divergence 0.01") in page.attributes
    assert "right with exact decoding, wrong here" in page.text
    assert page.tags.count("mark") == 2  # the legend and the token
    assert page.tags.count("svg") == 2
    assert page.text.count("<b>$x^2$") >= 5
    assert page.text.count("<script>alert(1)</script>") >= 10
    assert "\x1b" not in text
    assert text == html_text(json.loads(json.dumps(report)), tmp_path)
    assert not {"script", "link", "img", "iframe", "object", "b"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset"}
    assert not any(name.startswith("on") for name in names)
    assert all(str(value).startswith("#") for name, value in page.attributes if "href" in name)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "@import" not in text
    policy = next(value for _, value in page.attributes if value and "default-src" in value)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_page_keeps_the_answers_spaces() -> None:
    """Nothing but the pieces' text is inside an answer, whose spaces are shown as they are."""
    text = html_text(report_of(make_row("fsd", 1.5), comparison=comparison("a\n b", "\n")), Path())
    sides = re.findall(r'<div class="side" dir="auto">(.*?)</div>', text, re.DOTALL)
    plain = [re.sub(r"<[^>]*>", "", side) for side in sides]
    assert plain == ["a\n b", "a\n b\u21b5\na\n b"]


@pytest.mark.usefixtures("no_figures")
def test_evaluation_writes_a_page_with_its_changed_answers(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tom has 12 <b>red</b> pens and 7 blue pens. How many pens?\n")
    config = EvaluationConfig(max_new_tokens=32)
    request = EvaluationRequest(questions=str(prompts), out=tmp_path / "out")
    report = evaluate(request, config, ["exact", fsd_method(0.4)])
    (answer,) = report["comparison"]["answers"]
    fuzzy = [piece for piece in answer["other"][0] if piece.get("fuzzy")]
    assert fuzzy
    assert all(piece["divergence"] < 0.4 for piece in fuzzy)
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("mark") == 1 + len(fuzzy)
    assert "<b>red</b> pens" in page.text
    assert "b" not in page.tags
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert text == html_text(report, tmp_path / "out")


# -- Markdown and terminal -------------------------------------------------------------------------


def test_markdown_shows_changed_answers_and_figures() -> None:
    report = report_of(
        make_row("fsd", 1.5), comparison=comparison("a|b\n*c*"), figures=["tradeoff.png"]
    )
    report["comparison"]["method"] = "before ####"  # which ends a heading, unless it is escaped
    text = report_text(report)
    assert r"## Changed answers of before \#\#\#\#" in text
    assert "![tradeoff.png](tradeoff.png)" in text
    assert r"| a\|b<br>\*c\* <b>fuzzy</b>a\|b<br>\*c\* |" in text
    assert "<script>" not in report_text(report_of(comparison=comparison(HOSTILE)))


# -- the verdict -----------------------------------------------------------------------------------


def test_verdict_states_speed_and_bound() -> None:
    assert verdict(report_of(make_row("a", 1.5), conclusions=["One.", "Two."])) == "One."
    assert verdict(make_report([make_row("plain", 0.4)])) is None
    assert verdict(report_of(make_row("fsd", 1.5, lost=1))) == (
        "fsd (js T=0.1, r=0.1, tree 16/8/2) decodes 1.50 times as fast as exact decoding (95%"
        " interval 1.49 to 1.51) and 3.75 times as fast as plain decoding; of 100 questions it"
        " loses 1 and gains 0, so with 95% confidence its loss of accuracy is at most 3.10"
        " points."
    )


def test_verdict_names_the_settings_that_are_no_defaults() -> None:
    row = make_row("fsd", 1.5, lost=1)
    limits = {"exact_first": 4, "max_fuzzy_nats": 2.5}
    for settings, words in (
        ({"method": "RegretRule()", **limits}, "RegretRule(), at most 2.5 nats, first 4 exact"),
        ({**row["settings"], "fallback": "stop", **limits}, "fallback stop, at most 2.5 nats, fir"),
    ):
        assert words in str(verdict(report_of(row | {"settings": settings})))


def test_verdict_of_methods_that_were_not_timed_together() -> None:
    late = {"speed_over_exact": None, "speed_over_exact_interval": None, "speedup": None}
    for name in ("fsd", "other"):
        sentence = str(verdict(report_of(make_row(name, 1.5, lost=1) | late)))
        assert "and exact decoding were not timed in the same session; of 100" in sentence
        assert "loss of accuracy is at most 3.10 points." in sentence


def test_verdict_of_slow_methods() -> None:
    exact = make_row("exact", 1.0) | {"speedup": 0.85, "speedup_interval": [0.8, 0.9]}
    slow = str(verdict(report_of(make_row("fsd", 1.005))))
    assert "is not measurably faster than exact decoding (1.00 times; 95% interval" in slow
    sentence = (
        "Exact decoding is slower than plain decoding with this pair on this machine (0.85 times as"
        " fast; 95% interval 0.80 to 0.90)"
    )
    assert str(verdict(make_report([exact]))).startswith(sentence)
    exact["speedup_interval"] = [0.8, 1.01]
    assert verdict(make_report([exact])) is None


def test_verdict_without_references() -> None:
    rows = [make_row("exact", 1.0, scored=False), make_row("fsd", 1.5, scored=False)]
    sentence = str(verdict(make_report(rows)))
    assert "60 of 100 answers are exact decoding's (its fuzzy tokens give up 0.25 nats" in sentence
    assert sentence.endswith(
        "at most 48% of the answers to such prompts change; their log-probability under the target"
        " changes by -0.100 nats per token (95% interval -0.150 to -0.050)."
    )
    found = rows[1]["against_exact"]["agreement"]
    found["changed_limit"] = 0.481  # limits are rounded up
    assert "at most 49% of the answers" in str(verdict(make_report(rows)))
    rows[1]["against_exact"]["agreement"] = {**found, "identical": 1, "changed_limit": 0.9995}
    sentence = str(verdict(make_report(rows)))  # a limit that says nothing is left out
    assert "; 1 of 100 answers are exact decoding's (its fuzzy tokens give up 0.25 nats" in sentence
    assert "95% confidence" not in sentence
    sampled = make_report(rows)
    sampled["about"]["temperature"] = 1.0
    assert "nothing bounds its loss of quality" in str(verdict(sampled))
    pairs = {"questions": 100, "won": 5, "tied": 88, "lost": 7, "unclear": 0, "loss_limit": 0.081}
    rows[1]["judge"] = {"pairs": pairs}
    sentence = str(verdict(sampled))
    assert "the judge finds 7 of 100 answers worse and 5 better" in sentence
    assert "exceeds that of better ones by at most 8.10 points." in sentence
    pairs |= {"tied": 85, "unclear": 3}
    words = "5 better, and is unclear about 3, which count as worse, so"
    assert words in str(verdict(sampled))


def test_main_row_prefers_fsd_then_a_bound() -> None:
    fsd, fast = make_row("fsd", 1.1), make_row("fast", 2.0)
    assert main_row(report_of(fast, fsd)) == fsd
    safe = make_row("safe", 1.2)
    safe["against_exact"]["loss_limit"] = 0.009
    assert main_row(report_of(fast, safe)) == safe
    lossy = make_row("lossy", 3.0, lost=20)
    assert main_row(report_of(lossy, fast)) == fast
    assert main_row(report_of(lossy)) == lossy
    assert main_row(report_of()) is None
    # It does not depend on a judge, which has not answered when the changed answers are chosen.
    faithful, other = (
        make_row(name, speed, scored=False) for name, speed in (("a", 1.5), ("b", 2.5))
    )
    faithful["against_exact"]["agreement"]["identical"] = 90
    report = report_of(faithful, other)
    assert main_row(report) == faithful
    for row in (faithful, other):
        row["judge"] = {"pairs": {"loss_limit": 0.1}}
    assert main_row(report) == faithful
