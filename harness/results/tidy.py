"""The numbers of a run as one tidy table: what ``report.csv`` has, one value a row.

Long, not wide, because that is what pandas groups, filters and concatenates: metrics that are
lists have one row per position, and the rows of several runs stand below each other.

    rows = pandas.read_csv("report.csv")
    speed = rows[rows.metric == "tok_s"].set_index("strategy")[["value", "lower", "upper"]]
    wide = rows[rows["at"].isna()].pivot(index="strategy", columns="metric", values="value")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from harness.results.distributions import depths, fill_percentiles
from harness.results.schema import METRICS, Metrics

COLUMNS: dict[str, str] = {
    "strategy": "strategy that ran",
    "metric": "name in summary.json; fill_us and rollback_depth_<kind> come from the steps",
    "at": "place in a metric that is a list: i of accept_hist and accept_at, percentile of "
    "fill_us, depth in tokens of rollback_depth_<kind> (whose values are calls)",
    "value": "the value; empty where there is none",
    "lower": "lower end of the 95 % interval; empty where there is none",
    "upper": "its upper end",
}
"""The columns of ``report.csv``."""


def tidy(summary: Mapping[str, Metrics], steps: pd.DataFrame) -> pd.DataFrame:
    """Every metric, fill percentile and rollback depth of a run.

    Args:
        summary: metrics by strategy name.
        steps: the step rows.

    Returns:
        One row a value, with the columns of ``COLUMNS``.
    """
    rows = [
        (strategy, *row) for strategy, metrics in summary.items() for row in _metric_rows(metrics)
    ]
    return pd.DataFrame([*rows, *_step_rows(steps)], columns=list(COLUMNS))


def _metric_rows(metrics: Metrics) -> Iterator[tuple[Any, ...]]:
    """``metric, at, value, lower, upper``; an older run may lack a metric."""
    for name in METRICS:
        if name.endswith("_ci") or name not in metrics:
            continue
        value = metrics[name]
        if isinstance(value, list):
            yield from ((name, at, each, None, None) for at, each in enumerate(value))
        else:
            yield (name, None, value, *(metrics.get(f"{name}_ci") or (None, None)))


def _step_rows(steps: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    for strategy, percentiles in fill_percentiles(steps).iterrows():
        for at, value in percentiles.items():
            yield strategy, "fill_us", at, value, None, None
    for strategy, kind, depth, calls in depths(steps).itertuples(index=False):
        yield strategy, f"rollback_depth_{kind}", depth, calls, None, None
