from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from harness.results.metrics import (
    bootstrap_interval,
    check_identities,
    compare_with_plain,
    divergence,
    summarise,
)
from harness.results.record import Recorder
from tests.results import request, tiny_run


@pytest.fixture(scope="module")
def summary():
    steps, requests = tiny_run()
    return summarise(steps, compare_with_plain(requests))


def compared(*requests):
    recorder = Recorder()
    recorder.requests += requests
    frame = compare_with_plain(recorder.frames()[1])
    return frame.iloc[-1]


def test_counts_add_up_by_hand(summary):
    vllm = summary["vllm"]
    assert (vllm["drafted_raw"], vllm["drafted"], vllm["trimmed"]) == (9, 7, 2)
    assert (vllm["accepted"], vllm["rejected_grammar"], vllm["rejected_model"]) == (3, 1, 1)
    assert (vllm["past_stop"], vllm["wasted_rows"], vllm["jump_tokens"]) == (2, 4, 3)
    assert (vllm["rollback_preview_calls"], vllm["rollback_preview_tokens"]) == (3, 7)
    assert (vllm["rollback_calls"], vllm["rollback_tokens"]) == (3, 7)


def test_prefill_is_no_verify_step_and_its_token_is_not_emitted_by_one(summary):
    assert (summary["vllm"]["verify_steps"], summary["vllm"]["emitted"]) == (3, 6)
    assert (summary["plain"]["verify_steps"], summary["plain"]["emitted"]) == (3, 3)


def test_acceptance_is_a_ratio_of_sums_not_a_mean_of_ratios(summary):
    assert summary["vllm"]["accept_rate"] == 3 / 7  # the mean over steps would be 1/3
    assert summary["vllm"]["mean_accept_len"] == 2.0


def test_acceptance_by_position_counts_steps_with_more_accepted(summary):
    assert summary["vllm"]["accept_hist"] == [1, 1, 1]
    assert summary["vllm"]["accept_at"] == [2 / 3, 1 / 3]


def test_plain_has_no_acceptance_rate_and_one_token_a_step(summary):
    plain = summary["plain"]
    assert plain["accept_rate"] is None
    assert plain["accept_rate_ci"] is None
    assert plain["mean_accept_len"] == 1.0
    assert (plain["accept_hist"], plain["accept_at"]) == ([3], [])


def test_a_forward_shared_by_a_batch_counts_once(summary):
    # Ticks 0, 1 and 2; in tick 1 a drafts 3 and b drafts 1, in tick 2 b drafts 3.
    assert summary["vllm"]["target_forwards"] == 3
    assert summary["vllm"]["draft_forwards"] == 6
    assert summary["plain"]["target_forwards"] == 5


def test_throughput_divides_all_output_by_all_time(summary):
    assert summary["plain"]["tok_s"] == pytest.approx(5 / 500e-6)
    assert summary["vllm"]["tok_s"] == pytest.approx(8 / 550e-6)


def test_throughput_to_plain_is_over_the_requests_that_both_ran(summary):
    assert summary["vllm"]["tok_s_ratio"] == pytest.approx((8 / 550) / (5 / 500))
    assert summary["plain"]["tok_s_ratio"] == 1.0
    assert summary["plain"]["tok_s_ratio_ci"] == (1.0, 1.0)


def test_a_request_that_plain_did_not_run_leaves_the_ratio_alone():
    steps, requests = tiny_run()
    whole = summarise(steps, compare_with_plain(requests))["vllm"]
    without = compare_with_plain(requests)
    cut = without[~((without["strategy"] == "plain") & (without["request"] == "b"))]
    ratio = summarise(steps, cut)["vllm"]["tok_s_ratio"]
    assert ratio != whole["tok_s_ratio"]
    assert ratio == pytest.approx((4 / 200) / (3 / 300))


def test_without_plain_there_is_no_ratio():
    steps, requests = tiny_run()
    alone = compare_with_plain(requests[requests["strategy"] == "vllm"])
    metrics = summarise(steps, alone)["vllm"]
    assert metrics["tok_s_ratio"] is None
    assert metrics["tok_s_ratio_ci"] is None
    assert metrics["identical"] is None
    assert metrics["first_divergence"] == 0


def test_times_are_means_per_verify_step(summary):
    vllm = summary["vllm"]
    assert [vllm[name] for name in ("draft_us", "verify_us", "grammar_us", "host_us")] == [
        30.0,
        90.0,
        20.0,
        10.0,
    ]
    assert vllm["exposed_us"] == 5.0
    assert vllm["fill_us_p50"] == 2.0
    assert vllm["fill_us_p99"] == pytest.approx(2.98)


def test_latencies_weigh_requests_by_their_tokens():
    steps, requests = tiny_run()
    requests.loc[requests["strategy"] == "vllm", "output_tokens"] = [2, 4, 0]
    vllm = summarise(steps, requests)["vllm"]
    assert vllm["ttft_ms"] == 15.0  # the request that failed before its first token has none
    assert vllm["tpot_ms"] == pytest.approx((2.0 * 1 + 4.0 * 3) / 4)


def test_compile_times_are_added_up(summary):
    assert summary["plain"]["compile_ms"] == 4.0


def test_outcomes_are_shares_of_what_can_have_them(summary):
    vllm = summary["vllm"]
    assert (vllm["requests"], vllm["failed"]) == (3, 1)
    assert vllm["complete"] == 1 / 3
    assert vllm["valid"] == 1.0  # of the one complete output with a verdict
    assert vllm["identical"] == 0.0  # of the two that plain ran too
    assert (vllm["first_divergence"], vllm["near_ties"]) == (2, 1)
    assert vllm["divergence_gap"] == 0.001
    assert summary["plain"]["identical"] == 1.0


def test_the_canonical_share_weighs_outputs_by_their_tokens():
    steps, requests = tiny_run()
    requests.loc[requests["strategy"] == "vllm", "canonical_share"] = [1.0, 0.5, 0.0]
    assert summarise(steps, requests)["vllm"]["canonical_share"] == (4 + 2) / 8


def test_a_divergence_carries_plains_lead_at_its_index():
    plain = request("plain", "a", [1, 2, 3], gaps=[3.0, 0.25, 1.0])
    row = compared(plain, request("vllm", "a", [1, 5, 3], gaps=[9.0, 9.0, 9.0]))
    assert (row["identical"], row["first_divergence"], row["divergence_gap"]) == (False, 1, 0.25)


def test_equal_outputs_have_no_divergence():
    row = compared(request("plain", "a", [1, 2], gaps=[1.0, 1.0]), request("vllm", "a", [1, 2]))
    assert (row["identical"], row["first_divergence"]) == (True, -1)
    assert pd.isna(row["divergence_gap"])


@pytest.mark.parametrize("output", [[1], [1, 2, 3]])
def test_an_output_that_ends_elsewhere_diverges_there_without_a_gap(output):
    plain = request("plain", "a", [1, 2], gaps=[0.001, 0.001])
    row = compared(plain, request("vllm", "a", output, finish="failed"))
    assert (row["identical"], row["first_divergence"]) == (False, min(len(output), 2))
    assert pd.isna(row["divergence_gap"])


def test_a_sampled_run_has_divergences_without_gaps():
    row = compared(request("plain", "a", [1, 2]), request("vllm", "a", [1, 3]))
    assert row["first_divergence"] == 1
    assert pd.isna(row["divergence_gap"])


def test_another_seed_is_another_output_and_is_not_compared():
    row = compared(request("plain", "a", [1, 2]), request("vllm", "a", [1, 2], seed=1))
    assert row["identical"] is None


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [([], [], -1), ([1], [1], -1), ([1], [], 0), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)],
)
def test_divergence_is_the_first_index_that_differs(left, right, index):
    assert divergence(left, right) == index


def test_a_strategy_whose_requests_all_failed_at_once_has_no_ratios():
    steps, requests = tiny_run()
    dead = requests[requests["request"] == "c"]
    metrics = summarise(steps[steps["strategy"] == "plain"], compare_with_plain(dead))["vllm"]
    assert (metrics["requests"], metrics["failed"], metrics["verify_steps"]) == (1, 1, 0)
    assert (metrics["accept_hist"], metrics["accept_at"]) == ([], [])
    for name in ("accept_rate", "mean_accept_len", "tok_s", "ttft_ms", "verify_us", "valid"):
        assert metrics[name] is None
    check_identities({"vllm": metrics}, steps[steps["strategy"] == "plain"])


def test_the_order_of_rows_changes_no_number():
    steps, requests = tiny_run()
    straight = summarise(steps, compare_with_plain(requests))
    mixed = summarise(
        steps.sample(frac=1, random_state=1),
        compare_with_plain(requests.iloc[::-1].reset_index(drop=True)),
    )
    for name, metrics in straight.items():
        for metric, value in metrics.items():
            assert mixed[name][metric] == pytest.approx(value), metric


def test_an_interval_of_equal_requests_is_a_point():
    assert bootstrap_interval([2, 4, 6], [1, 2, 3]) == (2.0, 2.0)


def test_an_interval_is_repeatable_and_depends_on_its_seed():
    values = np.arange(1.0, 21.0)
    ones = np.ones(20)
    assert bootstrap_interval(values, ones) == bootstrap_interval(values, ones, seed=0)
    assert bootstrap_interval(values, ones) != bootstrap_interval(values, ones, seed=1)


def test_an_interval_has_the_width_that_theory_gives_a_mean():
    values = np.random.default_rng(5).normal(10, 2, size=400)
    low, high = bootstrap_interval(values, np.ones(400), samples=4000)
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)


def test_resamples_that_drew_nothing_are_left_out():
    low, high = bootstrap_interval([0, 1], [0, 2])
    assert (low, high) == (0.5, 0.5)


@pytest.mark.parametrize(("numerator", "denominator"), [([], []), ([1, 1], [0, 0])])
def test_a_ratio_that_does_not_exist_has_no_interval(numerator, denominator):
    assert bootstrap_interval(numerator, denominator) is None


def test_pairing_with_plain_takes_out_what_requests_differ_in():
    """Requests of very different speed, all twice as fast as plain: the ratio is certain."""
    steps, requests = tiny_run()
    mine = steps["strategy"] == "vllm"
    doubled = pd.concat([steps[~mine], steps[~mine].assign(strategy="vllm")])
    times = ["draft_us", "verify_us", "grammar_us", "host_us"]
    doubled.loc[doubled["request"] == "b", times] *= 50.0
    doubled.loc[doubled["strategy"] == "vllm", times] /= 2.0
    plain = requests[requests["strategy"] == "plain"]
    both = compare_with_plain(pd.concat([plain, plain.assign(strategy="vllm")], ignore_index=True))
    metrics = summarise(doubled, both)["vllm"]
    low, high = metrics["tok_s_ci"]
    assert high > 10 * low
    assert metrics["tok_s_ratio_ci"] == pytest.approx((2.0, 2.0))
