"""The figures of a sweep as small tables: one a number, strategies down, one setting across."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized

import pandas as pd

from harness.results.repeats import TOGETHER, together
from harness.results.schema import Metrics
from harness.results.side_by_side import DIFFERS, REPEAT, SHOWN, Runs, shown
from harness.results.table import NONE, Table


def pivots(runs: Runs, differing: pd.DataFrame) -> list[Table]:
    """A table for each number that is set side by side: its values over one setting.

    That setting is the one with most values, the first of several; the others stand in the rows,
    before the strategy. Settings that only vary along with another one are left out. Repeats share
    a cell (``repeats.together``); where nothing else differs, one table has all numbers.

    Args:
        runs: at least one.
        differing: ``[runs, settings]``, from ``differences``.

    Returns:
        Nothing where no setting differs and nothing is repeated, or where two runs of a strategy
        differ in no setting but in the commit: they are no repeats.
    """
    swept = independent(differing.drop(columns=REPEAT, errors="ignore"))
    cells = _cells(runs, swept)
    if any(len({commit for commit, _ in repeats}) > 1 for repeats in cells.values()):
        return []
    repeated = _how_many([*cells.values()])
    if swept.empty and not repeated:
        return []
    docs: Mapping[str, str] = {}
    rows: list[tuple[str, ...]] = []
    for (*setting, strategy), repeats in cells.items():
        docs, (row,) = shown({strategy: together([metrics for _, metrics in repeats])})
        rows.append((*setting, *row))
    docs = {**docs, **dict.fromkeys(swept.columns, DIFFERS)}
    if repeated:
        docs |= {number: f"{docs[number]}; {TOGETHER}" for number in SHOWN}
    names = [*swept.columns, "strategy", *SHOWN]
    if swept.empty:
        title = repeated.capitalize()
        return [Table(title, tuple(names), tuple(docs[name] for name in names), tuple(rows))]
    across = str(swept.nunique().idxmax())
    down = [*swept.columns.drop(across), "strategy"]
    frame = pd.DataFrame(rows, columns=names)
    for name in (*down, across):
        frame[name] = pd.Categorical(frame[name], in_order(frame[name]))
    return [
        _table(
            f"{number} over {across}{repeated and f', {repeated}'}",
            docs,
            number,
            frame.pivot(index=down, columns=across, values=number).fillna(NONE),
        )
        for number in SHOWN
    ]


def _cells(runs: Runs, swept: pd.DataFrame) -> dict[tuple[str, ...], list[tuple[str, Metrics]]]:
    """By settings and strategy, commit and metrics of all runs that have them."""
    cells: dict[tuple[str, ...], list[tuple[str, Metrics]]] = {}
    for name, run in runs.items():
        commit = str(run.manifest().get("git"))
        for strategy, metrics in run.strategies().items():
            cells.setdefault((*swept.loc[name], strategy), []).append((commit, metrics))
    return cells


def _how_many(cells: Sequence[Sized]) -> str:
    """How many repeats a cell is the median of, for a title; empty where none has several. They
    are not alike where some jobs of a sweep are not finished, or strategies were left out."""
    least, most = min(map(len, cells), default=0), max(map(len, cells), default=0)
    if most <= 1:
        return ""
    return f"median of {most if least == most else f'{least} to {most}'} repeats"


def _table(title: str, docs: Mapping[str, str], number: str, values: pd.DataFrame) -> Table:
    """One number: ``[rows, values of the setting]``."""
    down, across = map(str, values.index.names), values.columns.name
    headers = [*down, *map(str, values.columns)]
    return Table(
        title,
        tuple(headers),
        tuple(docs.get(name, f"{docs[number]}; with {across} = {name}") for name in headers),
        tuple(tuple(map(str, row)) for row in values.reset_index().itertuples(index=False)),
    )


def independent(differing: pd.DataFrame) -> pd.DataFrame:
    """The settings but for those that divide the runs just as an earlier one does: a workload
    brings its own lengths, a machine its own versions."""
    return differing.loc[:, ~differing.apply(lambda values: pd.factorize(values)[0]).T.duplicated()]


def in_order(values: Iterable[str]) -> list[str]:
    """Each value once: numbers by size, anything else as it comes."""
    unique = [*dict.fromkeys(values)]
    try:
        return sorted(unique, key=float)
    except ValueError:
        return unique
