"""The one place where time is read."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter
from types import TracebackType

import torch


class Span:
    """One timed stretch of a phase; ``us`` is its whole duration once it has ended."""

    __slots__ = ("_clock", "_mark", "_start", "phase", "us")

    def __init__(self, clock: Clock, phase: str) -> None:
        self._clock, self.phase = clock, phase
        self._mark: torch.profiler.record_function | None = None
        self.us = 0.0

    def __enter__(self) -> Span:
        if self._clock.annotate:
            self._mark = torch.profiler.record_function(self.phase)
            self._mark.__enter__()  # type: ignore[no-untyped-call]
        self._clock._open()
        self._start = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.us = (perf_counter() - self._start) * 1e6
        self._clock._close(self.phase, self.us)
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
    """

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.annotate = False
        self._inner = [0.0]
        self._thread = get_ident()

    def span(self, phase: str) -> Span:
        """A context manager that times its body."""
        return Span(self, phase)

    def take(self) -> dict[str, float]:
        """The times since the last call, in µs, and start anew."""
        taken, self.us = self.us, {}
        return taken

    def _open(self) -> None:
        if get_ident() == self._thread:
            self._inner.append(0.0)

    def _close(self, phase: str, elapsed: float) -> None:
        if get_ident() == self._thread:
            inside = self._inner.pop()
            self._inner[-1] += elapsed
            self.us[phase] = self.us.get(phase, 0.0) + elapsed - inside
