from __future__ import annotations

import numpy as np
import pytest

from harness.results.distributions import (
    acceptance,
    depths,
    fates,
    fill_percentiles,
    phases,
)
from harness.results.metrics import compare_with_plain, summarise
from harness.results.record import Recorder
from tests.results import prefill, tiny_run, verify


def steps(*rows):
    recorder = Recorder()
    recorder.steps += rows
    return recorder.frames()[0]


def test_acceptance_at_a_position_is_the_share_of_verify_steps_that_reach_it():
    """Accepted 2, 0 and 1 of at most 3 drafts."""
    shares = acceptance(tiny_run()[0])
    assert shares.columns.tolist() == [1, 2, 3]
    assert shares.loc["vllm"].tolist() == pytest.approx([2 / 3, 1 / 3, 0])


def test_acceptance_agrees_with_the_summary():
    rows, requests = tiny_run()
    summary = summarise(rows, compare_with_plain(requests))
    shares = acceptance(rows).loc["vllm"]
    assert shares.tolist()[:2] == pytest.approx(summary["vllm"]["accept_at"])


def test_a_strategy_without_drafts_has_no_acceptance_and_no_fates():
    assert "plain" not in acceptance(tiny_run()[0]).index
    assert "plain" not in fates(tiny_run()[0]).index


def test_time_is_per_token_with_forced_tokens_and_without_prefill():
    """vllm: three steps of 90 µs verify, 6 emitted and 3 forced tokens."""
    split = phases(tiny_run()[0])
    assert split.loc["vllm", "verify_us"] == pytest.approx(3 * 0.090 / 9)
    assert split.loc["plain"].tolist() == pytest.approx([0, 0.080, 0.020, 0])


def test_fates_add_up_to_all_drafts_before_trimming():
    shares = fates(tiny_run()[0]).loc["vllm"]
    assert shares.sum() == pytest.approx(1)
    assert shares["trimmed"] == pytest.approx(2 / 9)
    assert shares["accepted"] == pytest.approx(3 / 9)


def test_a_rollback_counts_at_its_depth():
    """vllm previews 3, 1 and 3 drafts and takes each preview back in one call."""
    found = depths(tiny_run()[0])
    assert found.to_numpy().tolist() == [["vllm", "preview", 1, 1], ["vllm", "preview", 3, 2]]


def test_calls_of_one_step_count_with_their_mean_depth():
    rows = steps(
        verify("sglang", "a", 1, 1, rollback_preview_calls=4, rollback_preview_tokens=4),
        verify("sglang", "a", 2, 2, rollback_preview_calls=2, rollback_preview_tokens=3),
    )
    found = depths(rows).set_index("depth")["calls"]
    assert found.to_dict() == {1: 4, 2: 2}


def test_kinds_of_rollbacks_are_kept_apart_in_the_order_of_the_strategies():
    rows = steps(
        verify("vllm", "a", 1, 1, rollback_rejected_calls=1, rollback_rejected_tokens=2),
        verify("deepinfer", "a", 1, 1, rollback_preview_calls=1, rollback_preview_tokens=5),
    )
    assert depths(rows)[["strategy", "kind", "depth"]].to_numpy().tolist() == [
        ["vllm", "rejected", 2],
        ["deepinfer", "preview", 5],
    ]


def test_percentiles_are_over_single_fills_not_over_steps():
    rows = steps(
        prefill("vllm", "a", 0, fill_us=[1.0]),
        verify("vllm", "a", 1, 1, fill_us=[2.0] * 98 + [300.0]),
    )
    found = fill_percentiles(rows).loc["vllm"]
    fills = [1.0, *[2.0] * 98, 300.0]
    assert found.to_dict() == {at: np.quantile(fills, at / 100) for at in (50, 90, 99)}


def test_without_rows_all_distributions_are_empty():
    nothing = steps()
    for distribution in (acceptance, phases, fates, depths, fill_percentiles):
        assert distribution(nothing).empty
