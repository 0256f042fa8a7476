"""A sweep through submitit: on processes of this machine, and on a make-believe Slurm."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pandas as pd
import pytest

from harness.sweep.folder import State, SweepFolder
from tests.sweep.conftest import ITEMS, Command, only_sweep

SBATCH = """#!/bin/bash
cp "$1" script.sh
export SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1
export SLURM_ARRAY_JOB_ID=7
for task in 0 1; do
    SLURM_JOB_ID=$((7 + task)) SLURM_ARRAY_TASK_ID=$task bash script.sh >log$task 2>&1 &
done
echo Submitted batch job 7
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 == --unbuffered ]] || shift
    shift
done
exec "$@"
"""


@pytest.fixture(autouse=True)
def submitit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, whose processes find what this one finds."""
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, map(os.path.abspath, sys.path))))


@pytest.fixture
def slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that look like Slurm's, and run an array of two jobs here."""
    for name, script in {"sbatch": SBATCH, "srun": SRUN}.items():
        path = here / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_a_job_that_is_killed_stops_no_other(
    sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ("hydra/launcher=slurm", "hydra.launcher.cluster=local")
    assert sweep("strategy=tests.sweep.deadly:Deadly,plain", *local) == 1
    jobs = SweepFolder.open(only_sweep()).jobs
    assert [job.state for job in jobs] == [State.FAILED, State.FINISHED]
    assert "failed: 0 (strategy=tests.sweep.deadly\\:Deadly): Job" in capsys.readouterr().err
    assert len(pd.read_parquet(only_sweep() / "requests")) == len(ITEMS)


@pytest.mark.usefixtures("slurm")
def test_slurm_gets_an_array_whose_jobs_are_queued_again_at_their_time_limit(
    sweep: Command, here: Path
) -> None:
    asked = ("partition=gpu", "timeout_min=30", "setup=[umask 022]")
    given = [f"hydra.launcher.{each}" for each in asked]
    assert sweep("+strategy=plain,vllm", "hydra/launcher=slurm", *given) == 0
    assert len(pd.read_parquet(only_sweep() / "requests")) == 2 * len(ITEMS)
    script = (here / "script.sh").read_text().splitlines()
    assert {
        "#SBATCH --array=0-1%2",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=30",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --open-mode=append",
        "umask 022",
    } <= set(script)


def test_without_slurm_it_is_one_line(sweep: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("+strategy=plain", "hydra/launcher=slurm") == 2
    assert "there is no Slurm on this machine (no srun)" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


@pytest.mark.usefixtures("slurm")
def test_an_interrupt_takes_the_jobs_out_of_the_queue(
    sweep: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scancel = here / "bin" / "scancel"
    scancel.write_text('#!/bin/bash\necho "$@" >>cancelled\n')
    scancel.chmod(0o755)
    (here / "bin" / "sbatch").write_text("#!/bin/bash\necho Submitted batch job 7\n")  # all wait
    monkeypatch.setattr(
        "submitit.core.core.Job.results", lambda _: signal.raise_signal(signal.SIGINT)
    )
    assert sweep("+strategy=plain,vllm", "hydra/launcher=slurm") == 130
    assert (here / "cancelled").read_text().split() == ["7_0", "7_1"]
