"""The rows of all finished jobs as one data set, partitioned by job.

    requests = pandas.read_parquet("runs/2026-11-30-paper/requests")
    requests.groupby(["override.grammar", "strategy"]).output_tokens.sum()

Behind the columns of a run stand ``job``, its number, and for each override that is not the same
in all jobs a column ``override.NAME``: a number or a truth value where all are of one such type,
text otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import ConfigError
from harness.results.schema import request_schema, step_schema
from harness.sweep.folder import Job, SweepFolder

TABLES = {"requests": request_schema, "steps": step_schema}
OVERRIDE = "override."


def collect(sweep: SweepFolder) -> None:
    """Write ``requests/`` and ``steps/`` anew: what an earlier attempt left in them goes.

    Raises:
        ConfigError: they cannot be written.
    """
    columns = differing(sweep.jobs)
    try:
        for table in TABLES:
            _collect(sweep, table, columns)
    except OSError as error:
        raise ConfigError(
            f"{sweep.path}: the rows of its jobs cannot be put together "
            f"({error.strerror or error}); make room, then "
            f"`python -m harness.sweep resume {sweep.path}`"
        ) from None


def _collect(sweep: SweepFolder, table: str, columns: pd.DataFrame) -> None:
    half, whole = sweep.path / f".{table}", sweep.path / table
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    for job in sweep.finished:
        part = half / f"job={job.number}"
        part.mkdir()
        pq.write_table(_rows(job, table, columns), part / "part.parquet")
    shutil.rmtree(whole, ignore_errors=True)
    half.rename(whole)


def differing(jobs: Sequence[Job]) -> pd.DataFrame:
    """The overrides that are not the same in all jobs: ``[jobs, names]``, typed."""
    parser = OverridesParser.create()
    frame = pd.DataFrame([_values(parser, job.overrides) for job in jobs], dtype=object)
    frame = frame.loc[:, frame.map(repr).nunique() > 1]
    return frame.apply(_typed).add_prefix(OVERRIDE)


def _values(parser: OverridesParser, overrides: Sequence[str]) -> Mapping[str, Any]:
    return {each.key_or_group: each.value() for each in parser.parse_overrides(list(overrides))}


def _typed(values: pd.Series[Any]) -> pd.Series[Any]:
    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= {int, float, bool}:
        return values.astype(kinds.pop())
    return values.map(str).astype(object)


def _rows(job: Job, table: str, columns: pd.DataFrame) -> pa.Table:
    schema = TABLES[table]()
    rows = pq.read_table(Path(job.folder.path, f"{table}.parquet"), schema=schema)
    for name in columns:
        # Row by row, to be of the type of the whole column.
        values = pa.array(columns[name].iloc[[job.number]].repeat(rows.num_rows))
        rows = rows.append_column(str(name), values)
    return rows
