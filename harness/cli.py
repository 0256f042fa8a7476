"""The command line: compose the config, run, write the run folder, print the tables."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.config import Config, schema, typed
from harness.data_parallel.run import DataParallelRun
from harness.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    ConfigError,
    HarnessError,
    LostRank,
    RanksError,
    ShardError,
)
from harness.parallel.launch import join, joined, launcher, leave, own_rank
from harness.parallel.ranks import ALONE, Ranks
from harness.results.journal import Journal
from harness.results.manifest import manifest
from harness.results.metrics import check_identities, compare_with_plain, summarise
from harness.results.record import Recorder, RunFolder
from harness.results.table import comparison_tables, print_tables
from harness.results.trackers import EXIT_UNTRACKED, find_tracker, track
from harness.run import Run, all_failed
from harness.sweep import plugins
from harness.sweep.attempt import attempt, job_of_this_process
from harness.sweep.folder import is_sweep
from harness.timeline import TIMELINE, write_timeline

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""What a disk says that is full, broken, or was mounted anew to be read only."""


def main() -> None:
    """Entry point of ``python -m harness``. Bad input ends in one line and exit status 2.

    A tracker that failed is said last, by ``EXIT_UNTRACKED``: a sweep goes on without it.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and the message is ours to print
    plugins.register()
    with _one_line_errors():
        ConfigStore.instance().store(name="schema", node=schema())
        hydra.main(version_base="1.3", config_path="pkg://configs", config_name="config")(job)()
    leave()


def job(composed: DictConfig) -> bool:
    """A run, alone, as a rank, or as a job of a sweep: what Hydra's launchers call, in whatever
    process.

    Args:
        composed: its config.

    Returns:
        Whether the tracker took it; true without one.
    """
    if (mine := job_of_this_process()) is not None:
        return attempt(*mine, composed, execute)
    with _one_line_errors():  # here too: what leaves this function, Hydra talks about
        config = settings(composed)
        ranks = join(config.engine.tp, config.engine.tp_timeout_s, config.pair.device)
        if ranks.rank > 0:
            follow(config, ranks)
            return True
        folder = begin(composed, config)
        tracked = execute(config, folder, [sys.executable, *sys.orig_argv[1:]], ranks)
    if not tracked:
        leave()
        sys.exit(EXIT_UNTRACKED)
    return tracked


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (HarnessError, HydraException, OmegaConfBaseException) as error:
        lost = isinstance(error, LostRank)
        if lost or own_rank() == 0:  # which speaks for all, unless it is the lost one
            print(f"error: {_explain(error)}", file=sys.stderr, flush=True)
        if lost or joined():
            sys.stdout.flush()
            os._exit(EXIT_BAD_INPUT)  # a communicator without its peer may wait at the exit
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt as stop:
        if own_rank() == 0:
            print(f"interrupted: {str(stop) or 'nothing had begun'}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _explain(error: Exception) -> str:
    """One line; Hydra's own messages with their cause, and without how its search path looks."""
    message = str(error).split("Config search path")[0]
    if extra := plugins.missing_extra(message):
        message = extra
    elif unknown := re.match(r"Could not override '(.*?)'", message):
        message = f"{unknown[1]}: no such setting; `python -m harness --cfg job` lists them"
        if unknown[1].startswith("options."):
            message += f"; of a strategy in a module of your own, write +{unknown[1]}"
    elif isinstance(error.__cause__, OmegaConfBaseException):
        message += f": {str(error.__cause__).splitlines()[0]}"
    return re.sub(r"\s+", " ", message).strip()


def settings(composed: DictConfig) -> Config:
    """The settings of a new run, or of the one to resume.

    Raises:
        HarnessError: a value is out of its range, or the run cannot be resumed like this.
    """
    if composed.resume is None:
        return typed(composed)
    others = [each for each in HydraConfig.get().overrides.task if not each.startswith("resume=")]
    if others:
        raise ConfigError(f"resume: a run keeps its settings; leave out {' '.join(others)}")
    return typed(RunFolder.unfinished(Path(composed.resume)).config())


def begin(composed: DictConfig, config: Config) -> RunFolder:
    """The folder of a new run, or of the one to resume.

    Raises:
        HarnessError: it cannot be written.
    """
    if composed.resume is not None:
        return RunFolder.unfinished(Path(composed.resume))
    folder = RunFolder.dated(Path(config.runs), config.name)
    folder.write_config(OmegaConf.to_yaml(composed))
    return folder


def follow(config: Config, ranks: Ranks) -> None:
    """Do what rank 0 does, and leave it to rank 0 to tell of it.

    Raises:
        HarnessError: see ``execute``.
        LostRank: also where this rank alone has failed, of which the others do not know why.
    """
    with ranks.together():
        run = Run(config, Recorder(), lambda _: None, ranks=ranks)
    try:
        with _device_memory():
            run.warm_up()
            run.go()
    except RanksError:
        raise
    except HarnessError as error:
        raise LostRank(f"rank {ranks.rank}, in {ranks.now}: {error}") from None


def execute(config: Config, folder: RunFolder, command: list[str], ranks: Ranks = ALONE) -> bool:
    """Run what ``config`` says, or the rest of it.

    Args:
        config: what to run.
        folder: where; its journal says what has been done already.
        command: what the user typed.
        ranks: that run it, of which this one is the first.

    Returns:
        Whether the tracker took the run; true without one.

    Raises:
        HarnessError: the config cannot be served, the disk is full, or a shard or a rank was lost.
        KeyboardInterrupt: it was interrupted; the message says what is kept.
    """
    with closing(Journal(folder.journal_path)) as journal:
        recorder = Recorder(journal)
        with _what_is_kept(folder, recorder, ranks):
            with _progress() as bar, _nothing_left_behind(folder, recorder), _device_memory():
                tracker = find_tracker(config.tracker, Path(config.runs))
                run = prepare(config, recorder, bar.tick, ranks)
                journal.start(run.workload)
                bar.expect(run.names, len(run.items))
                for trace in recorder.requests:
                    bar.tick(trace.strategy)
                begun = begun_manifest(folder, command)
                folder.write_manifest({**begun, "state": "running"})
                stopped = decode(run)
                if stopped and not recorder.requests:
                    raise stopped
            begun |= {"setup": run.setup(), "engine": run.facts()}
            if stopped:
                write_results(folder, run, recorder, {**begun, "state": "interrupted"})
                raise stopped
            summary = write_results(folder, run, recorder, {**begun, "state": "finished"})
        journal.remove()
    if reason := all_failed(recorder):
        raise HarnessError(reason)
    if isinstance(run, Run) and config.engine.profile:
        write_timeline(folder.path / TIMELINE, run.loops, run.requests)
    print_tables([*comparison_tables(summary), *run.tables()])
    print(f"\n{folder.path}/report.md")
    if config.engine.profile:
        print(f"{folder.path}/{TIMELINE} (first steps once more, stretched by the profiler)")
    return track(tracker, folder)


def begun_manifest(folder: RunFolder, command: list[str]) -> dict[str, Any]:
    """The manifest of this process; under ``resumed`` of the first one's if it resumes a run."""
    mine = manifest(command)
    if not folder.manifest_path.is_file():
        return mine
    first = folder.manifest()
    return {**first, "resumed": [*first.get("resumed", []), mine]}


def prepare(
    config: Config, recorder: Recorder, progress: Callable[[str], None], ranks: Ranks
) -> Run | DataParallelRun:
    """Load all that the run needs, in this process or in several.

    Raises:
        HarnessError: something in the config cannot be served, here or on another rank.
    """
    if config.engine.tp != ranks.size:
        raise ConfigError(
            f"engine.tp: {config.engine.tp} ranks asked for, but a job of a sweep is one process; "
            f"run it by itself, with `{launcher(config.engine.tp)}`"
        )
    if config.engine.dp > 1:
        return DataParallelRun(config, recorder, progress)
    with ranks.together():
        return Run(config, recorder, progress, ranks=ranks)


def decode(run: Run | DataParallelRun) -> KeyboardInterrupt | ShardError | None:
    """Decode everything; what has ended that early, if anything: Ctrl-C, of which a second one then
    ends the process, or a shard that was lost."""
    try:
        run.warm_up()
        run.go()
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return stop
    except ShardError as lost:
        return lost
    return None


def write_results(
    folder: RunFolder, run: Run | DataParallelRun, recorder: Recorder, written: Mapping[str, Any]
) -> dict[str, Any]:
    """Write all that is known of the finished requests; returns the metrics by strategy.

    What a strategy counts as its engine would is left out unless one process ran all: it counts
    steps, those of requests included that were run again.
    """
    steps, requests = recorder.frames()
    requests = compare_with_plain(requests)
    summary = summarise(steps, requests)
    check_identities(summary, steps)
    if written["state"] == "finished" and "resumed" not in written:
        for name, own in run.statistics().items():
            summary[name]["own"] = own
    folder.write_frames(steps, requests)
    folder.write_tokens(run.token_texts(steps))
    folder.write_summary(summary)
    folder.write_manifest(written)
    from harness.results.report import write_report  # noqa: PLC0415 (figures: not at the start)

    write_report(folder)
    return summary


@contextmanager
def _what_is_kept(folder: RunFolder, recorder: Recorder, ranks: Ranks) -> Iterator[None]:
    """Say what an end before the end leaves behind."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise HarnessError(
            f"{error.filename or folder.path} cannot be written ({error.strerror or error}), make "
            f"room: {_kept(folder, recorder, ranks)}"
        ) from None
    except (ShardError, RanksError) as error:
        raise type(error)(f"{error}: {_kept(folder, recorder, ranks)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(folder, recorder, ranks)) from None


def _kept(folder: RunFolder, recorder: Recorder, ranks: Ranks) -> str:
    if not folder.path.exists():
        return "no request had finished, nothing is kept"
    command = f"{launcher(ranks.size)} resume={folder.path}"
    if is_sweep(sweep := folder.path.parent):
        command = f"python -m harness.sweep resume {sweep}"
    return f"{len(recorder.requests)} finished requests are kept; continue with `{command}`"


@contextmanager
def _device_memory() -> Iterator[None]:
    """Name the settings that decide how much of it is taken."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        wanted = str(error).partition(" GPU ")[0]  # the rest is about the allocator
        raise HarnessError(
            f"{wanted} Lower engine.slots or engine.max_length, or name a smaller pair"
        ) from None


@contextmanager
def _nothing_left_behind(folder: RunFolder, recorder: Recorder) -> Iterator[None]:
    """Remove the folder of a run that ends before any of its requests has."""
    try:
        yield
    except (HarnessError, KeyboardInterrupt):
        if not recorder.requests:
            shutil.rmtree(folder.path)
        raise


class _Bars:
    """One progress bar per strategy."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, object] = {}

    def expect(self, names: list[str], total: int) -> None:
        self._tasks = {name: self._progress.add_task(name, total=total) for name in names}

    def tick(self, name: str) -> None:
        self._progress.advance(self._tasks[name])  # type: ignore[arg-type]


@contextmanager
def _progress() -> Iterator[_Bars]:
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bars(progress)
