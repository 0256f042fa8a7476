"""A sweep in joblib's pool of processes, which breaks as a whole when one of them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from harness.sweep.folder import State, SweepFolder
from harness.sweep.plugins import missing_extra
from tests.sweep.conftest import ITEMS, Command, only_sweep


@pytest.fixture
def pool() -> Iterator[tuple[str, str]]:
    """The overrides for a pool; joblib keeps it for the next call, which is in another folder."""
    loky = pytest.importorskip("joblib.externals.loky", reason="the extra `joblib` is missing")
    yield "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"
    loky.get_reusable_executor().shutdown(kill_workers=True)


def test_a_killed_process_takes_no_other_job_along_nor_what_had_failed_before(
    sweep: Command,
    resume: Command,
    pool: tuple[str, str],
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    items = tmp_path / "items.jsonl"  # not there yet
    names = "tests.sweep.deadly:Deadly,tests.sweep.deadly:Patient"
    assert sweep(f"strategy={names}", f"workload.path={items}") == 1
    items.write_text((base / "items.jsonl").read_text())
    folder = only_sweep()
    assert resume(str(folder), *pool) == 1
    jobs = SweepFolder.open(folder).jobs
    assert [job.state for job in jobs] == [State.FAILED, State.FINISHED]
    assert "Deadly): its process was killed" in capsys.readouterr().err
    assert len(pd.read_parquet(folder / "requests")) == len(ITEMS)


def test_a_job_in_the_pool_may_share_its_requests_out(
    sweep: Command, pool: tuple[str, str]
) -> None:
    assert sweep("+strategy=plain", "engine.dp=2", *pool) == 0
    assert len(pd.read_parquet(only_sweep() / "requests")) == len(ITEMS)


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "joblib"), ("slurm", "slurm")])
def test_without_a_launcher_its_extra_is_named(launcher: str, extra: str) -> None:
    message = f"In 'config': Could not find 'hydra/launcher/{launcher}'\n\nAvailable options"
    assert f"pip install 'grammar-draft-harness[{extra}]'" in str(missing_extra(message))
    assert missing_extra("Could not find 'grammar/fog'") is None
