"""The parts of a report that are no comparison table, as text for Markdown and for a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.core import Finish
from harness.results.distributions import PERCENTILES, depths, fill_percentiles
from harness.results.metrics import NEAR_TIE
from harness.results.table import Table

LISTED = 20
"""Divergences that are listed by strategy and kind; ``requests.parquet`` has all."""

IN_BRACKETS = "In brackets plain's logit lead there; inf: its grammar allowed no second token."
"""How the lines of ``divergences`` are read."""


def facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What ran, where, with which versions and by which command."""
    versions = ", ".join(
        f"{package} {version}" for package, version in manifest["versions"].items() if version
    )
    git = manifest["git"]
    commit = git["commit"] or "none (not a checkout)"
    setup = ", ".join(f"{name} {value}" for name, value in manifest.get("setup", {}).items())
    return {
        **({"Setup": setup} if setup else {}),
        "Hardware": describe_hardware(manifest["hardware"]),
        "Versions": versions,
        "Command": shlex.join(manifest["command"]),
        "Date": manifest["date"],
        "Commit": f"{commit}{', with uncommitted changes' if git['dirty'] else ''}",
    }


def describe_hardware(hardware: Mapping[str, Any]) -> str:
    """One line: processor, cores, memory, and the GPUs with their driver."""
    line = f"{hardware['cpu']}, {hardware['cores']} cores"
    if hardware["memory_gib"] is not None:
        line += f", {hardware['memory_gib']} GiB"
    gpu = hardware["gpu"]
    return (
        line if gpu is None else f"{line}; {gpu['count']} × {gpu['name']}, driver {gpu['driver']}"
    )


def step_tables(steps: pd.DataFrame) -> list[Table]:
    """Distributions over steps: fill times by strategy, rollback depths by strategy and kind."""
    return [_fill_table(steps), _depth_table(steps)]


def _fill_table(steps: pd.DataFrame) -> Table:
    percentiles = fill_percentiles(steps)
    fills = steps.groupby("strategy")["mask_rows"].sum()
    return Table(
        "Fill times",
        ("strategy", "fills", *(f"p{at} µs" for at in PERCENTILES)),
        (
            "strategy that ran",
            "mask rows filled, by drafting and verification",
            *(f"{at}th percentile of single mask fills (µs)" for at in PERCENTILES),
        ),
        tuple(
            (str(name), str(fills[name]), *(f"{value:.1f}" for value in row))
            for name, row in zip(percentiles.index, percentiles.to_numpy(), strict=True)
        ),
    )


def _depth_table(steps: pd.DataFrame) -> Table:
    rows: list[tuple[str, ...]] = []
    for (strategy, kind), group in depths(steps).groupby(["strategy", "kind"], sort=False):
        calls = group["calls"].sum()
        mean = (group["depth"] * group["calls"]).sum() / calls
        rows.append(
            (str(strategy), str(kind), str(calls), f"{mean:.2f}", str(group["depth"].max()))
        )
    return Table(
        "Rollback depth",
        ("strategy", "kind", "rollbacks", "mean depth", "deepest"),
        (
            "strategy that ran",
            "why it rolled back",
            "calls",
            "tokens per call",
            "tokens of the deepest call",
        ),
        tuple(rows),
    )


def legend(tables: Sequence[Table]) -> dict[str, str]:
    """Every column of the tables, with its unit."""
    return {
        header: doc
        for table in tables
        for header, doc in zip(table.headers, table.docs, strict=True)
    }


def failures(requests: pd.DataFrame) -> list[str]:
    """One line for each failed request: why it failed."""
    failed = requests[requests["finish"] == Finish.FAILED.value]
    return [
        f"{strategy}, request {request}: {' '.join(error.split())}"
        for strategy, request, error in zip(
            failed["strategy"], failed["request"], failed["error"], strict=True
        )
    ]


def divergences(requests: pd.DataFrame) -> dict[str, list[str]]:
    """Outputs that differ from plain's: near ties apart from the real ones.

    At a near tie plain's logit lead is below ``NEAR_TIE``: another width of the forward may
    flip it. Everything else is real, also what has no gap (sampling, an output cut short).
    """
    diverged = requests[requests["first_divergence"] >= 0]
    near = diverged["divergence_gap"] < NEAR_TIE
    return {
        f"Near ties (plain's logit lead below {NEAR_TIE:g})": [*_places(diverged[near])],
        "Real ones": [*_places(diverged[~near])],
    }


def _places(diverged: pd.DataFrame) -> Iterator[str]:
    """One line by strategy: ``request@index (gap)``, the first ``LISTED`` of them."""
    for strategy, rows in diverged.groupby("strategy", sort=False):
        listed = rows.head(LISTED)
        places = [
            f"{request}@{index}" + ("" if pd.isna(gap) else f" ({gap:.2g})")
            for request, index, gap in zip(
                listed["request"],
                listed["first_divergence"],
                listed["divergence_gap"],
                strict=True,
            )
        ]
        more = f", and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
        yield f"{strategy}, {len(rows)}: {', '.join(places)}{more}"
