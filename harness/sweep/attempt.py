"""One job of a sweep, in whatever process a launcher has put it."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.config import Config, typed
from harness.errors import HarnessError, named
from harness.results.record import RunFolder
from harness.sweep.folder import Job, State, SweepFolder, is_sweep
from harness.sweep.gpus import gives_none, own_gpus

Execute = Callable[[Config, RunFolder, list[str]], bool]
"""Runs a config in its folder, or the rest of it; whether the tracker took it."""


def job_of_this_process() -> tuple[SweepFolder, Job] | None:
    """The job that Hydra has started this process, or this call, for; None outside a sweep.

    It shows in the output folder: other sweepers than ours know no folder of a sweep.
    """
    config = HydraConfig.get()
    output = Path(config.runtime.output_dir)
    if config.mode is not RunMode.MULTIRUN or not is_sweep(output.parent):
        return None
    sweep = SweepFolder.open(output.parent)
    return sweep, next(job for job in sweep.jobs if job.name == output.name)


def attempt(sweep: SweepFolder, job: Job, composed: DictConfig, execute: Execute) -> bool:
    """Run a job, or what is left of it. What goes wrong is written down: the others go on.

    A job that has come to its end is left alone: where a machine dies right behind that, a
    launcher may not know of it and send the job again.

    Args:
        sweep: that it belongs to.
        job: to run.
        composed: its config.
        execute: runs it.

    Returns:
        Whether the tracker took the run; true without one.

    Raises:
        KeyboardInterrupt: the sweep is to end.
    """
    if job.state is State.FINISHED:
        return True
    print(f"job {job}", file=sys.stderr)
    tracked = True
    try:
        config, folder = _begin(job, composed)
        with _own_gpus(sweep, config), _alone():
            tracked = execute(config, folder, sweep.command)
    except HarnessError as error:
        _failed(job, str(error))
    except (Exception, SystemExit) as error:  # a strategy may call `sys.exit`
        _failed(job, named(error), traceback.format_exc())
    else:
        job.error_path.unlink(missing_ok=True)
    return tracked


def _own_gpus(sweep: SweepFolder, config: Config) -> AbstractContextManager[None]:
    if gives_none(HydraConfig.get().launcher):
        return own_gpus(sweep.path, config.pair.device, config.engine.dp)
    return nullcontext()


@contextmanager
def _alone() -> Iterator[None]:
    """Jobs that one process runs one after the other find nothing of each other: neither
    ``engine.threads`` nor, where they count their own, the peak of the GPU's memory."""
    threads = torch.get_num_threads()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _failed(job: Job, reason: str, details: str = "") -> None:
    job.fail(reason, details)
    print(f"{details}error: job {job}: {reason}", file=sys.stderr)


def _begin(job: Job, composed: DictConfig) -> tuple[Config, RunFolder]:
    """The settings and the folder: those of the journal where there is one, else new ones.

    What an attempt without one has left (tables in which every request failed) is replaced.
    """
    path = job.folder.path
    if job.folder.journal_path.is_file():
        folder = RunFolder.unfinished(path)
        return typed(folder.config()), folder
    config = typed(composed)
    if path.exists():
        shutil.rmtree(path)
    folder = RunFolder.create(path)
    folder.write_config(OmegaConf.to_yaml(composed))
    return config, folder
