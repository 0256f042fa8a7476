"""The run folder, and the recorder that collects what goes into it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from harness.core import RequestTrace, StepTrace
from harness.errors import ConfigError, writing
from harness.results import journal
from harness.results.journal import Journal
from harness.results.schema import SCHEMA_VERSION, Metrics, request_schema, step_schema

MIN_FREE_MIB = 64
"""What must be free where a run begins. Three times what the steps of 300 requests under seven
strategies take in the journal: some 100,000 rows of 230 bytes."""


class Recorder:
    """Collects traces, in the order in which they happen.

    Args:
        journal: gets each request as it ends, with its steps; what it holds from an earlier
            process is where this one begins. None where nothing need outlive the process.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.steps: list[StepTrace] = []
        self.requests: list[RequestTrace] = []
        self._journal = journal
        self._running: dict[tuple[str, str], list[StepTrace]] = {}
        self._first_tick: dict[str, int] = {}
        for request, steps in journal.entries if journal is not None else ():
            self.requests.append(request)
            self.steps += steps
            first = self._first_tick.get(request.strategy, 0)
            behind = (each.tick + 1 for each in steps)
            self._first_tick[request.strategy] = max(first, *behind, 0)

    @property
    def done(self) -> set[tuple[str, str]]:
        """Strategy and id of each request that has ended."""
        return {(trace.strategy, trace.request) for trace in self.requests}

    def step(self, trace: StepTrace) -> None:
        """One sequence did one step; ticks go on behind those of an earlier process."""
        trace.tick += self._first_tick.get(trace.strategy, 0)
        self.steps.append(trace)
        self._running.setdefault((trace.strategy, trace.request), []).append(trace)

    def finished(self, trace: RequestTrace) -> None:
        """One request has ended, and all of its steps were told.

        Raises:
            OSError: the journal cannot be written.
        """
        key = trace.strategy, trace.request
        if self._journal is not None:
            self._journal.append(trace, self._running.get(key, []))
        self.requests.append(trace)  # an interrupt before this: it counts as unfinished here
        self._running.pop(key, None)

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The step rows and the request rows, typed exactly as if read from parquet.

        What a run that was interrupted had begun, but not finished, is left out.
        """
        begun = self._running.keys() - self.done
        steps = [each for each in self.steps if (each.strategy, each.request) not in begun]
        return _frame(steps, step_schema()), _frame(self.requests, request_schema())


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
            ConfigError: it cannot be made or written, or less than ``MIN_FREE_MIB`` are free.
        """
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            free_mib = shutil.disk_usage(path).free >> 20
        if free_mib < MIN_FREE_MIB:
            with suppress(OSError):
                path.rmdir()  # if it is ours, it is empty
            raise ConfigError(
                f"run folder {path}: {free_mib} MiB are free there and {MIN_FREE_MIB} needed; "
                "make room, or choose another with runs=FOLDER"
            )
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
        if folder.journal_path.is_file() and not (path / "summary.json").is_file():
            raise ConfigError(
                f"{path} was not finished: continue it with `python -m harness resume={path}`"
            )
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

    @classmethod
    def unfinished(cls, path: Path) -> RunFolder:
        """A run that was killed or interrupted, to go on in.

        Raises:
            ConfigError: ``path`` is none, or cannot be written.
        """
        folder = cls(path)
        if not (folder.journal_path.is_file() and (path / "config.yaml").is_file()):
            raise ConfigError(
                f"resume: {path} is no unfinished run: it has no {journal.NAME}; name one that "
                "was killed or interrupted"
            )
        return cls.create(path)

    @property
    def journal_path(self) -> Path:
        return self.path / journal.NAME

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

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
        _write_json(self.manifest_path, manifest)

    def write_config(self, yaml: str) -> None:
        with _writing(self.path):
            _write_text(self.path / "config.yaml", yaml)

    def write_frames(self, steps: pd.DataFrame, requests: pd.DataFrame) -> None:
        """Write ``steps.parquet`` and ``requests.parquet``; the columns carry their docs."""
        for name, frame, schema in (
            ("steps", steps, step_schema()),
            ("requests", requests, request_schema()),
        ):
            table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
            with _replacing(self.path / f"{name}.parquet") as path:
                pq.write_table(table, path)

    def write_tokens(self, tokens: Mapping[str, Any]) -> None:
        """Write ``tokens.json``: the texts of the used tokens, see ``viewer.tokens``."""
        text = json.dumps(tokens)  # ASCII: a byte that is no text is a lone surrogate
        _write_text(self.path / "tokens.json", text + "\n")

    def write_summary(self, strategies: Mapping[str, Metrics]) -> None:
        """Write ``summary.json``.

        Args:
            strategies: metrics by strategy name, as ``metrics.summarise`` returns them.
        """
        _write_json(
            self.path / "summary.json",
            {"schema_version": SCHEMA_VERSION, "strategies": strategies},
        )

    def config(self) -> DictConfig:
        """``config.yaml``, as it was composed; empty where the run has none."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return OmegaConf.create()
        with _reading(path):
            config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise ConfigError(f"{path}: settings were expected there; run it again")
        return config

    def manifest(self) -> dict[str, Any]:
        return _read_json(self.manifest_path, "versions", "hardware")

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
        summary = _read_json(self.path / "summary.json", "strategies")
        strategies: dict[str, dict[str, Any]] = summary["strategies"]
        return strategies


def _writing(path: Path) -> AbstractContextManager[None]:
    return writing(f"run folder {path}", "choose another")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` when all of it is there: no reader meets a half."""
    half = path.with_name(f".{path.name}")
    try:
        yield half
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    with _replacing(path) as half:
        half.write_text(text, encoding="utf-8")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make one line of whatever a damaged file, or one that may not be read, makes its reader say.

    Bytes that are no UTF-8, no JSON or no parquet are a ``ValueError`` to all of them.
    """
    try:
        yield
    except (OSError, ValueError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read ({reason}); run it again") from None


def _read_parquet(path: Path) -> pd.DataFrame:
    with _reading(path):
        frame: pd.DataFrame = pq.read_table(path).to_pandas()
    return frame


def _read_json(path: Path, *parts: str) -> dict[str, Any]:
    """A JSON object, of which some parts are sure to be there."""
    with _reading(path):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object; run it again")
    if missing := [part for part in parts if part not in value]:
        raise ConfigError(f"{path}: it has no {missing[0]}; run it again")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    _write_text(path, text + "\n")
