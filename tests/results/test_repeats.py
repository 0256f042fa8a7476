"""Runs that differ in nothing, taken together."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.metrics import compare_with_plain, summarise
from harness.results.repeats import together
from harness.results.schema import METRICS
from tests.results import tiny_run


@pytest.fixture
def metrics() -> dict[str, Any]:
    steps, requests = tiny_run()
    return summarise(steps, compare_with_plain(requests))["vllm"]


def test_one_repeat_is_what_it_is(metrics: dict[str, Any]) -> None:
    alone = together([{**metrics, "own": {"steps": 3}}])
    assert alone.keys() == METRICS.keys()
    for name, value in metrics.items():
        assert alone[name] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("tok_s", [10.0, 30.0, 20.0], 20.0),
        ("tok_s", [10.0, None, 20.0], 15.0),
        ("tok_s", [None, None, None], None),
        ("tok_s_ci", [(1.0, 2.0), (0.5, 1.5), (0.9, 3.0)], [0.5, 3.0]),
        ("drafted", [7, 9, 8], 8),
        ("accept_hist", [[1, 2], [3, 2, 1], [2, 2]], [2, 2, 0]),
        ("accept_at", [[0.5], [0.25], [0.75, 0.5]], [0.5, 0.0]),
    ],
)
def test_of_each_number_the_median_and_of_an_interval_the_ends(
    metrics: dict[str, Any], name: str, values: list[Any], expected: Any
) -> None:
    found = together([{**metrics, name: value} for value in values])
    assert found[name] == expected
    assert type(found[name]) is type(expected)


def test_what_an_older_repeat_lacks_is_taken_from_the_others(metrics: dict[str, Any]) -> None:
    older = {name: value for name, value in metrics.items() if name != "near_ties"}
    assert together([older, {**metrics, "near_ties": 3}])["near_ties"] == 3
    assert together([older])["near_ties"] is None
