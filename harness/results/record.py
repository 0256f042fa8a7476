"""The run folder, and the recorder that collects what goes into it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.core import RequestTrace, StepTrace
from harness.errors import ConfigError
from harness.results.schema import SCHEMA_VERSION, Metrics, request_schema, step_schema


class Recorder:
    """Collects traces, in the order in which they happen."""

    def __init__(self) -> None:
        self.steps: list[StepTrace] = []
        self.requests: list[RequestTrace] = []

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The step rows and the request rows, typed exactly as if read from parquet."""
        return _frame(self.steps, step_schema()), _frame(self.requests, request_schema())


def _frame(traces: Sequence[StepTrace] | Sequence[RequestTrace], schema: pa.Schema) -> pd.DataFrame:
    data = {name: [getattr(trace, name) for trace in traces] for name in schema.names}
    frame: pd.DataFrame = pa.table(data, schema=schema).to_pandas()
    return frame


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. Make one with ``create`` or ``dated``, read one with ``open``."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder, before anything costly starts.

        Raises:
            ConfigError: it cannot be made or written.
        """
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        return cls(path)

    @classmethod
    def dated(cls, root: Path, name: str) -> RunFolder:
        """Make ``root/<date>-<name>``, or ``…-2``, ``…-3`` where that is taken: no run is lost.

        Raises:
            ConfigError: it cannot be made or written.
        """
        stem = f"{datetime.now(UTC):%Y-%m-%d}-{name}"
        for attempt in count(1):
            path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
            with _writing(path), suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        return cls.create(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that was recorded earlier; nothing is written.

        Raises:
            ConfigError: ``path`` is no run folder, or one of another schema version.
        """
        folder = cls(path)
        for name in ("manifest.json", "summary.json", "requests.parquet", "steps.parquet"):
            if not (path / name).is_file():
                raise ConfigError(f"{path} is not a run folder: it has no {name}; name another")
        version = _read_json(path / "summary.json").get("schema_version")
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}/summary.json: schema_version is {version}, this version reads "
                f"{SCHEMA_VERSION}; run it again"
            )
        return folder

    @property
    def report_path(self) -> Path:
        return self.path / "report.md"

    @property
    def csv_path(self) -> Path:
        return self.path / "report.csv"

    @property
    def page_path(self) -> Path:
        return self.path / "page.html"

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        _write_json(self.path / "manifest.json", manifest)

    def write_config(self, yaml: str) -> None:
        (self.path / "config.yaml").write_text(yaml, encoding="utf-8")

    def write_frames(self, steps: pd.DataFrame, requests: pd.DataFrame) -> None:
        """Write ``steps.parquet`` and ``requests.parquet``; the columns carry their docs."""
        for name, frame, schema in (
            ("steps", steps, step_schema()),
            ("requests", requests, request_schema()),
        ):
            table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
            pq.write_table(table, self.path / f"{name}.parquet")

    def write_tokens(self, tokens: Mapping[str, Any]) -> None:
        """Write ``tokens.json``: the texts of the used tokens, see ``viewer.tokens``."""
        text = json.dumps(tokens)  # ASCII: a byte that is no text is a lone surrogate
        (self.path / "tokens.json").write_text(text + "\n", encoding="utf-8")

    def write_summary(self, strategies: Mapping[str, Metrics]) -> None:
        """Write ``summary.json``.

        Args:
            strategies: metrics by strategy name, as ``metrics.summarise`` returns them.
        """
        _write_json(
            self.path / "summary.json",
            {"schema_version": SCHEMA_VERSION, "strategies": strategies},
        )

    def manifest(self) -> dict[str, Any]:
        return _read_json(self.path / "manifest.json")

    def tokens(self) -> dict[str, Any]:
        """The texts of the used tokens; empty where the run did not record them."""
        path = self.path / "tokens.json"
        return _read_json(path) if path.is_file() else {"texts": {}, "special": {}}

    def steps(self) -> pd.DataFrame:
        return _read_parquet(self.path / "steps.parquet")

    def requests(self) -> pd.DataFrame:
        return _read_parquet(self.path / "requests.parquet")

    def strategies(self) -> dict[str, dict[str, Any]]:
        """The metrics of ``summary.json`` by strategy name."""
        strategies: dict[str, dict[str, Any]] = _read_json(self.path / "summary.json")["strategies"]
        return strategies


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run folder {path} cannot be written ({error.strerror}); choose another"
        ) from None


def _read_parquet(path: Path) -> pd.DataFrame:
    frame: pd.DataFrame = pq.read_table(path).to_pandas()
    return frame


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error}); run it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object; run it again")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
