"""What a run has finished, on disk at once: killed at any moment, it loses none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.core import RequestTrace, StepTrace, columns
from harness.errors import ConfigError
from harness.lock import lock

NAME = "journal.jsonl"
"""Its name in the run folder. It is there as long as the run is not finished."""

_STEP, _REQUEST = list(columns(StepTrace)), list(columns(RequestTrace))
_COLUMNS = {"steps": _STEP, "requests": _REQUEST}


class Entry(NamedTuple):
    """A finished request and its steps."""

    request: RequestTrace
    steps: list[StepTrace]


class Journal:
    """An entry per line, as values in the order of the columns that the first line names.

    A line reaches the system whole before the run goes on. A last line that is cut, by the end
    of the process or of the disk, is no entry, and is taken away before another is written.

    Args:
        path: of the file; made if it is not there.

    Attributes:
        entries: what was finished before.

    Raises:
        ConfigError: another process writes it, or another version has written it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        try:
            if not lock(self._file):
                raise ConfigError(f"resume: {path.parent} is still running; wait for it")
            records = self._take_up()
        except Exception:
            self.close()
            raise
        self._head = records[0] if records else None
        self.entries = [_entry(record) for record in records[1:]]

    def _take_up(self) -> list[dict[str, Any]]:
        """All records, the head first; what is cut goes."""
        self._file.seek(0)
        records = list(_whole(self._file.read()))
        if records and records[0][0].get("columns") != _COLUMNS:
            raise ConfigError(f"resume: {self._path} is of another version; start a new run")
        self._file.truncate(sum(length for _, length in records))
        return [record for record, _ in records]

    def start(self, workload: str) -> None:
        """Begin, or check that it may go on.

        Args:
            workload: stands for what is decoded.

        Raises:
            ConfigError: it began with another workload, and the two must not be mixed.
        """
        if self._head is None:
            self._write({"workload": workload, "columns": _COLUMNS})
        elif self._head["workload"] != workload:
            raise ConfigError(
                f"resume: the workload has changed since {self._path} was begun; start a new run"
            )

    def append(self, request: RequestTrace, steps: Sequence[StepTrace]) -> None:
        """Write an entry.

        Raises:
            OSError: the disk is full, or gone.
        """
        self._write(
            {
                "request": [getattr(request, name) for name in _REQUEST],
                "steps": [[getattr(step, name) for name in _STEP] for step in steps],
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        left = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        while left:  # a disk takes what fits before it complains
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()

    def remove(self) -> None:
        """The run is finished, and all of it is in its tables."""
        self._path.unlink()


def _entry(record: dict[str, Any]) -> Entry:
    return Entry(
        RequestTrace(**dict(zip(_REQUEST, record["request"], strict=True))),
        [StepTrace(**dict(zip(_STEP, row, strict=True))) for row in record["steps"]],
    )


def _whole(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """The records up to the first that is damaged, and how many bytes each takes."""
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(record, dict):
            return
        yield record, len(line)
