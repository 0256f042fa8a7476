"""The garbage collector, kept out of what is timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW = 1
"""The oldest generation that holds what was made since the last collection, and nothing else."""


class Garbage:
    """When a loop's garbage is collected: never while its time counts.

    The collector begins a full collection whenever enough objects have survived, whatever is being
    timed. It walks all traces since the last one, and that stops a step for a tenth of a second.
    """

    def __init__(self) -> None:
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is collected meanwhile but by ``collect``."""
        enabled, nested = gc.isenabled(), self._paused
        gc.disable()
        self._paused = True
        try:
            yield
        finally:
            self._paused = nested
            if enabled:
                gc.enable()

    def collect(self) -> None:
        """Collect what was left since the last call; nothing but while paused. What is in use still
        is not looked at again before the collector is back: freezing it would do that too, but
        then nobody would ever collect it, nor whatever it refers to."""
        if self._paused:
            gc.collect(NEW)


def forget_set_up() -> None:
    """Keep what exists now out of the garbage collector's sight. Compilers leave millions of
    objects behind, and a full collection that walks them stops the loop for a good part of a
    second. What an earlier run froze is collected first: its models must not stay."""
    release()
    gc.freeze()


def release() -> None:
    """Collect all that nobody holds any more, what was kept out of sight included: a run's models
    lie in reference cycles."""
    gc.unfreeze()
    gc.collect()
