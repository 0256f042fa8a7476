"""A sweep in joblib's pool of processes, which breaks as a whole when one of them is killed."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.sweep.folder import State, SweepFolder
from harness.sweep.plugins import missing_extra
from tests.sweep.conftest import ITEMS, Command, only_sweep


def test_a_killed_process_takes_no_other_job_along(
    sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("joblib", reason="the extra `joblib` is not installed")
    pool = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert sweep("strategy=tests.sweep.deadly:Deadly,plain", *pool) == 1
    jobs = SweepFolder.open(only_sweep()).jobs
    assert [job.state for job in jobs] == [State.FAILED, State.FINISHED]
    assert "Deadly): its process was killed" in capsys.readouterr().err
    assert len(pd.read_parquet(only_sweep() / "requests")) == len(ITEMS)


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "joblib"), ("slurm", "slurm")])
def test_without_a_launcher_its_extra_is_named(launcher: str, extra: str) -> None:
    message = f"In 'config': Could not find 'hydra/launcher/{launcher}'\n\nAvailable options"
    assert f"pip install 'grammar-draft-harness[{extra}]'" in str(missing_extra(message))
    assert missing_extra("Could not find 'grammar/fog'") is None
