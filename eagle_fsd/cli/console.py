"""Console output: results on standard output; messages, progress and errors on standard error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from eagle_fsd.utils.progress import Progress, no_progress
from eagle_fsd.utils.text import escape_control_chars, one_line

# Names of folders, models and categories may contain brackets, which are rich's markup. Terminals
# wrap long lines; elsewhere, they stay whole.
out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

#: Seconds after which progress is printed again without a terminal.
LINE_INTERVAL = 30.0
#: Maximum width of a table; terminals wrap its lines.
MAX_TABLE_WIDTH = 10_000


def fail(message: str | BaseException, status: int) -> NoReturn:
    """Print an error as one line and exit."""
    err.print(f"error: {one_line(message)}")
    raise SystemExit(status)


def print_text(text: str, style: str = "") -> None:
    """Print a text without a line end, escaped for a terminal."""
    from rich.segment import Segment, Segments  # rich's Text replaces tabs by spaces

    text = escape_control_chars(text) if out.is_terminal else text
    out.print(Segments([Segment(text, out.get_style(style))]))


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    import json

    out.file.write(json.dumps(value) + "\n")


def print_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table at its full width; all columns but the first are right-aligned."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    Console(width=MAX_TABLE_WIDTH, highlight=False, markup=False).print(table)


def print_report(report: dict[str, Any], where: Path | None, as_json: bool) -> None:
    """Print a report as JSON, or its tables, conclusions or verdict, footnote and path."""
    from eagle_fsd.evaluation.tables import footnote, tables
    from eagle_fsd.evaluation.verdict import verdict

    if as_json:
        print_json(report)
        return
    for headers, cells in tables(report):
        print_table(headers, cells)
        out.print()
    for sentence in report.get("conclusions") or filter(None, [verdict(report)]):
        out.print(sentence)
    out.print(footnote(report), style="dim")
    if where is not None:
        err.print(f"The report is {where / 'report.html'}.", style="dim")


class ProgressBar:
    """A progress bar on a terminal, and lines of text elsewhere.

    A line is printed when the work reaches another tenth, and at the first progress after
    :data:`LINE_INTERVAL` seconds without one. An ``immediate`` bar appears on entering the context,
    others at the first progress.
    """

    def __init__(self, label: str, immediate: bool = True) -> None:
        self.label, self.immediate = label, immediate
        self._bar: Any = None
        self._task: Any = None
        self._tenths, self._printed = -1, 0.0  # tenths and time of the last line
        self._first: tuple[float, float] | None = None  # work and time when the total became known

    def __enter__(self) -> ProgressBar:
        if self.immediate:
            self._show()
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, note: str = "", work: float | None = None) -> None:
        """Show progress, and a note after the bar.

        ``work`` is a finer measure than ``done``, in the same unit, for the bar and the time left.
        """
        self._show()
        work = done if work is None else work
        if self._bar is not None:
            self._bar.update(self._task, completed=work, total=total or None, note=note)
            return
        now, tenths = time.monotonic(), done * 10 // total if total else 0
        if total:  # until then, what an earlier run has done is unknown, too
            self._first = self._first or (work, now)
        before, since = self._first or (work, now)
        if tenths != self._tenths or now - self._printed >= LINE_INTERVAL:
            self._tenths, self._printed = tenths, now
            parts = [f"{self.label}: {done} of {total or 'unknown'}", *([note] if note else [])]
            if work > before:
                minutes = (total - work) * (now - since) / (work - before) / 60
                parts.append(f"{minutes:.0f} minutes left")
            err.print(", ".join(parts))

    def _show(self) -> None:
        """Start the bar if standard error is a terminal."""
        if self._bar is not None or not err.is_terminal:
            return
        from rich import progress as rich_progress

        self._bar = rich_progress.Progress(
            *rich_progress.Progress.get_default_columns(),
            rich_progress.TextColumn("{task.fields[note]}", markup=False),
            console=err,
            transient=True,
            speed_estimate_period=600.0,  # a single chat may take minutes
        )
        self._bar.start()
        self._task = self._bar.add_task(self.label, total=None, note="")


def progress(label: str) -> AbstractContextManager[Progress]:
    """Return the progress bar of one stage of an evaluation or a training.

    Bars of stages that may have nothing to do appear at the first progress.
    """
    if label == "reading" and not err.is_terminal:
        return no_progress(label)
    return ProgressBar(label, immediate=label not in ("downloading", "scoring", "reading"))
