"""What is compared of a sweep: a snapshot for each group of its jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.errors import ConfigError
from harness.results.baseline import Snapshot
from harness.sweep.folder import Job, SweepFolder

WHOLE = "all jobs"
"""The group of a sweep whose jobs differ in nothing but the strategy."""


def snapshots(path: Path) -> dict[str, Snapshot]:
    """By what its jobs were asked for, the strategy left out: the same in two sweeps.

    Jobs that differ in nothing but the strategy are one snapshot, as if one run had compared them.

    Raises:
        ConfigError: ``path`` is no sweep, or not all of its jobs have finished.
    """
    sweep = SweepFolder.open(path)
    if len(sweep.finished) < len(sweep.jobs):
        raise ConfigError(
            f"{path}: {len(sweep.finished)} of {len(sweep.jobs)} jobs are finished; continue with "
            f"`python -m harness.sweep resume {path}`"
        )
    groups: dict[str, Snapshot] = {}
    for job in sweep.jobs:
        read, group = Snapshot.read(job.folder.path), group_of(job)
        known = groups.setdefault(group, read)
        groups[group] = replace(known, strategies={**known.strategies, **read.strategies})
    return groups


def group_of(job: Job) -> str:
    """The overrides that differ within the sweep, but for the strategy."""
    named = [each for each in job.differing if each.lstrip("+").split("=")[0] != "strategy"]
    return " ".join(sorted(named)) or WHOLE
