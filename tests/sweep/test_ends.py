"""Sweeps that end badly, or begin wrongly: in one line, and without harm to other jobs."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from harness import cli
from harness.sweep import attempt, dataset
from harness.sweep.folder import State, SweepFolder
from strategies.base import Setup
from strategies.plain import Plain
from tests.sweep.conftest import Command, only_sweep, settings, status_of
from tests.sweep.test_sweep import TWO_BY_TWO, executed
from tests.test_durability import Process, stop


def test_an_override_without_values_makes_no_sweep(
    sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("+strategy=plain", "engine.slots=range(1,1)") == 2
    assert "error: engine.slots=range(1,1): a sweep over no value" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


def test_ranks_do_not_run_a_sweep_each(
    sweep: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sweep("+strategy=plain,vllm") == 2
    assert "engine.tp: 2 ranks started, but a job of a sweep is one" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


class Exiting(Plain):
    """Ends its process, as a script does that was meant to be run and not imported."""

    name = "exiting"

    def __init__(self, options: Any, setup: Setup) -> None:
        super().__init__(options, setup)
        sys.exit(5)


def test_a_strategy_that_exits_stops_no_other_job(sweep: Command) -> None:
    assert sweep("strategy=tests.sweep.test_ends:Exiting,plain") == 1
    failed, finished = SweepFolder.open(only_sweep()).jobs
    assert failed.reason == "SystemExit: 5"
    assert finished.state is State.FINISHED


def test_a_job_leaves_the_next_one_its_threads(
    sweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    inner = cli.execute

    def watched(config: Any, *given: Any) -> bool:
        seen.append(torch.get_num_threads())
        return inner(config, *given)

    monkeypatch.setattr(cli, "execute", watched)
    assert sweep("+strategy=plain", f"engine.threads={before + 1},0", "workload.limit=1") == 0
    assert seen == [before, before]


def test_a_job_counts_its_own_peak_of_memory(
    sweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: did.append("reset"))
    monkeypatch.setattr(cli, "execute", lambda *_: did.append("run") or True)
    sweep("+strategy=plain,vllm")
    assert did == ["reset", "run"] * 2


def test_a_resumed_job_that_is_killed_keeps_no_older_reason(
    sweep: Command, resume: Command, base: Path, tmp_path: Path
) -> None:
    assert sweep("+strategy=nonsense,plain") == 1
    folder = only_sweep()
    failed, _ = SweepFolder.open(folder).jobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "_begin", lambda *_: signal.raise_signal(signal.SIGINT))
        assert resume(str(folder)) == 130
    assert failed.state is State.NOT_BEGUN


def test_a_sweep_that_is_still_running_is_not_run_beside_itself(
    sweep: Command, resume: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("+strategy=nonsense,plain")
    folder = only_sweep()
    with SweepFolder.open(folder).held(), executed() as names:
        assert resume(str(folder)) == 2
    assert f"error: {folder} is still running; wait for it" in capsys.readouterr().err
    assert not names
    assert resume(str(folder)) == 1


def test_sigterm_ends_a_sweep_like_ctrl_c(base: Path, tmp_path: Path) -> None:
    script = stop("between two requests", "SIGTERM")
    process = Process(tmp_path, "-m", *settings(base), *TWO_BY_TWO, script=script)
    assert process.wait() == 130
    assert "interrupted: runs/" in process.printed


def test_a_disk_that_is_full_ends_a_sweep_in_one_line(
    sweep: Command,
    resume: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(dataset.pq, "write_table", full)
        assert sweep("+strategy=plain", "workload.limit=1") == 1  # the job's tables
        assert "finished requests are kept; continue with `python -m harness.sweep resume " in (
            capsys.readouterr().err
        )
    folder = only_sweep()
    (job,) = SweepFolder.open(folder).jobs
    shutil.rmtree(folder / "errors")
    (folder / "errors").touch()  # no room for a reason either
    job.fail("no room")
    assert job.state is State.UNFINISHED
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "_rows", full)
        assert resume(str(folder)) == 2
        assert "cannot be put together (No space left on device)" in capsys.readouterr().err
    assert resume(str(folder)) == 0


def test_a_folder_of_configs_is_there_for_a_resume(
    base: Path, resume: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = Path("mine", "experiment")
    group.mkdir(parents=True)
    (group / "short.yaml").write_text("# @package _global_\nworkload: {limit: 1}\n")
    asked = ["experiment=short", "+strategy=plain,nonsense"]
    monkeypatch.setattr(
        sys, "argv", ["harness", "-m", "--config-dir=mine", *settings(base), *asked]
    )
    assert status_of(cli.main) == 1
    assert resume(str(only_sweep())) == 1
    assert "1 of 2 jobs are finished" in capsys.readouterr().err.partition("continue")[2]
    assert len(pd.read_parquet(only_sweep() / "requests")) == 1
