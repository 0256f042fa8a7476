"""Repeats: runs that differ in nothing, or in ``repeat`` alone.

An interval over the requests of one run knows how much the requests differ, but not what the
machine was busy with while a strategy had its turn. Only another run tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from harness.results.schema import METRICS, Metrics

TOGETHER = "median of the repeats; an interval reaches from the lowest end to the highest"


def together(repeats: Sequence[Metrics]) -> dict[str, Any]:
    """The metrics of one strategy over repeats: of each number the median, of positions and
    histograms place by place; an interval reaches as far as any of theirs. What a strategy counts
    as its engine would (``own``) is left out.

    Args:
        repeats: at least one; what is None in one, or what an older one lacks, is taken from the
            others.
    """
    return {
        name: _together(name, [each[name] for each in repeats if each.get(name) is not None])
        for name in METRICS
    }


def _together(name: str, values: Sequence[Any]) -> Any:
    if not values:
        return None
    if name.endswith("_ci"):
        lows, highs = zip(*values, strict=True)
        return [min(lows), max(highs)]
    if isinstance(values[0], list):
        return [_median(column) for column in zip_longest(*values, fillvalue=0)]
    return _median(values)


def _median(values: Sequence[Any]) -> Any:
    """The median; of counts a count."""
    middle = median(values)
    return round(middle) if all(isinstance(value, int) for value in values) else middle
