"""Which static shape a forward is run in, so that few CUDA graphs serve all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.models.language_model import RowInput

SHORTEST_SPAN = 512
"""Cells that the smallest graph attends to; below, a longer span costs next to nothing."""
NARROWEST_PREFILL = 128


@dataclass(frozen=True, slots=True)
class Bucket:
    """A static shape.

    Attributes:
        rows: batch rows.
        width: tokens per row.
        span: cache cells that are attended to.
        kept: trailing columns with logits.
        gathered: batch rows are any cache rows, which are copied together; else batch row b is
            cache row b, which is read in place.
    """

    rows: int
    width: int
    span: int
    kept: int
    gathered: bool


class Buckets:
    """Rounds forwards up to shapes: few enough to capture, close enough to waste little.

    Args:
        slots: cache rows.
        max_length: cells per cache row.
        decode_width: most tokens that a decode step feeds per row: drafts + 1.
    """

    def __init__(self, slots: int, max_length: int, decode_width: int) -> None:
        self.slots, self.max_length, self.decode_width = slots, max_length, decode_width

    def choose(self, inputs: Sequence[RowInput]) -> Bucket | None:
        """The bucket of a forward; None for trees, which run as they are."""
        if any(row.parents is not None for row in inputs):
            return None
        width = max(len(row.tokens) for row in inputs)
        kept = max(row.logits for row in inputs)
        end = max(row.start + len(row.tokens) for row in inputs)
        if width <= self.decode_width:
            rows = self._rows(max(row.slot for row in inputs) + 1)
            width = self._decode_width(width)
            return Bucket(rows, width, self.span(end), width, gathered=False)
        width = min(_power_of_two(max(width, NARROWEST_PREFILL)), self.max_length)
        kept = 1 if kept == 1 else self.decode_width
        return Bucket(self._rows(len(inputs)), width, self.span(end), kept, gathered=True)

    def span(self, end: int) -> int:
        """Cells to attend to where the longest row ends at ``end``."""
        return min(_power_of_two(max(end, SHORTEST_SPAN)), self.max_length)

    def _rows(self, count: int) -> int:
        return min(_power_of_two(count), self.slots)

    def _decode_width(self, width: int) -> int:
        """1 for plain steps, 2 for a draft's first one, else all drafts and one more."""
        return width if width <= 2 else self.decode_width


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
