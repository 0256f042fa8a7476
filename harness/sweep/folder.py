"""The folder of a sweep: the list of its jobs, and an ordinary run folder for each of them.

    runs/2026-11-30-paper/
        sweep.json                  what was asked for: command, overrides of every job
        2026-11-30-paper-0/ …       run folders, by the number of the job
        errors/0.txt …              why a job failed; there as long as it counts as failed
        requests/job=0/ …           the rows of all finished jobs, see ``dataset.py``
        steps/job=0/ …

What became of a job is read from these files alone. Its process may be on another machine and may
be killed at any moment, so that nobody is left to tell.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.lock import lock
from harness.results.record import RunFolder

MANIFEST = "sweep.json"
SCHEMA_VERSION = 1
"""Raised whenever a name or a meaning in ``sweep.json`` changes."""


class State(StrEnum):
    """What became of a job."""

    FINISHED = "finished"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    NOT_BEGUN = "not begun"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep.

    Attributes:
        sweep: folder of the sweep.
        name: of the run folder in it.
        number: of the job, from 0.
        overrides: what makes it differ from the default config, as for ``python -m harness``.
        differing: those of them that not all jobs of the sweep have.
    """

    sweep: Path
    name: str
    number: int
    overrides: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.sweep / self.name)

    @property
    def error_path(self) -> Path:
        return self.sweep / "errors" / f"{self.number}.txt"

    @property
    def state(self) -> State:
        """A run is finished when its summary is there and its journal gone."""
        if self.error_path.is_file():
            return State.FAILED
        if self.folder.journal_path.is_file():
            return State.UNFINISHED
        finished = (self.folder.path / "summary.json").is_file()
        return State.FINISHED if finished else State.NOT_BEGUN

    @property
    def reason(self) -> str:
        """Why it failed, in one line; empty where it has not."""
        if not self.error_path.is_file():
            return ""
        return self.error_path.read_text(encoding="utf-8").partition("\n")[0]

    def fail(self, reason: str, details: str = "") -> None:
        """Count as failed, until it runs again.

        Args:
            reason: one line.
            details: a traceback, where the reason alone does not explain it.
        """
        with suppress(OSError):  # a full disk: it counts as unfinished, and the others go on
            self.error_path.parent.mkdir(parents=True, exist_ok=True)
            self.error_path.write_text(f"{reason}\n{details}", encoding="utf-8")

    def renew(self) -> None:
        """Count as failed no more, before it runs again: whoever is killed meanwhile must not
        leave the reason of an earlier attempt. Tables in which every request failed go with it."""
        if self.state is State.FAILED:
            if not self.folder.journal_path.is_file():
                shutil.rmtree(self.folder.path, ignore_errors=True)
            self.error_path.unlink()

    def __str__(self) -> str:
        label = " ".join(self.differing)
        return f"{self.number} ({label})" if label else str(self.number)


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The files of a sweep. Make one with ``write``, read one with ``open``.

    Attributes:
        path: the folder.
        name: that it had when it was made; its run folders are named after it.
        manifest: command, versions, hardware and commit of the process that began it.
        arguments: all overrides of the command, those for Hydra and its launcher included, and
            its ``--config-dir``.
        jobs: by number.
    """

    path: Path
    name: str
    manifest: Mapping[str, Any]
    arguments: tuple[str, ...]
    jobs: tuple[Job, ...]

    @classmethod
    def write(
        cls,
        path: Path,
        manifest: Mapping[str, Any],
        arguments: Sequence[str],
        jobs: Sequence[Sequence[str]],
    ) -> SweepFolder:
        """Begin a sweep in a folder that is there.

        Args:
            path: the folder.
            manifest: as ``results.manifest.manifest`` returns it.
            arguments: see the attribute.
            jobs: the overrides of each job.
        """
        content = {
            "schema_version": SCHEMA_VERSION,
            "name": path.resolve().name,
            "manifest": manifest,
            "arguments": list(arguments),
            "jobs": [list(overrides) for overrides in jobs],
        }
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (path / MANIFEST).write_text(text + "\n", encoding="utf-8")
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> SweepFolder:
        """A sweep that was begun earlier.

        Raises:
            ConfigError: ``path`` is none, or one of another schema version.
        """
        if not is_sweep(path):
            raise ConfigError(
                f"{path} is not a sweep: it has no {MANIFEST}; name the folder of one"
            )
        try:
            content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            version, name = content["schema_version"], content["name"]
            overrides = [tuple(each) for each in content["jobs"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path / MANIFEST}: damaged; start a new sweep") from None
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path / MANIFEST}: schema_version is {version}, this version reads "
                f"{SCHEMA_VERSION}; start a new sweep"
            )
        common = set(overrides[0]).intersection(*overrides)
        jobs = (
            Job(
                path,
                f"{name}-{number}",
                number,
                overrides=each,
                differing=tuple(one for one in each if one not in common),
            )
            for number, each in enumerate(overrides)
        )
        return cls(path, name, content["manifest"], tuple(content["arguments"]), tuple(jobs))

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other process runs the sweep meanwhile: two would take each other's jobs for failed.

        Raises:
            ConfigError: one does.
        """
        with (self.path / MANIFEST).open("r+b") as file:
            if not lock(file):
                raise ConfigError(f"{self.path} is still running; wait for it")
            yield

    @property
    def command(self) -> list[str]:
        """What the user typed."""
        return list(self.manifest["command"])

    @property
    def finished(self) -> list[Job]:
        return [job for job in self.jobs if job.state is State.FINISHED]

    def lines(self) -> list[str]:
        """How the sweep stands, and what is left to do; one line each."""
        finished = len(self.finished)
        lines = [f"{self.path}: {finished} of {len(self.jobs)} jobs are finished"]
        if finished < len(self.jobs):
            lines += [
                f"{job.state}: {job}{job.reason and f': {job.reason}'}"
                for job in self.jobs
                if job.state is not State.FINISHED
            ]
            lines.append(f"continue with `python -m harness.sweep resume {self.path}`")
        if finished:
            lines.append(f"all together: `python -m harness.results.report {self.path}`")
        return lines


def is_sweep(path: Path) -> bool:
    """Whether ``path`` is the folder of a sweep."""
    return (path / MANIFEST).is_file()


def run_folders(path: Path) -> list[RunFolder]:
    """The run that ``path`` is, or all finished ones of the sweep that it is.

    Raises:
        ConfigError: it is neither, or none of the sweep's jobs has finished.
    """
    if not is_sweep(path):
        return [RunFolder.open(path)]
    sweep = SweepFolder.open(path)
    if not sweep.finished:
        raise ConfigError(
            f"{path}: none of its {len(sweep.jobs)} jobs has finished; continue with "
            f"`python -m harness.sweep resume {path}`"
        )
    return [RunFolder.open(job.folder.path) for job in sweep.finished]
