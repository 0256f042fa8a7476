"""The command line: compose the config, run, write the run folder, print the tables."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.config import Config, schema, typed
from harness.errors import EXIT_BAD_INPUT, HarnessError
from harness.results.manifest import manifest
from harness.results.metrics import check_identities, compare_with_plain, summarise
from harness.results.record import Recorder, RunFolder
from harness.results.table import comparison_tables, print_tables
from harness.results.trackers import EXIT_UNTRACKED, find_tracker, track
from harness.run import Run, all_failed
from harness.timeline import TIMELINE, write_timeline


def main() -> None:
    """Entry point of ``python -m harness``. Bad input ends in one line and exit status 2.

    A tracker that failed is said last, by ``EXIT_UNTRACKED``: a sweep goes on without it. Where a
    launcher runs the jobs in other processes, only their warnings say so.
    """
    tracked: list[bool] = []  # Hydra hands no results back

    def job(config: DictConfig) -> None:
        with _one_line_errors():  # here too: what leaves this function, Hydra talks about
            command = [sys.executable, *sys.orig_argv[1:]]
            tracked.append(execute(typed(config), OmegaConf.to_yaml(config), command))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and the message is ours to print
    ConfigStore.instance().store(name="schema", node=schema())
    with _one_line_errors():
        hydra.main(version_base="1.3", config_path="pkg://configs", config_name="config")(job)()
    if not all(tracked):
        sys.exit(EXIT_UNTRACKED)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (HarnessError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {_explain(error)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def _explain(error: Exception) -> str:
    """One line; Hydra's own messages with their cause, and without how its search path looks."""
    message = str(error).split("Config search path")[0]
    if unknown := re.match(r"Could not override '(.*?)'", message):
        message = f"{unknown[1]}: no such setting; `python -m harness --cfg job` lists them"
    elif isinstance(error.__cause__, OmegaConfBaseException):
        message += f": {str(error.__cause__).splitlines()[0]}"
    return re.sub(r"\s+", " ", message).strip()


def execute(config: Config, yaml: str, command: list[str]) -> bool:
    """Run what ``config`` says.

    Args:
        config: what to run.
        yaml: the composed config, for the run folder.
        command: what the user typed.

    Returns:
        Whether the tracker took the run; true without one.

    Raises:
        HarnessError: the config cannot be served, or not one request could be.
    """
    folder = RunFolder.dated(Path(config.runs), config.name)
    folder.write_config(yaml)
    recorder = Recorder()
    with _progress() as bar:
        try:
            tracker = find_tracker(config.tracker, Path(config.runs))
            run = Run(config, recorder, bar.tick)
        except HarnessError:
            shutil.rmtree(folder.path)  # nothing ran
            raise
        bar.expect([each.name for each in run.strategies], len(run.items))
        run.warm_up()
        run.go()
    steps, requests = recorder.frames()
    requests = compare_with_plain(requests)
    summary = summarise(steps, requests)
    check_identities(summary, steps)
    for strategy in run.strategies:
        if own := strategy.statistics():
            summary[strategy.name]["own"] = own
    folder.write_manifest({**manifest(command), "setup": run.setup(), "engine": run.facts()})
    folder.write_frames(steps, requests)
    folder.write_tokens(run.token_texts(steps))
    folder.write_summary(summary)
    from harness.results.report import write_report  # noqa: PLC0415 (figures: not at the start)

    write_report(folder)
    if reason := all_failed(recorder):
        raise HarnessError(reason)
    if config.engine.profile:
        write_timeline(folder.path / TIMELINE, run.loops, run.requests)
    print_tables(comparison_tables(summary))
    print(f"\n{folder.path}/report.md")
    if config.engine.profile:
        print(f"{folder.path}/{TIMELINE} (first steps once more, stretched by the profiler)")
    return track(tracker, folder)


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
