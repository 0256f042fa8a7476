"""The figures of a sweep as small tables: one a number, strategies down, one setting across."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.results.side_by_side import SHOWN, Runs, side_by_side
from harness.results.table import NONE, Table


def pivots(runs: Runs, differing: pd.DataFrame) -> list[Table]:
    """A table for each number that is set side by side: its values over one setting.

    That setting is the one with most values, the first of several; the others stand in the rows,
    before the strategy. Settings that only vary along with another one are left out.

    Args:
        runs: at least one.
        differing: ``[runs, settings]``, from ``differences``.

    Returns:
        Nothing where no setting differs, or where two runs of a strategy differ in none: which of
        the two is to stand in the cell?
    """
    swept = independent(differing)
    if swept.empty:
        return []
    across = str(swept.nunique().idxmax())
    down = [*swept.columns.drop(across), "strategy"]
    whole = side_by_side(runs, swept)
    cells = pd.DataFrame(whole.rows, columns=whole.headers)
    if cells.duplicated([*down, across]).any():
        return []
    for name in (*down, across):
        cells[name] = pd.Categorical(cells[name], in_order(cells[name]))
    docs = dict(zip(whole.headers, whole.docs, strict=True))
    return [
        _table(number, docs, cells.pivot(index=down, columns=across, values=number).fillna(NONE))
        for number in SHOWN
    ]


def _table(number: str, docs: dict[str, str], values: pd.DataFrame) -> Table:
    """One number: ``[rows, values of the setting]``."""
    down, across = map(str, values.index.names), values.columns.name
    headers = [*down, *map(str, values.columns)]
    return Table(
        f"{number} over {across}",
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
