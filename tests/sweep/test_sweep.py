"""A sweep on the basic launcher: its folder, its data set, what fails, and how it goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.dataset as ds
import pytest

from harness import cli
from harness.core import RequestTrace, columns
from harness.results.journal import Journal
from harness.results.record import RunFolder
from harness.results.regress import main as regress
from harness.results.report import main as report
from harness.sweep.folder import Job, State, SweepFolder
from tests.sweep.conftest import ITEMS, Command, only_sweep, settings
from tests.test_durability import Process, stop

TWO_BY_TWO = ("+strategy=plain,vllm", "grammar=xgrammar,llguidance")


@contextmanager
def executed() -> Iterator[list[str]]:
    """The run folders in which something is run meanwhile."""
    names: list[str] = []
    inner = cli.execute

    def watched(config: Any, folder: RunFolder, command: list[str]) -> bool:
        names.append(folder.path.name)
        return inner(config, folder, command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "execute", watched)
        yield names


def outputs(folder: Path) -> list[tuple[Any, ...]]:
    """What the sweep's data set says was written, request by request."""
    rows = pd.read_parquet(folder / "requests").sort_values(["job", "request"])
    return list(zip(rows.job, rows.strategy, rows.request, rows.text, strict=True))


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What a sweep has written that nobody has disturbed."""
    root = tmp_path_factory.mktemp("whole")
    assert Process(root, "-m", *settings(base), *TWO_BY_TWO).wait() == 0
    return outputs(only_sweep(root))


def test_two_by_two_jobs_make_one_folder_with_four_runs(sweep: Command) -> None:
    assert sweep(*TWO_BY_TWO) == 0
    folder = only_sweep()
    jobs = SweepFolder.open(folder).jobs
    assert [job.differing for job in jobs] == [
        ("+strategy=plain", "grammar=xgrammar"),
        ("+strategy=plain", "grammar=llguidance"),
        ("+strategy=vllm", "grammar=xgrammar"),
        ("+strategy=vllm", "grammar=llguidance"),
    ]
    runs = [RunFolder.open(job.folder.path) for job in jobs]
    assert [list(run.strategies()) for run in runs] == [["plain"], ["plain"], ["vllm"], ["vllm"]]
    assert [run.config().grammar.engine for run in runs] == ["xgrammar", "llguidance"] * 2
    command = SweepFolder.open(folder).command
    assert all(run.manifest()["command"] == command for run in runs)


def test_the_rows_of_all_jobs_are_one_data_set(sweep: Command) -> None:
    sweep("+strategy=vllm", "engine.draft_tokens=2,3", "grammar=xgrammar,llguidance")
    folder = only_sweep()
    requests = pd.read_parquet(folder / "requests")
    assert len(requests) == 4 * len(ITEMS)
    assert requests["override.engine.draft_tokens"].dtype == int
    assert set(requests.columns) - columns(RequestTrace).keys() == {
        "job",
        "override.engine.draft_tokens",
        "override.grammar",
    }
    engine = requests.groupby(["override.grammar", "override.engine.draft_tokens"]).engine
    assert engine.unique().map(list).to_dict() == {
        (name, drafts): [name] for name in ("xgrammar", "llguidance") for drafts in (2, 3)
    }
    steps = ds.dataset(folder / "steps", partitioning="hive").to_table().to_pandas()
    drafted = steps.groupby("override.engine.draft_tokens").drafted_raw.max()
    assert drafted.to_dict() == {2: 2, 3: 3}


def test_a_job_that_fails_stops_no_other_and_is_named_with_its_reason(
    sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("+strategy=plain,nonsense,vllm") == 1
    folder = only_sweep()
    states = [job.state for job in SweepFolder.open(folder).jobs]
    assert states == [State.FINISHED, State.FAILED, State.FINISHED]
    printed = capsys.readouterr().err
    assert f"{folder}: 2 of 3 jobs are finished" in printed
    assert "failed: 1 (+strategy=nonsense): strategy: 'nonsense' is none of" in printed
    assert f"continue with `python -m harness.sweep resume {folder}`" in printed
    assert "Traceback" not in printed
    assert set(pd.read_parquet(folder / "requests").job) == {0, 2}


def test_resume_runs_just_what_failed_and_goes_on_where_its_journal_ends(
    sweep: Command, resume: Command, whole: list[tuple[Any, ...]]
) -> None:
    append = Journal.append

    def failing(self: Journal, request: Any, steps: Any) -> None:
        append(self, request, steps)
        if (request.strategy, request.engine) == ("vllm", "xgrammar"):
            failing.left -= 1  # type: ignore[attr-defined]
            if not failing.left:  # type: ignore[attr-defined]
                raise RuntimeError("device lost")

    failing.left = 3  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", failing)
        assert sweep(*TWO_BY_TWO) == 1
    folder = only_sweep()
    failed = SweepFolder.open(folder).jobs[2]
    assert failed.reason == "RuntimeError: device lost"
    assert "Traceback" in failed.error_path.read_text()
    with executed() as names:
        assert resume(str(folder)) == 0
    assert names == [failed.name]
    assert len(failed.folder.manifest()["resumed"]) == 1
    assert outputs(folder) == whole
    with executed() as names:
        assert resume(str(folder)) == 0
    assert not names


def test_what_a_failed_attempt_left_is_replaced(
    sweep: Command, resume: Command, base: Path, tmp_path: Path
) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"id": "long", "prompt": "x" * 600}))
    assert sweep("+strategy=plain,vllm", f"workload.path={items}") == 1
    folder = only_sweep()
    assert (SweepFolder.open(folder).jobs[0].folder.path / "summary.json").is_file()
    items.write_text((base / "items.jsonl").read_text())
    assert resume(str(folder)) == 0
    rows = pd.read_parquet(folder / "requests")
    assert len(rows) == 2 * len(ITEMS)
    assert not rows.duplicated(["job", "strategy", "request"]).any()
    assert not (rows.request == "long").any()


@pytest.mark.parametrize("sent", ["SIGKILL", "SIGINT"])
def test_a_sweep_that_is_killed_or_interrupted_goes_on(
    sent: str, base: Path, whole: list[tuple[Any, ...]], resume: Command, tmp_path: Path
) -> None:
    script = stop("between two requests", sent)  # of 24, behind the tenth
    process = Process(tmp_path, "-m", *settings(base), *TWO_BY_TWO, script=script)
    assert process.wait() == (-signal.SIGKILL if sent == "SIGKILL" else 130)
    folder = only_sweep()
    states = [job.state for job in SweepFolder.open(folder).jobs]
    assert states == [State.FINISHED, State.UNFINISHED, State.NOT_BEGUN, State.NOT_BEGUN]
    if sent == "SIGINT":
        assert "unfinished: 1 (+strategy=plain grammar=llguidance)" in process.printed
    with executed() as names:
        assert resume(str(folder)) == 0
    assert names == [f"{folder.name}-{number}" for number in (1, 2, 3)]
    assert outputs(folder) == whole


def test_a_report_and_a_regression_check_read_the_whole_sweep(
    sweep: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep(*TWO_BY_TWO)
    sweep(*TWO_BY_TWO)
    one, two = sorted(Path("runs").iterdir())
    assert report([str(one)]) == 0
    rows = pd.read_csv(one / "comparison.csv")
    assert set(rows.run) == {f"{one.name}-{number}" for number in range(4)}
    assert set(rows["grammar.engine"]) == {"xgrammar", "llguidance"}
    capsys.readouterr()
    assert regress([str(one), str(two)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# 0 of 2 groups of the sweep are worse")
    assert "## grammar=xgrammar" in printed
    summary = two / f"{two.name}-3" / "summary.json"
    changed = json.loads(summary.read_text())
    changed["strategies"]["vllm"]["accept_rate"] -= 0.5
    summary.write_text(json.dumps(changed))
    assert regress([str(one), str(two)]) == 1
    assert "# 1 of 2 groups of the sweep are worse" in capsys.readouterr().out


def test_repeats_take_turns_and_are_reported_together(sweep: Command) -> None:
    """What the machine is busy with for a while is not to fall on all repeats of one job."""
    assert sweep("engine.draft_tokens=2,3", "compare=[plain,vllm]", "repeat=1,2") == 0
    folder = only_sweep()
    assert [job.differing for job in SweepFolder.open(folder).jobs] == [
        ("repeat=1", "engine.draft_tokens=2"),
        ("repeat=1", "engine.draft_tokens=3"),
        ("repeat=2", "engine.draft_tokens=2"),
        ("repeat=2", "engine.draft_tokens=3"),
    ]
    assert report([str(folder)]) == 0
    text = (folder / "comparison.md").read_text(encoding="utf-8")
    table = text.split("## rolled back over engine.draft_tokens, median of 2 repeats")[1].split(
        "##"
    )[0]
    assert "| strategy | 2 | 3 |" in table
    runs = [job.folder.strategies()["vllm"] for job in SweepFolder.open(folder).jobs]
    first, second, *again = [run["rollback_tokens"] for run in runs]
    assert again == [first, second]
    assert f"| vllm | {first} | {second} |" in table
    rows = pd.read_csv(folder / "comparison.csv")
    assert rows.groupby(["repeat", "engine.draft_tokens"]).run.nunique().tolist() == [1] * 4


BAD_INPUT = {
    "a setting that none can compose": (["engine.slot=1,2"], "engine.slot: no such setting"),
    "a value of another type": (["engine.slots=1,many"], "engine.slots"),
    "one run's resume": (["resume=runs/x"], "python -m harness.sweep resume DIR"),
    "a launcher that nobody has": (["hydra/launcher=fog"], "hydra/launcher/fog"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_ends_before_anything_begins(
    case: str, sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD_INPUT[case]
    assert sweep("+strategy=plain", *arguments) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error: " in each]
    assert words in line
    assert not list(Path().glob("runs/*"))


def test_what_is_no_sweep_or_another_sweep_is_refused(
    resume: Command, sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume("nowhere") == 2
    assert "nowhere is not a sweep: it has no sweep.json" in capsys.readouterr().err
    sweep("+strategy=plain")
    assert resume(str(only_sweep()), "engine.slots=2") == 2
    assert "a sweep keeps its settings; leave out engine.slots=2" in capsys.readouterr().err


def test_a_job_that_had_ended_is_not_run_again(sweep: Command, resume: Command) -> None:
    """As when a launcher sends it again: its machine died before it was told."""
    sweep("+strategy=plain,vllm")
    folder = only_sweep()
    state = Job.state
    with pytest.MonkeyPatch.context() as patch, executed() as names:
        seen: list[int] = []

        def late(self: Job) -> State:
            seen.append(self.number)
            return State.NOT_BEGUN if seen.count(self.number) == 1 else state.fget(self)  # type: ignore[attr-defined]

        patch.setattr(Job, "state", property(late))
        assert resume(str(folder)) == 0
    assert not names
