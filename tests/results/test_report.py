from __future__ import annotations

import pytest

from harness.results.record import Recorder
from harness.results.report import head, main, write_report
from harness.results.sections import LISTED, divergences, failures
from harness.results.table import comparison_tables
from tests.results import request, tiny_run
from tests.results.folders import MANIFEST, tiny_folder

GPU = {"name": "Toy GPU", "count": 2, "driver": "570.1", "cuda": "12.8"}


@pytest.fixture
def run(tmp_path):
    return tiny_folder(tmp_path / "2025-01-02-tiny")


def frame(*requests):
    recorder = Recorder()
    recorder.requests += requests
    return recorder.frames()[1]


HEAD = """\
- Hardware: Toy CPU, 4 cores, 15.5 GiB
- Versions: python 3.11.9, torch 2.6.0
- Command: `python -m harness 'workload.kinds=[json, regex]'`
- Date: 2025-01-02T03:04:05+00:00
- Commit: abc123, with uncommitted changes
"""


def test_the_head_says_where_and_with_what():
    assert head(MANIFEST) == HEAD


def test_gpus_and_a_missing_checkout_are_said():
    manifest = {
        **MANIFEST,
        "hardware": {**MANIFEST["hardware"], "gpu": GPU},
        "git": {"commit": None, "dirty": None},
    }
    text = head(manifest)
    assert "15.5 GiB; 2 × Toy GPU, driver 570.1\n" in text
    assert "- Commit: none (not a checkout)\n" in text


def test_sections_come_in_the_order_of_reading(run):
    lines = write_report(run).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# 2025-01-02-tiny",
        "## Acceptance",
        "## Work",
        "## Time and outputs",
        "## Fill times",
        "## Rollback depth",
        "## Legend",
        "## Failed requests",
        "## Divergences from plain",
    ]


def test_the_answer_stands_before_everything_else(run):
    title, _, first, *_ = write_report(run).splitlines()
    assert title == "# 2025-01-02-tiny"
    assert first.startswith("vllm is fastest here: 14545.5 tokens/s, 1.45 times plain")


def test_the_report_is_written_beside_the_other_files(run):
    assert write_report(run) == (run.path / "report.md").read_text(encoding="utf-8")


def test_a_report_leaves_no_page_of_an_earlier_state(run):
    assert main([str(run.path)]) == 0
    assert run.page_path.is_file()
    write_report(run)  # as a resumed run does
    assert not run.page_path.exists()
    assert not run.csv_path.exists()


def test_the_legend_explains_every_column_once(run):
    text = write_report(run)
    for table in comparison_tables(run.strategies()):
        for header in table.headers:
            assert text.count(f"- **{header}**: ") == 1


def test_failed_requests_are_listed_with_their_reason():
    rows = frame(
        request("vllm", "a", [1]),
        request("vllm", "b", [], finish="failed", error="no token\nis legal"),
    )
    assert failures(rows) == ["vllm, request b: no token is legal"]


def test_a_run_without_failures_says_so(tmp_path):
    steps, requests = tiny_run()
    folder = tiny_folder(tmp_path / "run", steps, requests[requests["finish"] != "failed"])
    assert "## Failed requests\n\nNone.\n" in write_report(folder)


def test_near_ties_are_kept_apart_from_real_divergences():
    differ = {"identical": False, "first_divergence": 3}
    near, real = divergences(
        frame(
            request("vllm", "tie", [1], **differ, divergence_gap=0.0099),
            request("vllm", "real", [1], **differ, divergence_gap=0.01),
            request("vllm", "sampled", [1], **differ),
            request("vllm", "equal", [1], identical=True),
        )
    ).values()
    assert near == ["vllm, 1: tie@3 (0.0099)"]
    assert real == ["vllm, 2: real@3 (0.01), sampled@3"]


def test_a_long_list_of_divergences_is_cut_and_says_so():
    rows = [
        request("vllm", f"r{i}", [1], identical=False, first_divergence=0)
        for i in range(LISTED + 2)
    ]
    near, real = divergences(frame(*rows)).values()
    assert near == []
    assert real[0].startswith(f"vllm, {LISTED + 2}: r0@0, r1@0")
    assert real[0].endswith(", and 2 more")


def test_the_command_prints_and_writes_a_run(run, capsys):
    assert main([str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Toy CPU") == 1
    assert printed.count("Acceptance") == 1
    assert "vllm is fastest here" in printed
    assert "Side by side" not in printed
    assert {path.name for path in run.path.iterdir()} > {"report.md", "report.csv", "page.html"}


def test_several_runs_are_printed_and_written_side_by_side(run, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert main([str(run.path), str(run.path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Acceptance") == 2
    assert printed.count("Median of 2 repeats") == 1
    text = (out / "comparison.md").read_text(encoding="utf-8")
    assert "## Side by side" in text
    assert text.endswith(
        "A table of repeats shows the median of the repeats; an interval reaches from "
        "the lowest end to the highest.\n"
    )
    names = {"comparison.md", "comparison.csv", "comparison.html"}
    assert {path.name for path in out.iterdir()} == names


def test_latex_is_printed_alone(run, capsys):
    assert main([str(run.path), "--latex"]) == 0
    printed = capsys.readouterr().out
    tables = len(comparison_tables(run.strategies()))
    assert printed.count("\\begin{tabular}") == tables
    assert run.path.name not in printed


def test_one_run_cannot_be_set_side_by_side(run, tmp_path, capsys):
    assert main([str(run.path), "--out", str(tmp_path)]) == 2
    assert "--out: there is nothing to set side by side" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_line_and_status_2(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([str(run.path), str(run.path), "--out", str(tmp_path / "file")]) == 2
    assert "file cannot be written (File exists)" in capsys.readouterr().err


def test_a_run_that_cannot_be_written_is_one_line_and_status_2(run, capsys):
    run.csv_path.mkdir()
    assert main([str(run.path)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: {run.path} cannot be written")


def test_a_folder_that_is_no_run_is_one_line_and_status_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "is not a run folder" in printed.err
