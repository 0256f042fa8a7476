"""The identities of design.md, "Numbers", on generated traces and on broken ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from harness.errors import HarnessError
from harness.results.metrics import check_identities, compare_with_plain, summarise
from harness.results.record import Recorder
from tests.results import prefill, request, tiny_run, verify

counts = st.integers(0, 4)
fates = st.tuples(counts, counts, counts, counts)
steps_of_a_request = st.lists(st.tuples(fates, counts), max_size=5)


@st.composite
def runs(draw):
    """A run of consistent traces: any drafts may die in any way."""
    recorder = Recorder()
    for strategy in ("plain", "vllm"):
        for name in draw(st.sets(st.sampled_from("abc"))):
            held = 1
            recorder.steps.append(prefill(strategy, name, 0))
            for tick, (died, trimmed) in enumerate(draw(steps_of_a_request), start=1):
                row = verify(strategy, name, tick, tick, died, trimmed=trimmed, held=held)
                recorder.steps.append(row)
                held = row.held
            recorder.requests.append(request(strategy, name, [7] * held))
    return recorder.frames()


@settings(max_examples=30, deadline=None)
@given(runs())
def test_identities_hold_on_any_consistent_trace(run):
    steps, requests = run
    summary = summarise(steps, compare_with_plain(requests))
    check_identities(summary, steps)
    check_identities(json.loads(json.dumps(summary, allow_nan=False)), steps)
    for metrics in summary.values():
        hist, at = metrics["accept_hist"], metrics["accept_at"]
        assert sum(hist) == metrics["verify_steps"]
        assert sum(i * n for i, n in enumerate(hist)) == metrics["accepted"]
        assert sum(at) * metrics["verify_steps"] == pytest.approx(metrics["accepted"])
        low, high = metrics["accept_rate_ci"] or (0.0, 1.0)
        assert 0 <= low <= high <= 1


ROW_MUTANTS = {
    "accepted": "drafted = accepted",
    "rejected_grammar": "drafted = accepted",
    "rejected_model": "drafted = accepted",
    "past_stop": "drafted = accepted",
    "drafted": "drafted = accepted",
    "trimmed": "drafted_raw = drafted",
    "drafted_raw": "drafted_raw = drafted",
    "emitted": "emitted = length of emitted_ids",
    "advanced": "held = Σ advanced",
    "held": "held = Σ advanced",
    "rollback_preview_tokens": "held = Σ advanced",
    "rollback_rejected_tokens": "held = Σ advanced",
}


@pytest.mark.parametrize(("column", "identity"), ROW_MUTANTS.items())
def test_a_row_that_lost_count_is_named_with_its_identity(column, identity):
    steps, requests = tiny_run()
    steps.loc[8, column] += 1
    summary = summarise(steps, compare_with_plain(requests))
    with pytest.raises(HarnessError, match=f"vllm, request b, step 1: {identity}.* is broken"):
        check_identities(summary, steps)


def test_two_rows_whose_errors_cancel_are_caught():
    steps, requests = tiny_run()
    steps.loc[7, "rejected_model"] += 1
    steps.loc[8, "rejected_model"] -= 1
    with pytest.raises(HarnessError, match="request a, step 1"):
        check_identities(summarise(steps, compare_with_plain(requests)), steps)


def test_drafts_in_a_prefill_row_break_the_histogram():
    steps, requests = tiny_run()
    steps.loc[7, "prefill"] = True
    summary = summarise(steps, compare_with_plain(requests))
    with pytest.raises(HarnessError, match=r"vllm: Σ i·accept_hist\[i\] = accepted is broken"):
        check_identities(summary, steps)


SUMMARY_MUTANTS = {
    "accept_rate": (0.5, "accept_rate = accepted / drafted"),
    "mean_accept_len": (2.5, "mean_accept_len = emitted / verify_steps"),
    "accept_hist": ([1, 2, 1], "Σ accept_hist = verify_steps"),
    "accepted": (4, "accepted = Σ accepted"),
    "drafted": (8, "drafted = Σ drafted"),
    "emitted": (7, "emitted = Σ emitted"),
    "verify_steps": (5, "verify_steps = verify rows"),
    "wasted_rows": (0, "wasted_rows = Σ wasted_rows"),
    "rollback_calls": (4, "rollback_calls = Σ rollback_"),
    "rollback_tokens": (8, "rollback_tokens = Σ rollback_"),
}


@pytest.mark.parametrize(("metric", "mutant"), SUMMARY_MUTANTS.items())
def test_a_summary_that_does_not_follow_from_its_steps_is_refused(metric, mutant):
    value, identity = mutant
    steps, requests = tiny_run()
    summary = summarise(steps, compare_with_plain(requests))
    summary["vllm"][metric] = value
    with pytest.raises(HarnessError, match=f"vllm: {identity}.* is broken"):
        check_identities(summary, steps)
