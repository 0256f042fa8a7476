from __future__ import annotations

import pandas as pd
import pytest

from harness.results.metrics import compare_with_plain, summarise
from harness.results.schema import METRICS
from harness.results.tidy import COLUMNS, tidy
from tests.results import tiny_run


@pytest.fixture
def rows():
    steps, requests = tiny_run()
    return tidy(summarise(steps, compare_with_plain(requests)), steps)


def one(rows, strategy, metric):
    (row,) = rows[(rows["strategy"] == strategy) & (rows["metric"] == metric)].itertuples()
    return row


def test_an_interval_stands_beside_its_value(rows):
    row = one(rows, "vllm", "tok_s_ratio")
    assert (row.value, row.lower, row.upper) == pytest.approx((1.454545, 1.142857, 2.0), rel=1e-6)


def test_every_metric_is_there_and_no_interval_is_a_metric(rows):
    expected = {name for name in METRICS if not name.endswith("_ci")}
    found = set(rows.loc[rows["strategy"] == "vllm", "metric"])
    assert found == expected | {"fill_us", "rollback_depth_preview"}


def test_a_value_that_does_not_exist_is_empty(rows):
    row = one(rows, "plain", "accept_rate")
    assert pd.isna(row.value)
    assert pd.isna(row.lower)


def test_a_list_has_one_row_per_position(rows):
    part = rows[(rows["strategy"] == "vllm") & (rows["metric"] == "accept_hist")]
    assert part["at"].tolist() == [0, 1, 2]
    assert part["value"].tolist() == [1, 1, 1]


def test_distributions_over_steps_are_in_it(rows):
    vllm = rows[rows["strategy"] == "vllm"]
    fills = vllm[vllm["metric"] == "fill_us"].set_index("at")["value"]
    assert fills.to_dict() == pytest.approx({50: 2.0, 90: 2.8, 99: 2.98})
    depths = vllm[vllm["metric"] == "rollback_depth_preview"].set_index("at")["value"]
    assert depths.to_dict() == {1: 1, 3: 2}


def test_it_survives_csv(rows, tmp_path):
    rows.to_csv(tmp_path / "report.csv", index=False)
    read = pd.read_csv(tmp_path / "report.csv")
    assert read.columns.tolist() == list(COLUMNS)
    pd.testing.assert_frame_equal(read, rows, check_dtype=False)


def test_a_run_that_lacks_a_metric_of_today_is_still_read():
    steps, requests = tiny_run()
    summary = summarise(steps, compare_with_plain(requests))
    del summary["vllm"]["near_ties"]
    assert "tok_s" in set(tidy(summary, steps)["metric"])
