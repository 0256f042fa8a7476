"""Where guided drafting pays: speeds over a range of costs, and the round trips that it bears.

With E tokens, n round trips of s µs, and A all other time, guided drafting (g) beats free drafting
(f) when E_g / (A_g + n_g s) > E_f / (A_f + n_f s). A does not depend on s, so that is

    s < (E_g A_f - E_f A_g) / (E_f n_g - E_g n_f)    where E_f n_g > E_g n_f.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from harness.results.answer import CEILING
from harness.results.costs import GUIDED, Costs
from harness.results.predict import predict


class Spot(NamedTuple):
    """A point of the map: draft forward / target forward, and the round trip in µs."""

    ratio: float
    sync_us: float


def spot_of(costs: Costs) -> Spot:
    """Where costs sit on the map."""
    return Spot(costs.draft_us / costs.plain_us, costs.sync_us)


def with_ratio(costs: Costs, ratio: float) -> Costs:
    """Draft forwards, prefill included, at ``ratio`` times the target's."""
    draft_us = ratio * costs.plain_us
    return replace(
        costs,
        draft_us=draft_us,
        chain_us=costs.draft_tokens * draft_us,
        draft_row_us=0.0,
        draft_prefill_us=ratio * costs.prefill_us,
    )


def speeds(
    steps: pd.DataFrame,
    costs: Costs,
    ratios: Sequence[float],
    name: str,
    values: Sequence[float],
    copies: float = 1.0,
) -> pd.DataFrame:
    """Predicted tok_s of every cell.

    Args:
        steps: step rows of one run.
        costs: all but the draft's and ``name``'s are kept.
        ratios: draft forward / target forward, one row each.
        name: the cost that is swept.
        values: its values.
        copies: see ``predict``.

    Returns:
        Columns ``ratio``, ``name``, and one per strategy.
    """
    cells = []
    for value in values:
        for ratio in ratios:
            cost: dict[str, Any] = {name: value}
            priced = with_ratio(replace(costs, **cost), ratio)
            cells.append({"ratio": ratio, name: value, **predict(steps, priced, copies)["tok_s"]})
    return pd.DataFrame(cells)


def fastest(cells: pd.DataFrame, name: str) -> pd.DataFrame:
    """The fastest strategy: rows are values of ``name``, columns ratios."""
    strategies = cells.drop(columns=["ratio", name])
    return cells.assign(fastest=strategies.idxmax(axis=1)).pivot(
        index=name, columns="ratio", values="fastest"
    )


def break_even_sync_us(predicted: pd.DataFrame, costs: Costs, guided: str, free: str) -> float:
    """The round trip below which ``guided`` beats ``free``, µs; see the file's formula.

    Args:
        predicted: from ``predict`` with ``costs``.
        costs: their ``sync_us`` does not matter.
        guided: the strategy with more round trips per token.
        free: the other one.

    Returns:
        At most 0 where guided drafting never pays; infinite where it makes no more round trips
        per token, and so no round trip is too long.
    """
    tokens, trips = predicted["tokens"], predicted["round_trips"]
    other_us = _other_us(predicted, costs)
    lead = tokens[guided] * other_us[free] - tokens[free] * other_us[guided]
    more_trips = tokens[free] * trips[guided] - tokens[guided] * trips[free]
    return float(lead / more_trips) if more_trips > 0 else math.inf


def _other_us(predicted: pd.DataFrame, costs: Costs) -> pd.Series:
    """By strategy, all time but the round trips', µs."""
    total_us = 1e6 * predicted["tokens"] / predicted["tok_s"]
    return total_us - predicted["round_trips"] * costs.sync_us


def break_even_limits(
    steps: pd.DataFrame, costs: Costs, ratios: Sequence[float], copies: float = 1.0
) -> pd.DataFrame:
    """The longest round trip with which guided drafting still pays.

    Args:
        steps: step rows of one run that has ``GUIDED``.
        costs: all but the draft's are kept; their ``sync_us`` does not matter.
        ratios: draft forward / target forward.
        copies: see ``predict``.

    Returns:
        ``break_even_sync_us`` against each other strategy (rows) at each ratio (columns), µs.
        ``CEILING`` is left out.
    """
    others = [str(name) for name in steps["strategy"].unique() if name not in (GUIDED, CEILING)]
    limits = {}
    for ratio in ratios:
        priced = with_ratio(costs, ratio)
        predicted = predict(steps, priced, copies)
        limits[ratio] = [break_even_sync_us(predicted, priced, GUIDED, free) for free in others]
    return pd.DataFrame(limits, index=pd.Index(others, name="against"))


def fastest_by_round_trip(
    steps: pd.DataFrame,
    costs: Costs,
    ratios: Sequence[float],
    round_trips_us: Sequence[float],
    copies: float = 1.0,
) -> pd.DataFrame:
    """The map of ``fastest`` over ``sync_us``, fine-grained: one prediction for each ratio.

    Args:
        steps: step rows of one run.
        costs: all but the draft's and ``sync_us`` are kept.
        ratios: draft forward / target forward.
        round_trips_us: values of ``sync_us``.
        copies: see ``predict``.

    Returns:
        Names; rows are round trips, columns ratios. ``CEILING`` is left out.
    """
    constrained = steps[steps["strategy"] != CEILING]
    winners = {}
    for ratio in ratios:
        priced = with_ratio(costs, ratio)
        predicted = predict(constrained, priced, copies)
        other_us, trips = _other_us(predicted, priced), predicted["round_trips"]
        winners[ratio] = [
            str((predicted["tokens"] / (other_us + trips * us)).idxmax()) for us in round_trips_us
        ]
    return pd.DataFrame(winners, index=pd.Index(round_trips_us, name="sync_us"))


def verdict(limits: pd.DataFrame, spot: Spot) -> str:
    """Whether guided drafting pays at a spot, in one line.

    Args:
        limits: from ``break_even_limits``; ``spot.ratio`` is one of its columns.
        spot: a pair's.
    """
    against = limits[spot.ratio]
    limit = against.min()
    if limit <= 0:
        return f"Guided drafting cannot beat {against.idxmin()} here, whatever the round trip"
    word = "pays" if spot.sync_us < limit else "does not pay"
    times = f"a round trip takes {spot.sync_us:.0f} µs, the limit is {limit:.0f}"
    return f"Guided drafting {word}: {times}"


def pays_when(limits: pd.DataFrame) -> str:
    """The rule that can be read off a map, as a sentence; ``limits`` from ``break_even_limits``."""
    lowest = limits.min()
    paying = lowest[lowest > 0]
    if paying.empty:
        return "Guided drafting pays nowhere on this map."
    return (
        f"Guided drafting pays when a draft forward takes between {paying.index.min():.2f} and "
        f"{paying.index.max():.2f} of a target forward, and a round trip less than the limit at "
        f"that price: {paying.max():.0f} µs at {paying.idxmax():.2f}, where it bears most."
    )


def positions(cases: Mapping[str, tuple[pd.DataFrame, Costs, float]]) -> pd.DataFrame:
    """Where several settings sit, and what decides there.

    Args:
        cases: by name, step rows, costs, and copies as for ``predict``.

    Returns:
        A row for each: the ratio and round trip of its spot, the limit there in µs, the strategy
        that sets it, and whether guided drafting pays.
    """
    rows = {}
    for name, (steps, costs, copies) in cases.items():
        spot = spot_of(costs)
        against = break_even_limits(steps, costs, [spot.ratio], copies)[spot.ratio]
        rows[name] = {
            "draft / target": round(spot.ratio, 3),
            "round trip, µs": round(spot.sync_us, 1),
            "limit, µs": round(against.min(), 1),
            "set by": against.idxmin(),
            "pays": bool(spot.sync_us < against.min()),
        }
    return pd.DataFrame.from_dict(rows, orient="index")
