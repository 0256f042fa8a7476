"""How many drafts a step gets: the threshold, and what past acceptance makes fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
import torch

from harness.argmax import largest_allowed
from harness.core import Proposal
from harness.drafters import costs
from harness.drafters.base import levels
from harness.drafters.chain import Unless
from harness.drafters.config import DrafterConfig
from harness.drafters.costs import step_costs
from harness.drafters.length import (
    MEMORY,
    PRIOR_ACCEPTANCE,
    AdaptiveLength,
    Costs,
    FixedLength,
    Unsure,
)
from harness.drafters.model import Either, ModelDrafter
from harness.models.language_model import RowInput
from tests.drafters.makers import running
from tests.toys import TableLM, random_law, toy_table

TABLE = toy_table("abcdef")
COSTS = Costs(draft_ms=0.2, verify_ms=1.0, row_ms=0.05)


def learnt(outcomes: list[tuple[int, int]], costs: Costs = COSTS, k: int = 8) -> AdaptiveLength:
    length = AdaptiveLength(k, costs)
    for drafted, accepted in outcomes:
        length.observe(drafted, accepted)
    return length


def test_tokens_per_time_are_those_of_the_paper() -> None:
    """arXiv 2211.17192: equation 1, (1 - a^(k+1)) / (1 - a), over the costs of theorem 3.8."""
    length = learnt([(4, 3), (4, 1), (4, 4)] * 9)
    a = length.acceptance
    for k in range(9):
        expected = (1 - a ** (k + 1)) / (1 - a) / (1.0 + 0.25 * k)
        assert length.tokens_per_ms(k) == pytest.approx(expected)
    assert length.limit == max(range(9), key=length.tokens_per_ms)


def test_acceptance_counts_the_drafts_that_were_tested() -> None:
    """Behind the first wrong draft nothing is known."""
    for drafted, accepted, tested in ((4, 2, 3), (4, 4, 4), (4, 0, 1), (0, 0, 0)):
        once = learnt([(drafted, accepted)])
        assert once.acceptance == pytest.approx((accepted + PRIOR_ACCEPTANCE) / (tested + 1))


def test_an_outcome_is_forgotten_exponentially() -> None:
    length = learnt([(1, 0)])
    for _ in range(10):
        length.observe(0, 0)
    assert length.acceptance == pytest.approx(PRIOR_ACCEPTANCE / (MEMORY**10 + 1))


def test_good_drafts_lengthen_the_window_and_bad_ones_close_it() -> None:
    assert learnt([(8, 8)] * 30).limit == 8
    assert learnt([(8, 0)] * 30).limit == 0
    middling = learnt([(4, 2)] * 30).limit
    assert 0 < middling < 8


def test_a_closed_window_opens_again_after_a_while() -> None:
    length = learnt([(8, 0)] * 30)
    closed = 0
    while length.limit == 0:
        length.observe(0, 0)
        closed += 1
    assert 5 < closed < 200


def test_dear_drafts_and_dear_rows_shorten_the_window() -> None:
    outcomes = [(4, 3)] * 20
    cheap = learnt(outcomes, Costs(0.01, 1.0, 0.0)).limit
    assert learnt(outcomes, Costs(0.4, 1.0, 0.0)).limit < cheap
    assert learnt(outcomes, Costs(0.01, 1.0, 0.4)).limit < cheap
    assert learnt(outcomes, Costs(2.0, 1.0, 0.0)).limit == 0


def test_a_drafter_drafts_what_the_length_says_and_learns_from_every_step() -> None:
    drafter = ModelDrafter(TableLM(random_law(TABLE, 1), len(TABLE), 1), 4, length=FixedLength(2))
    (proposal,) = drafter.free([running(TABLE, [1])])
    assert proposal.drafted_raw == 2
    (proposal,) = drafter.free([running(TABLE, [1])], limit=1)
    assert proposal.drafted_raw == 1


@pytest.mark.parametrize(
    ("proposal", "expected"),
    [
        (Proposal(), 0),
        (Proposal([1, 2, -1]), 2),
        (Proposal([1, 2, 3, 4], parents=[-1, -1, 0, 0]), 2),
        (Proposal([1, 2, 3], parents=[-1, 0, 1]), 3),
    ],
)
def test_a_tree_counts_its_depth_and_padding_counts_nothing(
    proposal: Proposal, expected: int
) -> None:
    assert levels(proposal) == expected


def test_a_trimmed_draft_has_failed() -> None:
    proposal = Proposal([1, 2, 3])
    proposal.tokens = [1]
    assert levels(proposal) == 3


# -- The threshold ---------------------------------------------------------------------------


def test_unsure_is_asked_of_the_best_token() -> None:
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3]]).log()
    assert Unsure(0.5)(logits).tolist() == [False, True]
    assert Unsure(0.55, among=2)(logits).tolist() == [False, False]  # .4 / .7 (L7, L8)


def test_a_chain_stops_before_the_token_that_the_model_is_unsure_of() -> None:
    def law(tokens: tuple[int, ...]) -> list[float]:
        sure = len(tokens) < 4
        return [math.log(0.9 if sure else 0.3) if t == 1 else math.log(0.02) for t in range(7)]

    model = TableLM(law, len(TABLE), 1)
    drafter = ModelDrafter(model, 4, stop=Unsure(0.8))
    (proposal,) = drafter.free([running(TABLE, [1])])
    assert proposal.tokens == [1, 1]
    chain = drafter.chain([running(TABLE, [1])])  # also where a strategy drives the loop
    while chain.active:
        chain.extend(chain.forward())
    assert chain.proposals()[0].tokens == [1, 1]
    (proposal,) = drafter.free([running(TABLE, [1])], stop=Unsure(0.99))
    assert proposal.tokens == []  # either rule stops


def test_equal_rules_are_equal_work() -> None:
    """So they share a capture, whoever made them: a run has several drafters, and many steps."""

    def work() -> Unless:
        return Unless(Either(Unsure(0.8), Unsure(0.5, among=10)), largest_allowed)

    assert work() == work()
    assert hash(work()) == hash(work())
    assert work() != Unless(Either(Unsure(0.8), Unsure(0.6, among=10)), largest_allowed)


# -- The costs -------------------------------------------------------------------------------


class Timed(TableLM):
    """A forward takes 1 ms and each row of a sequence 2 ms of a clock that nothing else moves."""

    now = 0.0

    def forward(self, inputs: SequenceOf[RowInput]) -> torch.Tensor:
        self.now += 1e-3 + 2e-3 * max(row.logits for row in inputs)
        return super().forward(inputs)


def test_costs_that_are_given_are_not_measured() -> None:
    config = DrafterConfig(length="adaptive", draft_ms=1.5, verify_ms=2.5, row_ms=0.25)
    model = Timed(random_law(TABLE, 1), len(TABLE), 2)
    assert step_costs(config, model, model, 2, 4) == Costs(1.5, 2.5, 0.25)
    assert model.forwards == 0


def test_costs_are_measured_where_they_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Timed(random_law(TABLE, 1), len(TABLE), 2)
    model.cells = [[0] * 200, [0] * 200]
    monkeypatch.setattr(costs, "perf_counter", lambda: model.now)
    config = DrafterConfig(length="adaptive")
    assert step_costs(config, model, model, 2, 4) == Costs(draft_ms=3, verify_ms=3, row_ms=2)
    assert step_costs(replace(config, draft_ms=7), model, None, 2, 4) == Costs(7, 3, 2)
    assert step_costs(config, model, None, 2, 4).draft_ms == 0  # nobody runs a draft model
