"""Optional trackers: copy a finished run folder to MLflow or to Weights & Biases.

    python -m harness tracker=mlflow                         # as a run ends
    python -m harness.results.trackers mlflow runs/…         # any time later

Each strategy of the folder becomes one tracked run, so that the tracker's own tables and charts
compare strategies; the folder's name groups them. Both stay offline unless ``server`` is given:
what they write is in ``.mlflow`` and ``.wandb`` below the folder of runs.

The run folder remains the record. It is whole before a tracker sees it, so a tracker that fails
costs a line of warning and exit status 3, never the run; a sweep goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from harness.errors import ConfigError, exit_status
from harness.results.manifest import flat
from harness.results.record import RunFolder
from harness.results.schema import Metrics

EXIT_UNTRACKED = 3
"""Exit status of a run that is on disk as it should be, but not in its tracker."""

NO_TRACKER = "none"

FILES = ("report.md", "summary.json", "manifest.json")
"""The small files of a run folder, which travel with each strategy."""


@dataclass
class TrackerConfig:
    """Where finished runs are copied to (config group ``tracker``).

    Attributes:
        kind: none, mlflow or wandb.
        project: MLflow's experiment, or W&B's project.
        server: null = offline; else an MLflow tracking URI, or the address of a W&B server. No
            passwords in it: the run folder quotes it. Both packages read those from the
            environment.
    """

    kind: str = NO_TRACKER
    project: str = "grammar-draft-harness"
    server: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in (NO_TRACKER, *TRACKERS):
            known = ", ".join((NO_TRACKER, *TRACKERS))
            raise ConfigError(f"tracker.kind: {self.kind!r} is none of {known}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One strategy of a run folder, flat as trackers like it.

    Attributes:
        group: name of the run folder.
        strategy: that ran.
        params: what was asked for, and what it was resolved to (``setup.…``), by dotted name.
        metrics: the finite numbers of ``summary.json``; see ``numbers``.
        tags: versions, hardware, commit, date and command of the manifest, by dotted name.
        files: of the run folder, which all strategies share.
    """

    group: str
    strategy: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        return f"{self.group}/{self.strategy}"


class Tracker(Protocol):
    """Takes finished runs. Whatever ``log`` raises is reported, and the run goes on."""

    kind: str

    def log(self, entries: Sequence[Entry]) -> None:
        """Store the strategies of a run; they are stored when it returns."""


class MLflow:
    """An MLflow run for each strategy; without a server in MLflow's plain file store."""

    kind = "mlflow"

    def __init__(self, config: TrackerConfig, runs: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # MLflow prefers a database, which the small `mlflow-skinny` does not come with.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        local = (runs / ".mlflow").resolve().as_uri()
        self._client = import_module("mlflow").MlflowClient(tracking_uri=config.server or local)
        self._entities = import_module("mlflow.entities")
        self._project = config.project

    def log(self, entries: Sequence[Entry]) -> None:
        """See ``Tracker``."""
        known = self._client.get_experiment_by_name(self._project)
        experiment = known.experiment_id if known else self._client.create_experiment(self._project)
        for entry in entries:
            self._log(experiment, entry)

    def _log(self, experiment: str, entry: Entry) -> None:
        tags = {**entry.tags, "group": entry.group}
        run = self._client.create_run(experiment, tags=tags, run_name=entry.name).info
        self._client.log_batch(
            run.run_id,
            metrics=[
                self._entities.Metric(name, value, run.start_time, 0)
                for name, value in entry.metrics.items()
            ],
            params=[self._entities.Param(name, str(value)) for name, value in entry.params.items()],
        )
        for path in entry.files:
            self._client.log_artifact(run.run_id, str(path))
        self._client.set_terminated(run.run_id)


class WandB:
    """A W&B run for each strategy; without a server offline, for ``wandb sync``."""

    kind = "wandb"

    def __init__(self, config: TrackerConfig, runs: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = import_module("wandb")
        where = {"base_url": config.server} if config.server else {}
        self._settings = self._wandb.Settings(
            mode="online" if config.server else "offline",
            silent=True,
            console="off",
            # The manifest says what machine and code it was; W&B would add user and host names.
            host="",
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            **where,
        )
        self._project, self._runs = config.project, runs

    def log(self, entries: Sequence[Entry]) -> None:
        """See ``Tracker``."""
        (self._runs / ".wandb").mkdir(exist_ok=True)  # W&B takes it for `wandb` if it is there
        self._wandb.setup(settings=self._settings)
        try:
            for entry in entries:
                self._log(entry)
        finally:
            self._wandb.teardown()  # its process may still be writing what is finished

    def _log(self, entry: Entry) -> None:
        with self._wandb.init(
            project=self._project,
            group=entry.group,
            name=entry.name,
            config={**entry.params, "manifest": dict(entry.tags)},
            dir=str(self._runs),
            settings=self._settings,
        ) as run:
            run.log(dict(entry.metrics))
            for path in entry.files:
                copy = shutil.copy(path, run.dir)  # `save` alone would leave a symbolic link
                run.save(copy, base_path=run.dir)


TRACKERS: dict[str, type[MLflow] | type[WandB]] = {each.kind: each for each in (MLflow, WandB)}


def find_tracker(config: TrackerConfig, runs: Path) -> Tracker | None:
    """The tracker that was asked for; None = none.

    Args:
        config: which, and where.
        runs: the folder of run folders.

    Raises:
        ConfigError: its package is missing, or cannot work with this server.
    """
    if config.kind == NO_TRACKER:
        return None
    try:
        return TRACKERS[config.kind](config, runs)
    except ImportError as error:
        raise ConfigError(
            f"tracker={config.kind}: {error}; pip install 'grammar-draft-harness[{config.kind}]'"
        ) from None
    except Exception as error:  # the packages have no common base for a bad address
        raise ConfigError(f"tracker.server={config.server}: {_one_line(error)}") from None


def track(tracker: Tracker | None, folder: RunFolder) -> bool:
    """Copy a run that is on disk; False, and one line of warning, if the tracker fails.

    A run that was copied in part, or before, is copied anew.
    """
    if tracker is None:
        return True
    try:
        tracker.log(entries_of(folder))
    except Exception as error:  # whatever the package, the network or a server come up with
        print(
            f"warning: {folder.path} is written, but {tracker.kind} failed ({_one_line(error)}); "
            f"repeat: python -m harness.results.trackers {tracker.kind} {folder.path}",
            file=sys.stderr,
        )
        return False
    return True


def entries_of(folder: RunFolder) -> list[Entry]:
    """What there is to track of a run folder, one entry a strategy."""
    manifest = folder.manifest()
    setup = manifest.pop("setup", {})
    tags = flat({**manifest, "command": shlex.join(manifest["command"])})
    config: Any = OmegaConf.to_container(folder.config())
    config.pop("tracker", None)  # no result depends on it
    options = config.pop("options")
    return [
        Entry(
            group=folder.path.resolve().name,
            strategy=strategy,
            params=flat(
                {
                    **config,
                    "strategy": strategy,
                    "options": options.get(strategy, {}),
                    "setup": setup,
                }
            ),
            metrics=numbers(metrics),
            tags={name: str(value) for name, value in tags.items() if value is not None},
            files=tuple(folder.path / name for name in FILES),
        )
        for strategy, metrics in folder.strategies().items()
    ]


def numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are finite numbers; W&B wants nothing but words and ``_`` in their names.

    A list is taken apart by index (``accept_at_0``, …), an interval into ``accept_rate_ci_low``
    and ``accept_rate_ci_high``, and what a strategy counts itself is ``own_…``.
    """
    found: dict[str, Any] = {}
    for dotted, value in flat(metrics).items():
        name = dotted.replace(".", "_")
        if isinstance(value, list):
            ends = ("low", "high") if name.endswith("_ci") else range(len(value))
            found |= {f"{name}_{end}": each for end, each in zip(ends, value, strict=True)}
        else:
            found[name] = value
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, ``EXIT_UNTRACKED`` where a tracker failed."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.trackers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=TRACKERS)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--project", default=TrackerConfig.project, help="default: %(default)s")
    parser.add_argument("--server", help="its address; without it, offline")
    given = parser.parse_args(arguments)
    config = TrackerConfig(given.kind, given.project, given.server)
    return exit_status(lambda: _copy(config, given.runs))


def _copy(config: TrackerConfig, paths: Sequence[Path]) -> int:
    folders = [RunFolder.open(path) for path in paths]
    done = [track(find_tracker(config, each.path.parent), each) for each in folders]
    return 0 if all(done) else EXIT_UNTRACKED


if __name__ == "__main__":
    sys.exit(main())
