"""The end of a process that waits for a GPU which waits for a lost rank."""

from __future__ import annotations

import os
import sys
from threading import Condition, Thread

from harness.errors import EXIT_BAD_INPUT


class Watchdog:
    """Ends the process, with one line, if it is armed for too long.

    A collective in a GPU's queue ends no earlier than its slowest rank, and whoever reads the
    result waits where no exception reaches him. What has been journalled by then is kept.

    Args:
        timeout_s: how long that is.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._armed: str | None = None
        self._turn = 0
        Thread(target=self._watch, name="watchdog", daemon=True).start()

    def arm(self, line: str) -> None:
        """From now on the time counts; ``line`` says what is waited for."""
        self._set(line)

    def disarm(self) -> None:
        """It did not take too long."""
        self._set(None)

    def _set(self, line: str | None) -> None:
        with self._changed:
            self._armed = line
            self._turn += 1
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._rests():
                pass
        print(
            f"error: {self._armed} for {self._timeout_s:g} s; see what that one says, or raise "
            "engine.tp_timeout_s if it is merely slow",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_BAD_INPUT)

    def _rests(self) -> bool:
        """Wait for the next word; False where none came in time."""
        turn, limit = self._turn, None if self._armed is None else self._timeout_s
        return self._changed.wait_for(lambda: self._turn != turn, limit)
