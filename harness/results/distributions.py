"""Distributions behind the figures: from the step rows to small frames, one row a strategy.

The order of the strategies is that of the steps. A *verify step* is a row that is no prefill.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.core import ROLLBACK_KINDS
from harness.results.palette import FATES, PHASES

PERCENTILES = (50, 90, 99)
"""Percentiles of single mask fills."""


def verify_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The step rows that are no prefill."""
    return steps[~steps["prefill"]]


def acceptance(steps: pd.DataFrame) -> pd.DataFrame:
    """Share of verify steps that accepted at least i drafts.

    Returns:
        ``[strategies that drafted, most drafts]``; columns are positions, 1, 2, …. A row's sum is
        the mean number of accepted drafts.
    """
    verify = verify_steps(steps)
    verify = verify[_drafted(verify)]
    deepest = int(verify["drafted"].max()) if len(verify) else 0
    reached = {
        at: (verify["accepted"] >= at).groupby(verify["strategy"], sort=False).mean()
        for at in range(1, deepest + 1)
    }
    return pd.DataFrame(reached)


def _drafted(steps: pd.DataFrame) -> pd.Series:
    """Rows of the strategies that proposed at least one draft."""
    return steps.groupby("strategy")["drafted_raw"].transform("sum") > 0


def phases(steps: pd.DataFrame) -> pd.DataFrame:
    """Time per token in milliseconds, ``[strategies, draft, verify, grammar, host]``.

    Verify steps alone: their times over the tokens that they added, forced ones included.
    """
    by_strategy = verify_steps(steps).groupby("strategy", sort=False)
    tokens = by_strategy[["emitted", "jump_tokens"]].sum().sum(axis=1)
    return by_strategy[list(PHASES)].sum().div(1e3 * tokens, axis=0)


def fates(steps: pd.DataFrame) -> pd.DataFrame:
    """Share of the drafts before trimming by fate, ``[strategies that drafted, FATES]``."""
    counts = steps.groupby("strategy", sort=False)[["drafted_raw", *FATES]].sum()
    counts = counts[counts["drafted_raw"] > 0]
    return counts[list(FATES)].div(counts["drafted_raw"], axis=0)


def depths(steps: pd.DataFrame) -> pd.DataFrame:
    """Rollbacks by strategy, kind and depth: ``strategy``, ``kind``, ``depth``, ``calls``.

    The depth is in tokens per call. Where a step rolled back several times in one way, the record
    has only their sum: each of these calls counts with their mean, rounded.
    """
    parts = []
    for kind in ROLLBACK_KINDS:
        calls = steps[f"rollback_{kind}_calls"]
        rows = steps[calls > 0]
        depth = rows[f"rollback_{kind}_tokens"] / calls[calls > 0]
        part = pd.DataFrame(
            {
                "strategy": rows["strategy"],
                "kind": kind,
                "depth": np.floor(depth + 0.5).astype("int64"),
                "calls": calls[calls > 0],
            }
        )
        parts.append(part.sort_values("depth"))
    order = {name: place for place, name in enumerate(steps["strategy"].unique())}
    every = pd.concat(parts).sort_values(
        "strategy", key=lambda names: names.map(order), kind="stable"
    )
    keys = ["strategy", "kind", "depth"]
    return every.groupby(keys, sort=False)["calls"].sum().reset_index()


def fill_percentiles(steps: pd.DataFrame) -> pd.DataFrame:
    """Percentiles of single mask fills in µs, ``[strategies that filled, PERCENTILES]``."""
    fills = steps.set_index("strategy")["fill_us"].explode().dropna().astype("float64")
    by_strategy = fills.groupby(level="strategy", sort=False)
    return pd.DataFrame({at: by_strategy.quantile(at / 100) for at in PERCENTILES})
