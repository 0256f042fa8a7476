"""Which strategy is fastest where: a map over the draft's price and the grammar's.

    python -m experiments.break_even RUN y=sync_us values=0,20,50,100,200 pair=70b-8b batch=8

Each cell predicts the run (``harness.results.whatif``) with draft forwards of ``ratio`` times the
target's and ``y`` (``mask_us``, ``sync_us`` or any other cost) at that value. Then, by ratio, the
round trip below which guided drafting beats each other strategy. Further settings: ``ratios``,
``out`` (a file for both tables as Markdown), and all of ``whatif``'s.

With E tokens, n round trips of s µs, and A all other time, guided drafting (g) beats free drafting
(f) when E_g / (A_g + n_g s) > E_f / (A_f + n_f s). A does not depend on s, so that is

    s < (E_g A_f - E_f A_g) / (E_f n_g - E_g n_f)    where E_f n_g > E_g n_f.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import ConfigError, exit_status
from harness.results.costs import GUIDED, Costs
from harness.results.predict import predict
from harness.results.table import Table, print_tables, to_markdown
from harness.results.whatif import assumptions, number, question, read_arguments

DEFAULTS = {
    "y": "sync_us",
    "values": "0,10,20,50,100,200,500",
    "ratios": "0.02,0.05,0.1,0.15,0.2,0.3,0.5",
    "out": "",
}
CEILING = "unguided"
"""Ignores the grammar: fast, and no answer."""


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
    other_us = 1e6 * tokens / predicted["tok_s"] - trips * costs.sync_us
    lead = tokens[guided] * other_us[free] - tokens[free] * other_us[guided]
    more_trips = tokens[free] * trips[guided] - tokens[guided] * trips[free]
    return float(lead / more_trips) if more_trips > 0 else math.inf


def map_table(cells: pd.DataFrame, name: str) -> Table:
    """The fastest strategy by ``name`` and ratio."""
    winners = fastest(cells, name)
    return Table(
        "Fastest by draft/target",
        (name, *(f"{ratio:g}" for ratio in winners.columns)),
        (f"{name}, µs", *("the fastest at this ratio" for _ in winners.columns)),
        tuple(
            (f"{value:g}", *map(str, row))
            for value, row in zip(winners.index, winners.to_numpy(), strict=True)
        ),
    )


def inequality_table(
    steps: pd.DataFrame, costs: Costs, ratios: Sequence[float], copies: float
) -> Table:
    """By strategy and ratio, the round trip below which guided drafting beats it; – = never."""
    predictions = {r: predict(steps, with_ratio(costs, r), copies) for r in ratios}
    others = [str(name) for name in steps["strategy"].unique() if name not in (GUIDED, CEILING)]
    bounds = {
        free: [
            break_even_sync_us(each, with_ratio(costs, ratio), GUIDED, free)
            for ratio, each in predictions.items()
        ]
        for free in others
    }
    return Table(
        f"{GUIDED} pays below",
        ("against", *(f"{ratio:g}" for ratio in ratios)),
        ("the other strategy", *("sync_us, µs" for _ in ratios)),
        tuple(
            (free, *(f"{bound:.0f}" if bound > 0 else "–" for bound in row))
            for free, row in bounds.items()
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, 2 for what the user can correct."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: _map(words))


def _map(words: Sequence[str]) -> int:
    folder, given = read_arguments(words)
    settings = DEFAULTS | given
    steps, prompt_tokens = folder.steps(), float(folder.requests()["prompt_tokens"].mean())
    own = {name: text for name, text in settings.items() if name not in DEFAULTS}
    asked, name = question(own, steps, prompt_tokens), settings["y"]
    if not isinstance(getattr(asked.costs, name, None), float):
        raise ConfigError(f"y: {name!r} is no cost in µs; sync_us and mask_us are")
    ratios, values = (
        [number(key, word) for word in settings[key].split(",")] for key in ("ratios", "values")
    )
    constrained = steps[steps["strategy"] != CEILING]
    cells = speeds(constrained, asked.costs, ratios, name, values, asked.copies)
    tables = [map_table(cells, name)]
    if GUIDED in set(steps["strategy"]):
        tables.append(inequality_table(constrained, asked.costs, ratios, asked.copies))
    for line in assumptions(asked, own.get("pair"), prompt_tokens):
        print(f"- {line}")
    print(f"- across: draft / target forward; down: {name}, then the sync_us below which")
    print(f"  {GUIDED} beats a strategy (– = never)\n")
    print_tables(tables)
    if settings["out"]:
        Path(settings["out"]).write_text("\n".join(map(to_markdown, tables)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
