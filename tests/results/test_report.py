from __future__ import annotations

import pytest

from harness.results.metrics import compare_with_plain, summarise
from harness.results.record import Recorder, RunFolder
from harness.results.report import LISTED, divergences, failures, head, main, write_report
from harness.results.table import comparison_tables
from tests.results import request, tiny_run

MANIFEST = {
    "date": "2025-01-02T03:04:05+00:00",
    "command": ["python", "-m", "harness", "workload.kinds=[json, regex]"],
    "versions": {"python": "3.11.9", "torch": "2.6.0", "triton": None},
    "hardware": {"cpu": "Toy CPU", "cores": 4, "memory_gib": 15.5, "gpu": None},
    "git": {"commit": "abc123", "dirty": True},
}

GPU = {"name": "Toy GPU", "count": 2, "driver": "570.1", "cuda": "12.8"}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "2025-01-02-tiny")
    steps, requests = tiny_run()
    requests = compare_with_plain(requests)
    folder.write_manifest(MANIFEST)
    folder.write_frames(steps, requests)
    folder.write_summary(summarise(steps, requests))
    return folder


def frame(*requests):
    recorder = Recorder()
    recorder.requests += requests
    return recorder.frames()[1]


HEAD = """\
# tiny

- Hardware: Toy CPU, 4 cores, 15.5 GiB
- Versions: python 3.11.9, torch 2.6.0
- Command: `python -m harness 'workload.kinds=[json, regex]'`
- Date: 2025-01-02T03:04:05+00:00
- Commit: abc123, with uncommitted changes
"""


def test_the_head_says_where_and_with_what():
    assert head("tiny", MANIFEST) == HEAD


def test_gpus_and_a_missing_checkout_are_said():
    manifest = {
        **MANIFEST,
        "hardware": {**MANIFEST["hardware"], "gpu": GPU},
        "git": {"commit": None, "dirty": None},
    }
    text = head("tiny", manifest)
    assert "15.5 GiB; 2 × Toy GPU, driver 570.1\n" in text
    assert "- Commit: none (not a checkout)\n" in text


def test_sections_come_in_the_order_of_reading(run):
    lines = write_report(run).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# 2025-01-02-tiny",
        "## Acceptance",
        "## Work",
        "## Time and outputs",
        "## Legend",
        "## Failed requests",
        "## Divergences from plain",
    ]


def test_the_report_is_written_beside_the_other_files(run):
    assert write_report(run) == (run.path / "report.md").read_text(encoding="utf-8")


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
    text = failures(rows)
    assert "- vllm, request b: no token is legal\n" in text
    assert "request a" not in text


def test_a_run_without_failures_says_so():
    assert "None." in failures(frame(request("vllm", "a", [1])))


def test_near_ties_are_kept_apart_from_real_divergences():
    differ = {"identical": False, "first_divergence": 3}
    text = divergences(
        frame(
            request("vllm", "tie", [1], **differ, divergence_gap=0.0099),
            request("vllm", "real", [1], **differ, divergence_gap=0.01),
            request("vllm", "sampled", [1], **differ),
            request("vllm", "equal", [1], identical=True),
        )
    )
    near, real = text.split("Real ones:")
    assert "- vllm, 1: tie@3 (0.0099)\n" in near
    assert "- vllm, 2: real@3 (0.01), sampled@3\n" in real
    assert "equal" not in text


def test_a_long_list_of_divergences_is_cut_and_says_so():
    rows = [
        request("vllm", f"r{i}", [1], identical=False, first_divergence=0)
        for i in range(LISTED + 2)
    ]
    assert f"- vllm, {LISTED + 2}: r0@0, r1@0" in divergences(frame(*rows))
    assert ", and 2 more\n" in divergences(frame(*rows))


def test_the_command_prints_and_writes_several_runs(run, capsys):
    assert main([str(run.path), str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Toy CPU") == 2
    assert printed.count("Acceptance") == 2
    assert (run.path / "report.md").is_file()


def test_a_folder_that_is_no_run_is_one_line_and_status_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "is not a run folder" in printed.err
