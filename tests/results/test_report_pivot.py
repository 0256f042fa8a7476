"""A sweep's figures: one table a number, strategies down, one setting across."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.results.pivot import independent, pivots
from harness.results.record import RunFolder
from harness.results.report import main
from harness.results.side_by_side import (
    SHOWN,
    differences,
    labelled,
    settings_table,
    tidy_runs,
)
from harness.results.table import NONE, Table
from tests.results import tiny_run
from tests.results.folders import MANIFEST, tiny_folder


def job(
    path: Path, drafts: int = 4, engine: str = "xgrammar", repeat: int = 0, **kept: Any
) -> RunFolder:
    """A run with these settings; its numbers are always the same."""
    config = {
        "repeat": repeat,
        "grammar": {"engine": engine},
        "engine": {"draft_tokens": drafts},
    }
    return tiny_folder(path / f"{engine}-{drafts}", **kept, config=config)


def tables(*folders: RunFolder) -> list[Table]:
    runs = labelled(folders)
    return pivots(runs, differences(runs))


def test_each_number_has_a_table_over_the_setting(tmp_path: Path) -> None:
    found = tables(job(tmp_path, 2), job(tmp_path, 4))
    assert [table.title for table in found] == [
        f"{number} over engine.draft_tokens" for number in SHOWN
    ]
    ratio, rolled_back = found[1], found[SHOWN.index("rolled back")]
    assert ratio.headers == ("strategy", "2", "4")
    assert ratio.rows == (
        ("plain", "1.00 (1.00–1.00)", "1.00 (1.00–1.00)"),
        ("vllm", "1.45 (1.14–2.00)", "1.45 (1.14–2.00)"),
    )
    assert ratio.docs[2].endswith("paired with plain (ratio); with engine.draft_tokens = 4")
    assert rolled_back.rows[0] == ("plain", "0", "0")
    assert int(rolled_back.rows[1][1]) > 0


def test_the_setting_with_most_values_goes_across_and_the_others_down(tmp_path: Path) -> None:
    engines = ("xgrammar", "llguidance")
    speed, *_ = tables(*(job(tmp_path, drafts, each) for each in engines for drafts in (2, 4, 8)))
    assert speed.headers == ("grammar.engine", "strategy", "2", "4", "8")
    assert [row[:2] for row in speed.rows] == [
        ("xgrammar", "plain"),
        ("xgrammar", "vllm"),
        ("llguidance", "plain"),
        ("llguidance", "vllm"),
    ]


def test_numbers_stand_by_size_whatever_order_the_runs_are_in(tmp_path: Path) -> None:
    """A sweep that was shared out is several, each with a part of the values."""
    speed, *_ = tables(*(job(tmp_path, drafts) for drafts in (8, 16, 2)))
    assert speed.headers == ("strategy", "2", "8", "16")


def test_what_was_not_run_is_an_empty_cell(tmp_path: Path) -> None:
    steps, requests = (frame[frame["strategy"] == "plain"] for frame in tiny_run())
    alone = job(tmp_path, 2, steps=steps, requests=requests)
    speed, *_ = tables(alone, job(tmp_path, 4))
    (name, left, right) = speed.rows[1]
    assert (name, left) == ("vllm", NONE)
    assert right != NONE


def test_strategies_that_ran_as_jobs_of_their_own_share_a_column(tmp_path: Path) -> None:
    jobs = []
    for name in ("plain", "vllm"):
        steps, requests = (frame[frame["strategy"] == name] for frame in tiny_run())
        jobs += [job(tmp_path / name, drafts, steps=steps, requests=requests) for drafts in (2, 4)]
    speed, *_ = tables(*jobs)
    assert [row[0] for row in speed.rows] == ["plain", "vllm"]
    assert all(NONE not in row for row in speed.rows)


def test_a_setting_that_goes_along_with_another_is_left_out(tmp_path: Path) -> None:
    versions = {**MANIFEST, "versions": {"xgrammar": "0.2.9"}}
    runs = labelled([job(tmp_path, 2), job(tmp_path, 4, "llguidance", manifest=versions)])
    differing = differences(runs)
    assert differing.columns.tolist() == ["grammar.engine", "engine.draft_tokens"]
    assert independent(differing).columns.tolist() == ["grammar.engine"]
    assert pivots(runs, differing)[0].headers == ("strategy", "xgrammar", "llguidance")


def test_repeats_share_a_cell(tmp_path: Path) -> None:
    """The median, and the interval from the lowest end to the highest."""
    repeats = [
        job(tmp_path / str(repeat), drafts, steps=slower(repeat), repeat=repeat)
        for repeat in (1, 2, 3)
        for drafts in (2, 4)
    ]
    found = {table.title: table for table in tables(*repeats)}
    (plain, vllm) = found["tok/s to plain over engine.draft_tokens, median of 3 repeats"].rows
    assert plain[1] == "1.00 (1.00–1.00)"
    alone = [tables(each, job(tmp_path / "other", 8))[1].rows[1][1] for each in repeats[::2]]
    middle, lows, highs = zip(*(each.replace("–", " (").split(" (") for each in alone), strict=True)
    assert middle[1] != middle[0] != middle[2]
    assert vllm[1] == vllm[2] == f"{middle[1]} ({min(lows)}–{max(highs)}"
    counts = found["rolled back over engine.draft_tokens, median of 3 repeats"]
    assert counts.rows[1][1:] == ("7", "7")
    assert "median of the repeats" in counts.docs[1]


def test_a_title_says_of_how_many_repeats_where_not_all_are_there(tmp_path: Path) -> None:
    """A job is not finished, say."""
    repeats = [job(tmp_path / str(at), drafts, repeat=at) for at in (1, 2) for drafts in (2, 4)]
    title = tables(*repeats[:-1])[0].title
    assert title == "tok/s over engine.draft_tokens, median of 1 to 2 repeats"


def test_runs_of_two_commits_are_compared_where_none_is_taken_for_a_repeat(tmp_path: Path) -> None:
    other = {**MANIFEST, "git": {"commit": "def456", "dirty": False}}
    repeats = [job(tmp_path / str(at), 2, repeat=at) for at in (1, 2)]
    found = tables(*repeats, job(tmp_path / "other", 4, manifest=other))
    assert found[0].headers == ("strategy", "2", "4")


def test_which_repeat_a_run_is_stands_beside_it(tmp_path: Path) -> None:
    runs = labelled([job(tmp_path / str(at), repeat=at) for at in (1, 2)])
    assert settings_table(differences(runs)).headers == ("run", "repeat")
    assert tidy_runs(runs).groupby("repeat").run.nunique().tolist() == [1, 1]


def slower(times: int) -> Any:
    """The steps of the tiny run, where those of vllm took so many times as long."""
    steps = tiny_run()[0]
    theirs = steps["strategy"] == "vllm"
    names = ["draft_us", "verify_us", "grammar_us", "host_us"]
    return steps.assign(**{name: steps[name].where(~theirs, steps[name] * times) for name in names})


def test_repeats_and_nothing_else_are_one_table(tmp_path: Path) -> None:
    (table,) = tables(*(job(tmp_path / str(at), repeat=at) for at in (1, 2)))
    assert table.title == "Median of 2 repeats"
    assert table.headers == ("strategy", *SHOWN)
    assert [row[0] for row in table.rows] == ["plain", "vllm"]
    assert "median of the repeats" in table.docs[1]


@pytest.mark.parametrize("drafts", [(4, 4), (2, 4, 4)], ids=["all alike", "some alike"])
def test_runs_of_two_commits_are_no_repeats(tmp_path: Path, drafts: tuple[int, ...]) -> None:
    folders = [job(tmp_path / str(at), each) for at, each in enumerate(drafts)]
    other = {**MANIFEST, "git": {"commit": "def456", "dirty": False}}
    assert tables(*folders)
    assert not tables(*folders[:-1], job(tmp_path / "other", 4, manifest=other))


def test_the_report_prints_and_writes_these_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(job(tmp_path, drafts).path) for drafts in (2, 4)]
    assert main([*paths, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("rolled back over engine.draft_tokens\n") == 1
    assert "Side by side" not in printed
    text = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    assert text.startswith("# 2 runs side by side\n\n- Hardware: Toy CPU, 4 cores, 15.5 GiB\n")
    assert "- Command: `python -m harness 'workload.kinds=[json, regex]'`\n" in text
    assert text.count("## tok/s over engine.draft_tokens\n") == 1
    assert "A table of repeats" not in text
    assert text.index(" over ") < text.index("## Side by side")


def test_the_head_of_several_runs_leaves_out_what_differs(tmp_path: Path) -> None:
    other = {**MANIFEST, "command": ["python", "-m", "harness"], "date": "2025-01-03"}
    folders = [job(tmp_path, 2), job(tmp_path, 4, manifest=other)]
    main([*(str(each.path) for each in folders), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    commands = "`python -m harness 'workload.kinds=[json, regex]'`, `python -m harness`"
    assert f"- Command: {commands}\n" in text
    assert "- Date" not in text
