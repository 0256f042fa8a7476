"""A matcher that keeps its ledger and its times. Strategies only ever meet this one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.clock import Clock
from harness.core import Ledger, RollbackKind
from harness.grammar.matcher import Matcher


class TrackedMatcher:
    """Wraps a matcher: every advance and rollback is booked, every call is timed.

    Attributes:
        ledger: advances and rollbacks by kind.
        fill_us: time of each mask fill since the last ``take_fills``, µs.
    """

    def __init__(self, matcher: Matcher, clock: Clock) -> None:
        self.inner = matcher
        self.ledger = Ledger()
        self.fill_us: list[float] = []
        self._clock = clock

    @property
    def terminated(self) -> bool:
        return self.inner.terminated

    @property
    def completed(self) -> bool:
        return self.inner.completed

    @property
    def started(self) -> bool:
        return self.inner.started

    @property
    def constrained(self) -> bool:
        return self.inner.constrained

    @property
    def held(self) -> int:
        return self.inner.held

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance over ``tokens``, all or nothing."""
        with self._clock.within("grammar"):
            accepted = self.inner.accept(tokens)
        if accepted:
            self.ledger.advanced += len(tokens)
        return accepted

    def validate(self, tokens: Sequence[int]) -> int:
        """Length of the legal prefix; no state change."""
        with self._clock.within("grammar"):
            return self.inner.validate(tokens)

    def audit(self, tokens: Sequence[int]) -> int:
        """``validate`` for the accounting alone, which no engine pays for: its time is dropped."""
        with self._clock.span("audit"):
            return self.inner.validate(tokens)

    def fork(self) -> TrackedMatcher:
        """An independent copy in the same state, whose ledger begins with what it holds."""
        with self._clock.within("grammar"):
            copy = TrackedMatcher(self.inner.fork(), self._clock)
        copy.ledger.advanced = self.held
        return copy

    def rollback(self, n: int, kind: RollbackKind) -> None:
        """Undo ``n`` tokens and book them under ``kind``; ``n = 0`` is no rollback."""
        if n == 0:
            return
        with self._clock.within("grammar"):
            self.inner.rollback(n)
        self.ledger.roll_back(kind, n)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        """Write what is legal next into ``mask[row]``."""
        clock = self._clock
        with clock.within("grammar"):
            start = clock.stopwatch()
            self.inner.fill(mask, row)
            self.fill_us.append(clock.stopwatch() - start)

    def take_fills(self) -> list[float]:
        """The times of the fills since the last call, µs."""
        taken, self.fill_us = self.fill_us, []
        return taken

    def forced_text(self) -> str:
        with self._clock.within("grammar"):
            return self.inner.forced_text()
