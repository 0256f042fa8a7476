"""Every file of ``configs/experiment`` is one command, and its README knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import configs
import strategies
from harness.cli import main
from harness.config import chosen, typed
from harness.results.report import main as report
from harness.sweep.folder import SweepFolder
from tests.sweep.conftest import Command, only_sweep, status_of

EXPERIMENTS = sorted(path.stem for path in Path(configs.__file__).parent.glob("experiment/*.yaml"))
JOBS = {"paper": 12, "draft_length": 6, "grammars": 6, "slots": 8, "drafters": 5, "lengths": 6}
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
    assert all("plain" in [each.name for each in chosen(config)] for config in found)


@pytest.mark.parametrize("profile", ["quick", "full"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_profile_sizes_an_experiment(name: str, profile: str) -> None:
    with initialize_config_module("configs", version_base="1.3"):
        config = compose("config", [f"experiment={name}", f"profile={profile}"])
    limit = {"quick": 64, "full": None}[profile]
    assert config.workload.limit == (10 if name == "orientation" else limit)
    assert config.name == name
    assert OmegaConf.is_missing(config, "strategy")


FEWER = {
    "draft_length": ("engine.draft_tokens=2,3", "compare=[plain,vllm]"),
    "drafters": ("drafter=model,ngram",),
    "lengths": ("engine.slots=1", "drafter.length=p_min,adaptive", "compare=[plain,deepinfer]"),
}
"""Two jobs of an experiment: values on the command line replace those of its file."""


@pytest.mark.parametrize("name", FEWER)
def test_an_experiment_runs_and_its_report_has_the_figure(name: str, sweep: Command) -> None:
    assert sweep(f"experiment={name}", "name=part", "profile=smoke", *FEWER[name]) == 0
    folder = only_sweep()
    assert len(SweepFolder.open(folder).finished) == 2
    assert report([str(folder)]) == 0
    swept = next(each for each in FEWER[name] if "," in each).split("=")[0]
    over = "drafter.name" if swept == "drafter" else swept
    assert f"## tok/s over {over}\n" in (folder / "comparison.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("here")
def test_drafters_without_logits_leave_out_what_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.cli.execute", lambda *_: True)
    monkeypatch.setattr("sys.argv", ["harness", "-m", "experiment=drafters"])
    status_of(main)
    jobs = SweepFolder.open(only_sweep()).jobs
    served = {
        config.drafter.name: {each.name for each in chosen(config)}
        for config in (typed(job.folder.config()) for job in jobs)
    }
    assert served.pop("model") == set(strategies.registry())
    assert dict.fromkeys(served, served["ngram"]) == served
    assert served["ngram"] == set(strategies.registry()) - {"trtllm"}


def test_a_sweep_that_is_shared_out_is_reported_as_one(sweep: Command, tmp_path: Path) -> None:
    parts = ("engine.draft_tokens=3", "engine.draft_tokens=2,4")
    for number, part in enumerate(parts):
        compare = ("compare=[plain,vllm]", f"name=part-{number}")
        assert sweep("experiment=draft_length", "profile=smoke", *compare, part) == 0
    assert report([*map(str, sorted(Path("runs").iterdir())), "--out", "whole"]) == 0
    assert "| strategy | 2 | 3 | 4 |" in Path("whole", "comparison.md").read_text(encoding="utf-8")
