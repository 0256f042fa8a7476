"""Every file of ``configs/experiment`` is one command, and its README knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import configs
import strategies
from harness.cli import main
from harness.config import typed
from harness.sweep.folder import SweepFolder
from tests.sweep.conftest import Command, only_sweep, status_of

EXPERIMENTS = sorted(path.stem for path in Path(configs.__file__).parent.glob("experiment/*.yaml"))
JOBS = {"paper": 12, "draft_length": 6, "grammars": 6, "slots": 8}
"""Of the experiments that are sweeps."""
README = Path(__file__).parents[2] / "experiments" / "README.md"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", JOBS)
def test_an_experiment_is_a_sweep_of_as_many_jobs_as_its_readme_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"python -m harness -m experiment={name} profile=quick"
    monkeypatch.setattr("harness.cli.execute", lambda *_: True)
    monkeypatch.setattr("sys.argv", command.split()[2:])
    status_of(main)
    jobs = SweepFolder.open(only_sweep()).jobs
    assert len(jobs) == JOBS[name]
    assert f"`{command}` | {len(jobs)} |" in README.read_text()
    found = [typed(job.folder.config()) for job in jobs]
    assert len({str(config) for config in found}) == len(jobs)
    assert all(set(config.compare) <= set(strategies.registry()) for config in found)
    assert all("plain" in config.compare for config in found)


@pytest.mark.parametrize("profile", ["quick", "full"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_profile_sizes_an_experiment(name: str, profile: str) -> None:
    with initialize_config_module("configs", version_base="1.3"):
        config = compose("config", [f"experiment={name}", f"profile={profile}"])
    limit = {"quick": 64, "full": None}[profile]
    assert config.workload.limit == (10 if name == "orientation" else limit)
    assert config.name == name
    assert OmegaConf.is_missing(config, "strategy")


def test_an_experiment_runs(sweep: Command) -> None:
    values = ("engine.draft_tokens=2,3", "compare=[plain,vllm]")
    assert sweep("experiment=draft_length", "profile=smoke", *values) == 0
    assert len(SweepFolder.open(only_sweep()).finished) == 2
