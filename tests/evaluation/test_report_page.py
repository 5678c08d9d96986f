"""The page of a report in headless Chromium, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from chromium import MARKS, headless
from sample_report import make_report, make_row

from eagle_fsd.bundled.problems import problems
from eagle_fsd.evaluation import evaluate
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.html_report import html_text
from eagle_fsd.evaluation.plots import draw_figures
from eagle_fsd.model.config import Settings

pytest.importorskip("selenium.webdriver", reason="the browser is driven by Selenium")

pytestmark = MARKS

#: Returns [text, left, top, right, bottom] of the figure and of each text in it.
BOXES = """
const figure = document.querySelector(".figure svg");
return [figure, ...figure.querySelectorAll("text")].map(item => {
  const box = item.getBoundingClientRect();
  const text = item === figure ? "" : item.textContent;
  return [text, box.left, box.top, box.right, box.bottom];
});
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with headless() as chrome:
        yield chrome


def open_page(driver: Any, page: Path, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get(page.as_uri())


def test_texts_of_the_figure_are_legible_and_do_not_overlap(driver: Any, tmp_path: Path) -> None:
    """Figures of accuracies and log-probabilities are legible, and narrow pages scroll them."""
    for level in (-0.2675, -12.345678, None):
        scored = level is None
        rows = [make_row(name, 1.0 + at, scored=scored) for at, name in enumerate(("exact", "fsd"))]
        for row in rows:
            row["log_likelihood"] = level
        if not scored:
            rows[1]["against_exact"] |= {
                "log_likelihood_change": -0.0011,
                "log_likelihood_change_interval": [-0.0013, -0.0009],
            }
        report = make_report(rows)
        draw_figures(report, tmp_path)
        (tmp_path / "report.html").write_text(html_text(report, tmp_path), encoding="utf-8")
        for width in (1280, 420):
            open_page(driver, tmp_path / "report.html", width)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            (_, left, top, right, bottom), *boxes = driver.execute_script(BOXES)
            assert 600 < right - left <= 1280
            title = "accuracy (%)" if scored else "log-probability (nats/token)"
            assert {"tokens/s, including the prefill", title} <= {box[0] for box in boxes}
            assert len(boxes) >= 10
            for text, *box in boxes:
                inside = left <= box[0] and top <= box[1] and box[2] <= right and box[3] <= bottom
                assert inside, text
                assert min(box[2] - box[0], box[3] - box[1]) > 7, text
            for (first, *a), (second, *b) in combinations(boxes, 2):
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
                assert apart, (first, second)


def test_tables_are_not_clipped_on_a_narrow_page(driver: Any, tmp_path: Path) -> None:
    """Their values are labeled, because the header is gone."""
    page = tmp_path / "report.html"
    rows = [make_row("exact", 1.0), make_row(f"T=0.1 r=0.3{' and more' * 8}", 1.5)]
    page.write_text(html_text(make_report(rows), tmp_path), encoding="utf-8")
    open_page(driver, page, 420)
    cells = driver.execute_script("""
    const cells = [...document.querySelectorAll("th, td")];
    return cells.filter(item => item.checkVisibility()).map(item => [
      item.scrollWidth - item.clientWidth, item.getBoundingClientRect().right,
      item.textContent, getComputedStyle(item, "::before").content]);
    """)
    assert max(cell[0] for cell in cells) <= 0
    assert max(cell[1] for cell in cells) <= 420
    assert ["1.50 ± 0.01", '"x exact"'] in [cell[2:] for cell in cells]


@pytest.mark.slow
def test_report_on_own_prompts_fits_the_page(driver: Any, tmp_path: Path) -> None:
    """Verdict, figure, tables and changed answers of 8 prompts, whose fuzzy tokens are colored."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{problem.question}\n" for problem in problems("test", 8)))
    config = EvaluationConfig(max_new_tokens=64)
    request = EvaluationRequest(questions=str(prompts), out=tmp_path / "out")
    # Accepts much, so that answers change.
    settings = Settings(threshold=0.5, min_ratio=0.02)
    assert evaluate(request, config, ["exact", "fsd"], settings=settings) is not None
    for width in (1280, 390):
        open_page(driver, tmp_path / "out" / "report.html", width)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        text = driver.execute_script("return document.body.innerText")
        assert "of 8 answers are exact decoding's" in text
        assert len(driver.execute_script(BOXES)) >= 6
        colored = """
        return [...document.querySelectorAll("mark")].map(item => [
          item.textContent, getComputedStyle(item).backgroundColor, item.checkVisibility()]);
        """
        tokens = driver.execute_script(colored)
        assert any(visible for _, _, visible in tokens)
        assert {color for _, color, _ in tokens}.isdisjoint({"rgba(0, 0, 0, 0)"})
