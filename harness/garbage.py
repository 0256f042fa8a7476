"""The garbage collector, kept out of what is timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
        enabled, nested, frozen = gc.isenabled(), self._paused, gc.get_freeze_count()
        gc.disable()
        gc.freeze()
        self._paused = True
        try:
            yield
        finally:
            self._paused = nested
            if not frozen:
                gc.unfreeze()
            if enabled:
                gc.enable()

    def collect(self) -> None:
        """Collect what was left since the last call, and look at the rest no more; nothing but
        while paused."""
        if self._paused:
            gc.collect()
            gc.freeze()


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
