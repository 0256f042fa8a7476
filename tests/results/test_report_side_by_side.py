from __future__ import annotations

import pandas as pd
import pytest

from harness.results.side_by_side import (
    SHOWN,
    differences,
    labelled,
    settings_table,
    side_by_side,
    tidy_runs,
)
from harness.results.table import NONE
from tests.results.folders import MANIFEST, tiny_folder

CONFIG = {
    "name": "one",
    "compare": ["plain", "vllm"],
    "runs": "runs",
    "pair": {"target": "toy", "device": "auto"},
    "grammar": {"engine": "xgrammar", "whitespace": "free"},
    "engine": {"draft_tokens": 4},
}

GPU = {"name": "Toy GPU", "count": 1, "driver": "570.1", "cuda": "12.8"}


def config(**groups):
    return {**CONFIG, "name": "two", "runs": "elsewhere", **groups}


@pytest.fixture
def one(tmp_path):
    manifest = {**MANIFEST, "setup": {"device": "cpu", "dtype": "float32", "K": 4}}
    return tiny_folder(tmp_path / "one", manifest=manifest, config=CONFIG)


@pytest.fixture
def two(tmp_path):
    """Another machine, engine and K."""
    manifest = {
        **MANIFEST,
        "hardware": {**MANIFEST["hardware"], "gpu": GPU},
        "setup": {"device": "cuda", "dtype": "float32", "K": 8},
    }
    changed = config(
        grammar={"engine": "llguidance", "whitespace": "free"}, engine={"draft_tokens": 8}
    )
    return tiny_folder(tmp_path / "two", manifest=manifest, config=changed)


def test_only_what_differs_between_runs_is_shown(one, two):
    differing = differences(labelled([one, two]))
    assert differing.columns.tolist() == [
        "machine",
        "device",
        "grammar.engine",
        "engine.draft_tokens",
    ]
    assert differing.loc["two"].tolist() == [
        "Toy CPU, 4 cores, 15.5 GiB; 1 × Toy GPU, driver 570.1",
        "cuda",
        "llguidance",
        "8",
    ]


def test_a_setting_that_an_older_run_lacks_is_no_difference(one, tmp_path):
    newer = tiny_folder(tmp_path / "newer", config=config(engine={"draft_tokens": 4, "turn": 0}))
    assert differences(labelled([one, newer])).columns.tolist() == []


def test_a_run_without_a_config_is_compared_by_its_manifest(one, tmp_path):
    bare = tiny_folder(tmp_path / "bare", manifest={**MANIFEST, "versions": {"torch": "2.7.0"}})
    differing = differences(labelled([one, bare]))
    assert differing["torch"].tolist() == ["2.6.0", "2.7.0"]


def test_null_is_a_value(one, tmp_path):
    seeded = tiny_folder(tmp_path / "a", config=config(seed=0))
    shuffled = tiny_folder(tmp_path / "b", config=config(seed=None))
    differing = differences(labelled([one, seeded, shuffled]))
    assert differing["seed"].tolist() == [NONE, "0", NONE]


def test_every_run_and_strategy_has_a_row(one, two):
    runs = labelled([one, two])
    table = side_by_side(runs, differences(runs))
    assert table.headers == (
        "run",
        "machine",
        "device",
        "grammar.engine",
        "engine.draft_tokens",
        "strategy",
        *SHOWN,
    )
    assert [(row[0], row[3], row[5]) for row in table.rows] == [
        ("one", "xgrammar", "plain"),
        ("one", "xgrammar", "vllm"),
        ("two", "llguidance", "plain"),
        ("two", "llguidance", "vllm"),
    ]
    assert table.rows[1][7] == "1.45 (1.14–2.00)"
    assert len(table.docs) == len(table.headers)


def test_what_differs_is_a_table_of_its_own(one, two):
    table = settings_table(differences(labelled([one, two])))
    assert [row[0] for row in table.rows] == ["one", "two"]
    assert table.rows[0][3:] == ("xgrammar", "4")


def test_runs_of_one_name_are_told_apart(tmp_path):
    first = tiny_folder(tmp_path / "cpu" / "quick")
    second = tiny_folder(tmp_path / "gpu" / "quick")
    assert list(labelled([first, second])) == ["quick", "quick (2)"]


def test_the_tidy_rows_of_runs_stand_below_each_other(one, two):
    rows = tidy_runs(labelled([one, two]))
    assert rows.columns[:2].tolist() == ["run", "machine"]
    speed = rows[rows["metric"] == "tok_s"]
    assert speed[["run", "grammar.engine", "strategy"]].to_numpy().tolist() == [
        ["one", "xgrammar", "plain"],
        ["one", "xgrammar", "vllm"],
        ["two", "llguidance", "plain"],
        ["two", "llguidance", "vllm"],
    ]
    assert pd.notna(speed["lower"]).all()
