"""What the commands print with: answers on standard output, everything else on standard error."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console

# No markup: names of folders, categories and models may hold brackets.
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)


def fail(message: str, status: int) -> NoReturn:
    """Say in one line what went wrong, and end."""
    err.print(f"error: {' '.join(message.split())}", soft_wrap=True)
    raise SystemExit(status)


class ProgressBar:
    """A progress bar on a terminal, a plain line every tenth elsewhere; gone when it is done.

    Args:
        at_once: Show the bar before there is any progress: for work that is sure to come.
    """

    def __init__(self, label: str, at_once: bool = True) -> None:
        self.label, self.at_once = label, at_once
        self.bar: Any = None
        self.last = -1

    def __enter__(self) -> ProgressBar:
        if self.at_once:
            self._show()
        return self

    def _show(self) -> None:
        if self.bar is None and err.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=err,
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=None, note="")

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total``; ``note`` stands behind the bar."""
        self._show()
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, note=note)
        elif total and done * 10 // total != self.last:
            self.last = done * 10 // total
            err.print(f"{self.label}: {done} of {total}{', ' + note if note else ''}")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
