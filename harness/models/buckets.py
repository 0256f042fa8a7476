"""Which static shape a forward is run in, so that few CUDA graphs serve all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.models.language_model import RowInput
from harness.models.ragged_cache import padded_cells

SHORTEST_SPAN = 512
"""Cells that the smallest graph attends to; below, a longer span costs next to nothing."""
NARROWEST_PREFILL = 128
WIDE = 16
"""Widest decode step that is not run as a prefill: one that also feeds the tokens of a jump."""
ROW_STEP = 8
"""Each number of rows is that many times the one before. A decode step waits for launches and
memory, not for arithmetic: idle rows cost little, captured shapes time and memory."""


class Bucket(NamedTuple):
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

    def choose(self, inputs: Sequence[RowInput], ahead: int = 0) -> Bucket | None:
        """The bucket of a forward; None for trees, which run as they are.

        Args:
            inputs: what is fed.
            ahead: tokens that further forwards over the same span add to each row.
        """
        width = kept = end = slot = 0
        for row in inputs:
            if row.parents is not None:
                return None
            tokens = len(row.tokens)
            width, kept = max(width, tokens), max(kept, row.logits)
            end, slot = max(end, row.start + tokens), max(slot, row.slot)
        end += ahead
        if width <= max(self.decode_width, WIDE) and kept <= self.decode_width:
            rows = self._rows(slot + 1)
            width = self._decode_width(width)
            kept = min(width, self.decode_width)
            return Bucket(rows, width, self.span(end), kept, gathered=False)
        width = min(_power_of_two(max(width, NARROWEST_PREFILL)), self.max_length)
        kept = 1 if kept == 1 else self.decode_width
        rows = min(_power_of_two(len(inputs)), self.slots)
        return Bucket(rows, width, self.span(end), kept, gathered=True)

    def span(self, end: int) -> int:
        """Cells to attend to where the longest row ends at ``end``."""
        return min(_power_of_two(max(end, SHORTEST_SPAN)), padded_cells(self.max_length))

    def _rows(self, count: int) -> int:
        rows = 1
        while rows < count:
            rows *= ROW_STEP
        return min(rows, self.slots)

    def _decode_width(self, width: int) -> int:
        """1 for plain steps, 2 for a draft's first one, else all drafts and one more, or wide."""
        if width <= 2:
            return width
        return self.decode_width if width <= self.decode_width else WIDE


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
