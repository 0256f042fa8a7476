"""The study of tensor parallelism, with a tiny shape on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.scaling_ranks import RankPool
from experiments.scaling_tp import DEFAULTS, configuration, main, make_pair
from harness.errors import RanksError
from tests.parallel.launch import ITEMS

TINY = {
    "slots": "2",
    "turns": "2",
    "passes": "1",
    "strategies": "plain,vllm",
    "limit": "8",
    "layers": "2",
    "hidden": "64",
    "heads": "8",
    "kv_heads": "8",
    "workload": "file",
    "device": "cpu",
}


@pytest.fixture
def given(base: Path) -> dict[str, str]:
    return {**TINY, "tokenizer": str(base / "target"), "path": str(base / "items.jsonl")}


@pytest.fixture
def measured(given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # else ranks run on GPUs only
    assert main([f"{name}={value}" for name, value in given.items()] + [f"out={tmp_path}"]) == 0
    assert (tmp_path / "scaling_tp.md").is_file()
    return json.loads((tmp_path / "scaling_tp.json").read_text())["slots_2"]["measured"]


def test_each_number_of_ranks_is_measured_on_the_same_outputs(measured: Any) -> None:
    assert {name: [line["tp"] for line in lines] for name, lines in measured.items()} == {
        "plain": [1, 2],
        "vllm": [1, 2],
    }
    for lines in measured.values():
        assert all(line["same"] == 1 and line["tok_s"] > 0 for line in lines)
        (alone,), both = (line["by_rank"] for line in lines)
        assert alone["agree_us"] == 0
        assert all(each["agree_us"] > 0 for each in both)
        assert all(each["grammar_us"] > 0 and each["verify_us"] > 0 for each in (alone, *both))


def test_every_pass_decodes_everything(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = {**DEFAULTS, **given}
    make_pair(tmp_path, settings)
    pool = RankPool(configuration(1, 2, settings, tmp_path))
    once, again = (each[0].requests for each in (pool.decode(), pool.decode()))
    pool.close()
    served = len(ITEMS) - 2  # four of five are taken, and one of them has a bad grammar
    assert len(once) == len(again)
    assert list(once["output_ids"].map(tuple)) == list(again["output_ids"].map(tuple))
    assert (once["error"] == "").sum() == 2 * served


def test_a_rank_that_cannot_serve_says_why(given: dict[str, str], tmp_path: Path) -> None:
    settings = {**DEFAULTS, **given}
    make_pair(tmp_path, settings)
    config = configuration(1, 2, settings, tmp_path)
    broken = replace(config, pair=replace(config.pair, dtype="int3"))
    with pytest.raises(RanksError, match=r"^rank 0: pair\.dtype: 'int3' is none of"):
        RankPool(broken)


def test_a_rank_whose_strategy_fails_says_why(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = {**DEFAULTS, **given, "strategies": "tests.test_data_parallel:Short"}
    make_pair(tmp_path, settings)
    pool = RankPool(configuration(1, 2, settings, tmp_path))
    with pytest.raises(RanksError, match=r"^rank 0: EOFError: my table is cut"):
        pool.decode()
