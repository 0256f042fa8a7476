"""The one place where time is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Span:
    """One timed stretch; ``us`` is its whole duration once it has ended."""

    us = 0.0


class Clock:
    """Exclusive time per phase: an inner span's time is taken out of the outer one's.

    ``with clock.span("draft"): ...`` adds to ``clock.us["draft"]``. Spans nest.
    """

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self._inner = [0.0]

    @contextmanager
    def span(self, phase: str) -> Iterator[Span]:
        span = Span()
        self._inner.append(0.0)
        start = perf_counter()
        try:
            yield span
        finally:
            span.us = elapsed = (perf_counter() - start) * 1e6
            inside = self._inner.pop()
            self._inner[-1] += elapsed
            self.us[phase] = self.us.get(phase, 0.0) + elapsed - inside

    def take(self) -> dict[str, float]:
        """The times since the last call, in µs, and start anew."""
        taken, self.us = self.us, {}
        return taken
