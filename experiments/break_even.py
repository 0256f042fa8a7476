"""Which strategy is fastest where: a map over the draft's price and the grammar's.

    python -m experiments.break_even RUN y=sync_us values=0,20,50,100,200 pair=70b-8b batch=8

Each cell predicts the run (``harness.results.whatif``) with draft forwards of ``ratio`` times the
target's and ``y`` (``mask_us``, ``sync_us`` or any other cost) at that value. Then, by ratio, the
round trip below which guided drafting beats each other strategy. Further settings: ``ratios``,
``out`` (a file for both tables as Markdown), and all of ``whatif``'s.
The calculation, and its formula: ``harness.results.break_even``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.errors import ConfigError, exit_status, writing
from harness.results.answer import CEILING
from harness.results.break_even import break_even_limits, fastest, speeds
from harness.results.costs import GUIDED, Costs
from harness.results.table import Table, print_tables, to_markdown
from harness.results.whatif import assumptions, number, question, read_arguments, stepped

DEFAULTS = {
    "y": "sync_us",
    "values": "0,10,20,50,100,200,500",
    "ratios": "0.02,0.05,0.1,0.15,0.2,0.3,0.5",
    "out": "",
}


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
    limits = break_even_limits(steps, costs, ratios, copies)
    return Table(
        f"{GUIDED} pays below",
        ("against", *(f"{ratio:g}" for ratio in ratios)),
        ("the other strategy", *("sync_us, µs" for _ in ratios)),
        tuple(
            (str(free), *(f"{limit:.0f}" if limit > 0 else "–" for limit in row))
            for free, row in limits.iterrows()
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
    asked, name = question(own, steps, prompt_tokens, stepped(folder)), settings["y"]
    if not isinstance(getattr(asked.costs, name, None), float):
        raise ConfigError(f"y: {name!r} is no cost in µs; sync_us and mask_us are")
    ratios, values = (
        list(dict.fromkeys(number(key, word) for word in settings[key].split(",")))
        for key in ("ratios", "values")
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
    if out := settings["out"]:
        with writing(f"out: {out}", "name another file"):
            Path(out).write_text("\n".join(map(to_markdown, tables)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
