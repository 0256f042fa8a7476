from __future__ import annotations

import pytest

from harness.results.answer import answer, fastest
from harness.results.metrics import compare_with_plain, summarise
from tests.results import tiny_run


@pytest.fixture
def summary():
    steps, requests = tiny_run()
    return summarise(steps, compare_with_plain(requests))


def slowed(metrics, ratio, interval):
    return {**metrics, "tok_s": 100.0, "tok_s_ratio": ratio, "tok_s_ratio_ci": interval}


def test_the_fastest_is_named_first_with_its_ratio_and_interval(summary):
    assert answer(summary)[0] == (
        "vllm is fastest here: 14545.5 tokens/s, 1.45 times plain (95 % interval 1.14–2.00)."
    )


def test_why_is_the_length_of_a_step_over_its_cost(summary):
    """6 emitted and 3 forced tokens in 3 steps of 150 µs, against 1 in 100 µs: 3 / 1.5 = 2."""
    why = answer(summary)[1]
    assert "a step of vllm emits 2.00 tokens (1.50–3.00) and inserts 1.00 forced ones" in why
    assert "as long as 1.50 steps of plain" in why
    assert "(0.15 ms, of which 0.03 ms drafting and 0.09 ms verifying, against 0.10 ms)" in why
    assert "3.00 / 1.50 = 2.00 times plain" in why


def test_the_grammar_is_told_in_time_and_share_exposed_apart(summary):
    """Of 150 µs per step 20 are grammar, of which the device waits for 5."""
    assert answer(summary)[2] == (
        "The grammar costs vllm 20 µs of CPU per step (13.33 % of the step); for 5 µs of it "
        "(3.33 %) the device waits."
    )


def test_the_strategy_whose_grammar_costs_most_is_named(summary):
    summary["plain"]["exposed_us"] = 20.0
    assert "It costs plain most: 20 µs exposed per step (20.00 %)." in answer(summary)


def test_a_plain_that_wins_is_the_answer_and_the_best_drafter_comes_next(summary):
    summary["vllm"] = slowed(summary["vllm"], 0.9, (0.8, 0.95))
    first, second, why, *_ = answer(summary)
    assert first == "plain is fastest here, at 10000.0 tokens/s: drafting slows it down."
    assert second == "Next is vllm, 0.90 times plain (95 % interval 0.80–0.95)."
    assert why.startswith("Why: a step of vllm")


def test_an_interval_around_one_is_called_undecided(summary):
    summary["vllm"] = slowed(summary["vllm"], 0.9, (0.8, 1.1))
    assert answer(summary)[1].endswith("which this run cannot tell from equal.")


def test_a_run_without_plain_says_so_and_gives_no_ratio(summary):
    del summary["plain"]
    first, second, *_ = answer(summary)
    assert first.endswith("plain did not run, so there is no ratio to it.")
    assert second.startswith("The grammar costs vllm")


def test_no_grammar_is_a_ceiling_and_no_choice(summary):
    summary["unguided"] = {**summary["vllm"], "tok_s": 20_000.0}
    sentences = answer(summary)
    assert sentences[0].startswith("vllm is fastest")
    assert fastest(summary) == "vllm"
    assert (
        "The ceiling is unguided, which drafts without any grammar: 20000.0 tokens/s." in sentences
    )


def test_flaws_of_the_outputs_are_told(summary):
    """vllm's request c failed, and a and b differ from plain's."""
    assert answer(summary)[-1] == (
        "Mind the outputs (failed requests: vllm; outputs other than plain's: vllm)."
    )
    summary["plain"]["valid"] = 0.99
    assert "(not all valid: plain; " in answer(summary)[-1]


def test_sound_outputs_are_told_too(summary):
    del summary["vllm"]
    assert answer(summary)[-1].startswith("Every judged output is valid")


def test_a_run_that_made_nothing_has_an_answer(summary):
    nothing = {**summary["plain"], "tok_s": None}
    assert answer({"plain": nothing}) == [
        "No strategy came beyond its prefill: there is nothing to compare."
    ]
    assert fastest({"plain": nothing}) is None
