"""The statistics of the G-test against published values and laws of our own."""

from __future__ import annotations

import random

import pytest

from tests.exact.gtest import (
    chi_square_tail,
    draws_needed,
    g_test,
    noncentral_tail,
    threshold,
)
from tests.exact.laws import OutcomeLaw

FAIR: OutcomeLaw = {(face,): 1 / 6 for face in range(6)}


def rolls(weights: list[float], draws: int, seed: int) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [(face,) for face in generator.choices(range(6), weights, k=draws)]


@pytest.mark.parametrize(
    ("freedom", "tail", "x"), [(1, 0.05, 3.8415), (5, 0.01, 15.0863), (10, 0.001, 29.5883)]
)
def test_thresholds_are_those_of_the_printed_tables(freedom: int, tail: float, x: float) -> None:
    assert threshold(freedom, tail) == pytest.approx(x, abs=1e-3)
    assert chi_square_tail(x, freedom) == pytest.approx(tail, rel=1e-3)


def test_power_agrees_with_cohens_tables() -> None:
    """Statistical Power Analysis, table 7.4: noncentrality for 80 % at 5 %, 1 and 5 degrees."""
    for freedom, noncentrality in ((1, 7.849), (5, 12.828)):
        power = noncentral_tail(threshold(freedom, 0.05), freedom, noncentrality)
        assert power == pytest.approx(0.8, abs=1e-3)


def test_no_noncentrality_leaves_the_false_alarm_rate() -> None:
    assert noncentral_tail(threshold(7, 0.01), 7, 0.0) == pytest.approx(0.01)


def test_the_least_visible_bias_is_seen_with_the_power_asked_for() -> None:
    """Half of the faces up and half down: where Pinsker's bound is tightest."""
    draws = draws_needed(6, variation=0.04, false_alarm=1e-4, power=0.9)
    biased = [1 / 6 + sign * 0.04 / 3 for sign in (1, -1) * 3]
    caught = [g_test(rolls(biased, draws, seed), FAIR).p_value < 1e-4 for seed in range(60)]
    assert 0.8 < sum(caught) / len(caught) < 1


def test_a_fair_sample_passes_and_the_bound_holds() -> None:
    result = g_test(rolls([1] * 6, 20_000, 0), FAIR)
    assert result.p_value > 1e-3
    assert result.freedom == 5
    assert result.variation < result.bound < 0.03


def test_an_impossible_outcome_is_never_forgiven() -> None:
    assert g_test([*rolls([1] * 6, 1000, 0), (6,)], FAIR).p_value == 0.0


def test_rare_outcomes_share_a_cell() -> None:
    law: OutcomeLaw = {(0,): 0.999, **{(i,): 0.0001 for i in range(1, 11)}}
    assert g_test([(0,)] * 1000, law).freedom == 1
