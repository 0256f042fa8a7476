"""The one place where time is read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter
from types import TracebackType

import torch

INSIDE = nullcontext()
"""Stands for a span whose time an open one of the same phase counts."""


class Span:
    """One timed stretch of a phase; ``us`` is its whole duration once it has ended."""

    __slots__ = ("_clock", "_counts", "_mark", "_outer", "_start", "phase", "us")

    def __init__(self, clock: Clock, phase: str) -> None:
        self._clock, self.phase = clock, phase
        self._mark: torch.profiler.record_function | None = None
        self.us = 0.0

    def __enter__(self) -> Span:
        clock = self._clock
        if clock.annotate:
            self._mark = torch.profiler.record_function(self.phase)
            self._mark.__enter__()  # type: ignore[no-untyped-call]
        self._counts = get_ident() == clock.thread
        if self._counts:
            clock.inner.append(0.0)
            self._outer, clock.phase = clock.phase, self.phase
        self._start = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        elapsed = self.us = (perf_counter() - self._start) * 1e6
        if self._counts:
            clock = self._clock
            inside = clock.inner.pop()
            clock.phase = self._outer
            clock.inner[-1] += elapsed
            clock.us[self.phase] = clock.us.get(self.phase, 0.0) + elapsed - inside
        if self._mark is not None:
            self._mark.__exit__(kind, error, trace)


class Clock:
    """Exclusive time per phase: an inner span's time is taken out of the outer one's.

    ``with clock.span("draft"): ...`` adds to ``clock.us["draft"]``. Spans nest. A span in another
    thread than the clock's own tells its duration and adds to no phase: whoever waits for that
    thread has the time in a span of his own.

    Attributes:
        us: time by phase since the last ``take``, µs.
        annotate: name the spans in the trace of a running ``torch.profiler``.
        inner: by open span, the time that spans inside it have taken, µs.
        phase: of the innermost open span; empty where none is open.
        thread: whose spans count; the loop sets it to the one that it runs in.
    """

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.annotate = False
        self.inner = [0.0]
        self.phase = ""
        self.thread = get_ident()
        self._left: float | None = None

    def span(self, phase: str) -> Span:
        """A context manager that times its body."""
        return Span(self, phase)

    def within(self, phase: str) -> AbstractContextManager[object]:
        """A span, but where one of this phase is open already: a call of a microsecond is then
        not burdened with another one."""
        return INSIDE if self.phase == phase else Span(self, phase)

    def stopwatch(self) -> float:
        """Now, in µs, for a call that has a time of its own within its phase."""
        return perf_counter() * 1e6

    def take(self) -> dict[str, float]:
        """The times since the last call, in µs, and start anew."""
        taken, self.us = self.us, {}
        return taken

    def leave(self) -> None:
        """No span is open now, but the time until ``resume`` counts all the same."""
        self._left = perf_counter()

    @property
    def left(self) -> bool:
        """Whether the time until ``resume`` counts."""
        return self._left is not None

    def resume(self, phase: str) -> None:
        """Add the time since ``leave``, if that was called, to a phase."""
        if self._left is not None:
            elapsed = (perf_counter() - self._left) * 1e6
            self.us[phase] = self.us.get(phase, 0.0) + elapsed
            self._left = None
