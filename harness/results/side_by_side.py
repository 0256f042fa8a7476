"""Several runs side by side: one row per run and strategy, with the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from harness.results.manifest import flat
from harness.results.record import RunFolder
from harness.results.schema import Metrics
from harness.results.sections import describe_hardware, legend
from harness.results.table import NONE, Table, comparison_tables
from harness.results.tidy import tidy

SHOWN = (
    "tok/s",
    "tok/s to plain",
    "accept rate",
    "mean accepted length",
    "grammar µs",
    "exposed µs",
    "rolled back",
    "valid",
    "identical",
)
"""Columns of the comparison tables that are set side by side."""

DIFFERS = "setting that differs between the runs"

REPEAT = "repeat"
"""The setting that tells repeats apart, and means nothing else."""

_NO_SETTING = {"name", "runs", "strategy", "compare", "pair.dtype", "pair.device"}
"""Parts of a config that are names and places, or stand in the manifest as what they came to."""

Runs = Mapping[str, RunFolder]
"""Run folders by label."""


def labelled(folders: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Each run by its folder's name; a second one of a name is ``name (2)``."""
    runs: dict[str, RunFolder] = {}
    for folder in folders:
        name = folder.path.resolve().name
        taken = sum(each.path.resolve().name == name for each in runs.values())
        runs[f"{name} ({taken + 1})" if taken else name] = folder
    return runs


def settings(folder: RunFolder) -> dict[str, str]:
    """What a run was made with, flat: machine, versions, resolved device and dtype, config."""
    manifest = folder.manifest()
    config: Any = OmegaConf.to_container(folder.config())
    setup = manifest.get("setup", {})
    return {
        "machine": describe_hardware(manifest["hardware"]),
        **{name: str(setup[name]) for name in ("device", "dtype") if name in setup},
        **{name: _shown(each) for name, each in flat(config).items() if name not in _NO_SETTING},
        **{name: value for name, value in manifest["versions"].items() if value},
    }


def _shown(value: Any) -> str:
    return NONE if value is None else str(value)


def differences(runs: Runs) -> pd.DataFrame:
    """The settings that are not the same in all runs.

    A setting that some runs do not have (they are older, or ran without it) differs only if those
    that have it disagree.

    Returns:
        Text, ``[runs, settings]``.
    """
    frame = pd.DataFrame.from_dict({name: settings(run) for name, run in runs.items()}, "index")
    return frame.loc[:, frame.nunique() > 1].fillna(NONE)


def settings_table(differing: pd.DataFrame) -> Table:
    """One row per run: the frame of ``differences``."""
    return Table(
        "What differs",
        ("run", *differing.columns),
        ("folder of the run", *(DIFFERS for _ in differing.columns)),
        tuple((str(name), *row) for name, *row in differing.itertuples()),
    )


def side_by_side(runs: Runs, differing: pd.DataFrame) -> Table:
    """One row per run and strategy: settings that differ between the runs, then the main numbers.

    Args:
        runs: at least one.
        differing: ``[runs, settings]``, from ``differences``; the columns to show.
    """
    docs: Mapping[str, str] = {}
    rows: list[tuple[str, ...]] = []
    for name, run in runs.items():
        docs, numbers = shown(run.strategies())
        rows += [(name, *differing.loc[name], *row) for row in numbers]
    return Table(
        "Side by side",
        ("run", *differing.columns, "strategy", *SHOWN),
        (
            "folder of the run",
            *(DIFFERS for _ in differing.columns),
            *(docs[header] for header in ("strategy", *SHOWN)),
        ),
        tuple(rows),
    )


def shown(summary: Mapping[str, Metrics]) -> tuple[Mapping[str, str], list[tuple[str, ...]]]:
    """What every column of ``SHOWN`` means, and a row of its strategy and these for each."""
    tables = comparison_tables(summary)
    columns = {
        header: cells
        for table in tables
        for header, *cells in zip(table.headers, *table.rows, strict=True)
    }
    rows = zip(columns["strategy"], *(columns[header] for header in SHOWN), strict=True)
    return legend(tables), list(rows)


def tidy_runs(runs: Runs) -> pd.DataFrame:
    """``tidy`` of every run below each other, behind the columns ``run`` and what differs."""
    differing = differences(runs)
    parts = []
    for name, run in runs.items():
        part = tidy(run.strategies(), run.steps())
        for place, (setting, value) in enumerate({"run": name, **differing.loc[name]}.items()):
            part.insert(place, setting, value)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)
