"""Every strategy's law of whole outputs, integrated over all draws (property 4 of regressions.md).

The real loop, strategy, verifier and grammar engine run; only the numbers come from a tape, so the
laws are exact up to fp32. ``python -m experiments.losslessness`` does the same for longer outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.models.draws import Draws
from tests.exact.cases import (
    AS_EXPECTED,
    BIASED as UNPROMISED,
    CASES,
    CONTROLS,
    LOSSLESS,
    SAMPLINGS,
    Case,
    DraftLaw,
    find,
)
from tests.exact.draws import DRAFT, Tape, remainders, volume
from tests.exact.gtest import draws_needed, g_test
from tests.exact.laws import outcome_law, projected, total_variation
from tests.toys import ENGINES

LIMIT = 3
"""Tokens of an output where drafts are sampled, which multiplies cells: windows of one draft."""
LONGER = 4
"""Where they are not: windows of two, so that a tree has a second level."""
VISIBLE = 0.09
"""A total variation that takes few draws to see: trimming has 0.0907 in outputs of four tokens."""
BIASED = {
    "vllm, probabilistic": {"temperature", "top-p"},
    "llamacpp": {"top-k", "top-p"},
    "llamacpp, p_min and n_min": {"top-k", "top-p"},
    "sglang, jump_forward": {"temperature", "top-k"},
    "sglang, threshold_acc 0.7": {"temperature", "top-k", "top-p"},
}
"""The only ones that may be, and the samplings by which it shows in outputs of this length."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows of a few tokens are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case(name: str, drafts: DraftLaw = "argmax") -> Case:
    (found,) = (each for each in CASES if (each.name, each.drafts) == (name, drafts))
    return found


def limit_of(each: Case) -> int:
    """llama.cpp's two draws a token multiply the cells too."""
    return LIMIT if each.drafts == "sampled" or each.strategy == "llamacpp" else LONGER


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("each", CASES, ids=lambda each: f"{each.name}, {each.drafts}")
def test_outputs_follow_the_promised_law(each: Case, sampling: str, engine: str) -> None:
    """V1.7, T18, L4, L14, S2h, D17 and comparison.md, "Losslessness, exactly"."""
    finding = find(each, each.problem(SAMPLINGS[sampling], engine, limit_of(each)))
    biased = sampling in BIASED.get(each.name, ())
    assert finding.verdict == (AS_EXPECTED if biased else LOSSLESS)
    assert math.fsum(finding.integral.law.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_that_its_options_do_not_promise_is_called_one(name: str) -> None:
    """The test has power: the same runs against the lossless rule."""
    biased = next(each for each in CASES if each.name == name)
    innocent = replace(biased, rule=projected, jumps=False)
    sampling = SAMPLINGS[min(BIASED[name])]
    finding = find(innocent, innocent.problem(sampling, "xgrammar", limit_of(innocent)))
    assert finding.verdict == UNPROMISED
    assert finding.measured > 0.02


def test_drafts_that_use_a_draw_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """``draft_uniforms``: a draft drawn again with the draw that an earlier step has judged."""
    padded = case("vllm, asynchronous, probabilistic", "sampled")
    task = padded.problem(SAMPLINGS["temperature"], "xgrammar", 4)
    assert find(padded, task).verdict == LOSSLESS

    def shared(tape: Tape, seed: int, _: int, n: int) -> Draws:
        return np.array([tape.draw(seed, (DRAFT, 0, index)) for index in range(n)])

    monkeypatch.setattr(Tape, "draft_uniforms", shared)
    assert find(padded, task).verdict == UNPROMISED


def test_a_draw_that_is_used_in_an_unknown_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that says less than what was asked is not constant."""
    monkeypatch.setattr(Tape, "coin", lambda _, value: value)
    drafted = case("vllm, asynchronous, probabilistic", "sampled")
    with pytest.raises(AssertionError, match="not constant"):
        find(drafted, drafted.problem(SAMPLINGS["temperature"], "xgrammar", LIMIT))


def test_what_a_cell_leaves_fills_its_box() -> None:
    box = {(0, 0, 0): (0.25, 0.75)}
    cell = {(0, 0, 0): (0.5, 0.625), (1, 0, 0): (0.0, 0.5), (1, 1, 0): (0.25, 0.5)}
    rest = list(remainders(box, cell))
    assert sum(map(volume, rest)) + volume(cell) == volume(box)
    assert len(rest) == 5


# --- the real draws -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "drafts"), CONTROLS)
def test_real_draws_follow_the_promised_law_and_no_biased_one_passes(
    name: str, drafts: DraftLaw
) -> None:
    """As in ``experiments.losslessness``, with draws enough for a total variation of 0.09."""
    control = case(name, drafts)
    task = control.problem(SAMPLINGS["temperature"], "llguidance", 4)
    projection, promise = outcome_law(task), control.expected(task)
    alarm = 1e-6 / (2 * len(CONTROLS))
    draws = draws_needed(len(projection), VISIBLE, alarm, 0.99)
    outcomes = control.decode(task, range(draws))
    biased = total_variation(promise, projection) > VISIBLE
    assert biased == (name == "vllm, probabilistic")
    assert g_test(outcomes, promise).p_value > alarm
    assert (g_test(outcomes, projection).p_value < alarm) == biased


@pytest.mark.parametrize("drafts", ["argmax", "sampled"])
def test_own_samples_make_the_output_of_plain_draw_by_draw(drafts: DraftLaw) -> None:
    """L14: with the draws of a position, acceptance by equality changes nothing at all."""
    overlap, plain = case("trtllm, overlap", drafts), case("plain")
    task = plain.problem(SAMPLINGS["temperature"], "xgrammar", 6)
    assert overlap.decode(task, range(200)) == plain.decode(task, range(200))
