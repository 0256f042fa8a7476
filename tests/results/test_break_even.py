"""The break-even map: limits, verdicts and their figures."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from harness.results.break_even import (
    Spot,
    break_even_limits,
    break_even_sync_us,
    fastest,
    fastest_by_round_trip,
    pays_when,
    positions,
    speeds,
    spot_of,
    verdict,
    with_ratio,
)
from harness.results.break_even_figures import fastest_map, where_guiding_pays
from harness.results.costs import Costs
from harness.results.predict import predict
from harness.results.record import Recorder
from tests.results import prefill, verify

COSTS = Costs(
    plain_us=1000, verify_us=1400, draft_us=100, chain_us=400, sync_us=20, mask_us=50, accept_us=10
)
RATIOS = (0.05, 0.1, 0.2)

LIMITS = pd.DataFrame(
    {0.1: [300.0, 80.0], 0.2: [50.0, 120.0], 0.4: [-9.0, 150.0]}, ["plain", "vllm"]
)


@pytest.fixture(scope="module")
def steps():
    """Per step ``plain`` emits 1 token, ``vllm`` 2 and ``trtllm`` 4; ``unguided`` 5."""
    free, guided = {"draft_forwards": 4}, {"rollback_draft_tokens": 4, "draft_forwards": 4}
    recorder = Recorder()
    for name, fates, columns in (
        ("plain", (0, 0, 0, 0), {}),
        ("vllm", (1, 0, 3, 0), free),
        ("trtllm", (3, 0, 1, 0), guided),
        ("unguided", (4, 0, 0, 0), free),
    ):
        recorder.steps += [prefill(name, "a", 0), verify(name, "a", 1, 1, fates, **columns)]
    return recorder.frames()[0]


def test_each_limit_is_that_of_its_pair_of_strategies(steps):
    limits = break_even_limits(steps, COSTS, RATIOS)
    for ratio in RATIOS:
        costs = with_ratio(COSTS, ratio)
        predicted = predict(steps, costs)
        for free in ("plain", "vllm"):
            assert limits.loc[free, ratio] == break_even_sync_us(predicted, costs, "trtllm", free)


def test_the_ceiling_is_no_rival(steps):
    assert list(break_even_limits(steps, COSTS, RATIOS).index) == ["plain", "vllm"]
    assert "unguided" not in fastest_by_round_trip(steps, COSTS, RATIOS, [0.0]).to_numpy()


def test_the_fine_map_agrees_with_a_prediction_of_every_cell(steps):
    values = [0.0, 30.0, 300.0, 3000.0]
    constrained = steps[steps["strategy"] != "unguided"]
    cells = speeds(constrained, COSTS, RATIOS, "sync_us", values)
    fine = fastest_by_round_trip(steps, COSTS, RATIOS, values)
    assert (fine.to_numpy() == fastest(cells, "sync_us").to_numpy()).all()
    assert len(set(fine.to_numpy().ravel())) > 1


@pytest.mark.parametrize(
    ("spot", "says"),
    [
        (Spot(0.1, 79.0), "pays: a round trip takes 79 µs, the limit is 80"),
        (Spot(0.1, 81.0), "does not pay: a round trip takes 81 µs, the limit is 80"),
        (Spot(0.2, 49.0), "pays: a round trip takes 49 µs, the limit is 50"),
        (Spot(0.4, 0.0), "cannot beat plain here, whatever the round trip"),
    ],
)
def test_the_lowest_limit_decides(spot, says):
    assert verdict(LIMITS, spot) == f"Guided drafting {says}"


def test_the_rule_names_the_prices_at_which_guiding_pays():
    assert "between 0.10 and 0.20" in pays_when(LIMITS)
    assert "80 µs at 0.10" in pays_when(LIMITS)
    assert "nowhere" in pays_when(-LIMITS.abs())


def test_positions_say_who_sets_the_limit(steps):
    table = positions({"cheap": (steps, COSTS, 1.0), "dear": (steps, with_ratio(COSTS, 2.0), 1.0)})
    limits = break_even_limits(steps, COSTS, [0.1])[0.1]
    assert table.loc["cheap", "draft / target"] == 0.1
    assert table.loc["cheap", "limit, µs"] == pytest.approx(limits.min(), abs=0.1)
    assert table.loc["cheap", "set by"] == limits.idxmin()
    assert list(table["pays"]) == [limits.min() > 20, False]
    assert table.loc["dear", "set by"] == "plain"


def test_the_shaded_region_is_below_all_lines():
    (axes,) = where_guiding_pays(LIMITS, Spot(0.1, 60.0)).axes
    (region,) = axes.collections
    corners = region.get_paths()[0].vertices
    assert corners[:, 1].max() == 80.0
    assert corners[:, 0].max() < 0.4  # plain's line has come down to 0 before
    assert axes.get_xlabel() == "draft forward / target forward"
    assert axes.get_ylabel() == "round trip to the host (µs)"
    assert axes.get_title(loc="left") == verdict(LIMITS, Spot(0.1, 60.0))


def test_the_map_has_a_colour_for_each_winner():
    winners = pd.DataFrame({0.1: ["trtllm", "vllm"], 0.2: ["plain", "plain"]}, [0.0, 50.0])
    figure = fastest_map(winners, Spot(0.1, 20.0))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(labels) == {"trtllm", "vllm", "plain"}
    assert "25 %" in figure.axes[0].get_title(loc="left")


def test_a_spot_is_in_units_of_the_target():
    assert spot_of(replace(COSTS, draft_us=250)) == Spot(0.25, 20.0)
