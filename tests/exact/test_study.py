"""The study that prints the laws of all strategies, on a small slice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import losslessness
from tests.exact.cases import AS_EXPECTED, CASES, CONTROLS, LOSSLESS

SLICE = ("limit=3", "samplings=greedy,top-k", "engines=xgrammar", "variation=0.3")


def test_every_case_and_control_has_its_row(tmp_path: Path) -> None:
    losslessness.main([*SLICE, f"out={tmp_path}"])
    results = json.loads((tmp_path / "losslessness.json").read_text())
    assert len(results["exact"]) == 2 * len(CASES)
    assert [row["verdict"] for row in results["sampled"]] == [LOSSLESS] * len(CONTROLS)
    biased = {row["strategy"] for row in results["exact"] if row["verdict"] == AS_EXPECTED}
    assert biased == {"llamacpp", "llamacpp, p_min and n_min", "sglang, jump_forward"}
    table = (tmp_path / "losslessness.md").read_text()
    assert all(f"| {case.name} |" in table for case in CASES)


def test_a_law_that_nobody_promised_ends_the_study_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losslessness, "CASES", CASES[:1])
    monkeypatch.setattr("tests.exact.cases.TOLERANCE", -1.0)
    with pytest.raises(SystemExit, match="not the promised law: plain"):
        losslessness.main([*SLICE, f"out={tmp_path}"])
