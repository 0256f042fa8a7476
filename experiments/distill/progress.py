"""How far a stage is and how long it will take: a bar, or lines where nobody watches one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar

LINE_S = 20.0
"""Seconds between two lines."""
BAR_S = 0.5
"""Seconds between two looks at the figures of a bar: each look waits for the device."""


class Progress:
    """What one stage tells about itself.

    Args:
        title: of the stage.
        bar: to draw it with; None = lines.
    """

    def __init__(self, title: str, bar: Bar | None) -> None:
        self._title, self._bar = title, bar
        self._task = bar.add_task(title, total=1.0, note="") if bar else None
        self._begun = self._told = perf_counter()
        self._first: float | None = None

    @property
    def due(self) -> bool:
        """Whether it is time to tell more."""
        return perf_counter() - self._told > (BAR_S if self._bar else LINE_S)

    def at(self, done: float, note: str) -> None:
        """Tell how far it is, if that is due.

        Args:
            done: share of the stage that is done, 0 to 1, earlier calls included.
            note: the figures.
        """
        if self._first is None:
            self._first = done
        if not self.due:
            return
        self._told = perf_counter()
        text = f"{note}{self._left(done)}"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, note=text)
        else:
            print(f"{self._title}: {100 * done:.0f} %, {text}", file=sys.stderr, flush=True)

    def _left(self, done: float) -> str:
        """The time left at the pace since the first call of ``at``."""
        gained = done - (self._first or 0.0)
        if gained <= 0:
            return ""
        seconds = (perf_counter() - self._begun) * (1 - done) / gained
        return f", {seconds // 60:.0f}:{seconds % 60:02.0f} left"


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """The progress of one stage, on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Progress(title, None)
        return
    with Bar("{task.description}", BarColumn(), "{task.fields[note]}", console=console) as bar:
        yield Progress(title, bar)
