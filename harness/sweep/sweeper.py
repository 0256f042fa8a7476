"""Hydra's basic sweeper, with a folder of the sweep's own that survives whatever fails."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins import sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from harness.errors import ConfigError
from harness.parallel.launch import started_ranks
from harness.results.manifest import manifest
from harness.results.record import RunFolder
from harness.results.trackers import EXIT_UNTRACKED
from harness.sweep.dataset import collect
from harness.sweep.folder import Job, State, SweepFolder

EXIT_INCOMPLETE = 1
"""Some job of the sweep is not finished."""


class Sweeper(sweeper.Sweeper):
    """Every combination of the overrides' values, as the basic sweeper has it.

    Each becomes a job with a run folder in the folder of the sweep. At the end it is said which
    jobs are not finished and why, and the rows of the others are put together.

    Args:
        max_batch_size: jobs that are handed to the launcher at once; None = all.
        params: overrides of the config, which those of the command line replace.
        resume: folder of a sweep, whose jobs are run that are not finished; no others.
    """

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        resume: str | None = None,
    ) -> None:
        self._batch_size, self._params, self._resume = max_batch_size, params or {}, resume
        self._tracked: list[bool] = []

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See ``hydra.plugins.sweeper.Sweeper``.

        Raises:
            ConfigError: the folder cannot be made, or is no sweep to resume; or each of several
                ranks would run the whole sweep.
        """
        if (ranks := started_ranks()) > 1:
            raise ConfigError(
                f"engine.tp: {ranks} ranks started, but a job of a sweep is one process; start the "
                "sweep with `python -m harness -m`"
            )
        if config.resume is not None:
            raise ConfigError(
                "resume: that goes on with one run; for a sweep, `python -m harness.sweep resume "
                "DIR`"
            )
        if self._resume is not None:
            path = SweepFolder.open(Path(self._resume)).path
        else:
            path = RunFolder.dated(Path(config.runs), config.name).path
        self.config, self.hydra_context = config, hydra_context
        with open_dict(config):  # launchers keep files of their own there
            config.hydra.sweep.dir = str(path)
        self._path = path
        with self._nothing_left_behind():
            self._launcher = Plugins.instance().instantiate_launcher(
                hydra_context, task_function, config
            )

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs, and end the process with ``EXIT_INCOMPLETE`` unless all have finished.

        Args:
            arguments: the overrides of the command.

        Raises:
            HarnessError: the launcher cannot work, the rows cannot be written, or another process
                runs this sweep.
            HydraException: a job cannot be composed; none has begun.
            KeyboardInterrupt: it was interrupted; the message says how to go on.
        """
        with self._nothing_left_behind():
            sweep = self._begin(arguments) if self._resume is None else SweepFolder.open(self._path)
            with sweep.held(), _terminated_like_interrupted():
                try:
                    self._run([job for job in sweep.jobs if job.state is not State.FINISHED])
                except KeyboardInterrupt:
                    raise KeyboardInterrupt("\n".join(sweep.lines())) from None
                collect(sweep)
        complete = len(sweep.finished) == len(sweep.jobs)
        print("\n".join(sweep.lines()), file=sys.stdout if complete else sys.stderr)
        if not complete:
            sys.exit(EXIT_INCOMPLETE)
        if not all(self._tracked):
            sys.exit(EXIT_UNTRACKED)

    def _begin(self, arguments: list[str]) -> SweepFolder:
        """Compose every job once, so that a wrong setting ends the sweep before it begins."""
        assert self.hydra_context is not None
        assert self.config is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides(
            [*(f"{name}={values}" for name, values in self._params.items()), *arguments]
        )
        # A repeat is the whole sweep again, so that no job meets one mood of the machine only.
        overrides.sort(key=lambda each: each.key_or_group != "repeat")
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        if not jobs:
            empty = next(each for each in overrides if each.is_sweep_override() and not _any(each))
            raise ConfigError(f"{empty.input_line}: a sweep over no value has no jobs; give one")
        self.validate_batch_is_legal(jobs)
        folders = [
            f"--config-dir={each.path}"
            for each in self.config.hydra.runtime.config_sources
            if each.provider == "command-line"
        ]
        given = [*folders, *self.config.hydra.overrides.hydra, *arguments]
        command = [sys.executable, *sys.orig_argv[1:]]
        return SweepFolder.write(self._path, manifest(command), given, jobs)

    def _run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.renew()
        batch = self._batch_size or max(1, len(jobs))
        for start in range(0, len(jobs), batch):
            self._launch(jobs[start : start + batch])

    def _launch(self, jobs: Sequence[Job]) -> None:
        """Let the launcher run the jobs.

        A pool of processes, joblib's, breaks when one of them is killed, and the jobs of all
        others with it. Nobody knows which it was: the jobs that it leaves run on one by one.
        """
        try:
            results = self._launcher.launch([launched(job) for job in jobs], jobs[0].number)
        except BrokenProcessPool:
            if len(jobs) == 1:
                jobs[0].fail("its process was killed; is there memory enough?")
                return
            for job in jobs:
                if job.state in (State.UNFINISHED, State.NOT_BEGUN):
                    self._launch([job])
            return
        for job, result in zip(jobs, results, strict=True):
            if result.status is JobStatus.COMPLETED:
                self._tracked.append(result.return_value)
            elif job.state is not State.FINISHED:  # the process died, with nobody left to say why
                error = result._return_value
                reason, *details = str(error).strip().splitlines() or [type(error).__name__]
                job.fail(reason, "\n".join(details))

    @contextmanager
    def _nothing_left_behind(self) -> Iterator[None]:
        """Remove the folder of a sweep that ends before any of its jobs has begun."""
        try:
            yield
        except Exception:
            if self._resume is None and not any(
                path.is_dir() for path in self._path.glob(f"{self._path.name}-*")
            ):
                shutil.rmtree(self._path)
            raise


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM is taken for Ctrl-C: the processes of a pool would outlive one that dies of it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _any(override: Override) -> bool:
    """Whether there is a value to sweep over."""
    return next(override.sweep_string_iterator(), None) is not None


def launched(job: Job) -> list[str]:
    """The overrides of a job for the launcher: its own, and where its run folder is."""
    return [
        *job.overrides,
        f"hydra.sweep.dir={quoted(str(job.sweep))}",
        f"hydra.sweep.subdir={quoted(job.name)}",
    ]


def quoted(text: str) -> str:
    """A value as Hydra's grammar takes it, whatever signs are in it."""
    return "'" + text.replace("'", "\\'") + "'"
