"""The journal of finished requests, and what is left of it when its writer dies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.results.journal import Entry, Journal
from harness.results.record import Recorder
from tests.results import prefill, request, verify

NAN = math.nan
ENTRIES = [
    Entry(
        request("vllm", "a", [1, 2], gaps=[0.25, NAN], text="\udcff\u2028\n", valid=None),
        [
            prefill("vllm", "a", 0, fill_us=[0.1]),
            verify("vllm", "a", 3, 1, (1, 0, 1, 0), draft_q=[NAN, 0.5]),
        ],
    ),
    Entry(request("vllm", "b", [], finish="failed", error="no"), []),
    Entry(request("plain", "a", [1]), [prefill("plain", "a", 0)]),
]


def write(path: Path, entries: list[Entry]) -> None:
    journal = Journal(path)
    journal.start("these")
    for entry in entries:
        journal.append(*entry)
    journal.close()


def read(path: Path) -> list[Entry]:
    journal = Journal(path)
    journal.close()
    return journal.entries


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path / "journal", ENTRIES)
    assert repr(read(tmp_path / "journal")) == repr(ENTRIES)  # nan is not equal to nan


def test_wherever_a_journal_is_cut_all_whole_entries_remain_and_it_can_go_on(
    tmp_path: Path,
) -> None:
    write(tmp_path / "whole", ENTRIES)
    data = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        kept = read(path)
        assert len(kept) == max(0, data[:end].count(b"\n") - 1)
        write(path, ENTRIES[len(kept) :])
        assert path.read_bytes() == data


def test_a_damaged_line_ends_it(tmp_path: Path) -> None:
    write(tmp_path / "journal", ENTRIES)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal").write_bytes(lines[0] + lines[1] + b"\0" * 50 + b"\n" + lines[3])
    assert len(read(tmp_path / "journal")) == 1


def test_two_processes_do_not_share_it(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal")
    with pytest.raises(ConfigError, match="still running"):
        Journal(tmp_path / "journal")
    first.close()
    Journal(tmp_path / "journal").close()


def test_it_is_of_one_workload(tmp_path: Path) -> None:
    write(tmp_path / "journal", ENTRIES)
    journal = Journal(tmp_path / "journal")
    with pytest.raises(ConfigError, match="the workload has changed"):
        journal.start("those")
    journal.close()


def test_ticks_go_on_behind_those_of_an_earlier_process(tmp_path: Path) -> None:
    write(tmp_path / "journal", ENTRIES)
    journal = Journal(tmp_path / "journal")
    recorder = Recorder(journal)
    recorder.step(prefill("vllm", "c", 0))
    recorder.step(prefill("plain", "c", 0))
    recorder.step(prefill("trtllm", "c", 0))
    journal.close()
    assert [step.tick for step in recorder.steps[-3:]] == [4, 1, 0]
