"""Drafts that know nothing."""

from __future__ import annotations

import torch

from harness.drafters.uniform import UniformDrafter
from harness.models.sampling import Sampling
from tests.drafters.makers import running
from tests.toys import toy_table

TABLE = toy_table("abcdefg")
WARM = Sampling(temperature=1.0)


def test_every_token_is_drafted_and_the_law_is_reported() -> None:
    sequence = running(TABLE, [])
    drafter, seen = UniformDrafter(3, len(TABLE)), set[int]()
    for sequence.steps in range(100):
        (proposal,) = drafter.free([sequence], WARM)
        assert proposal.q is not None
        torch.testing.assert_close(proposal.q, torch.full((3, len(TABLE)), 1 / len(TABLE)))
        assert proposal.draft_forwards == 0
        seen |= set(proposal.tokens)
    assert seen == set(range(len(TABLE)))


def test_drafts_that_are_taken_for_certain_report_no_law() -> None:
    (proposal,) = UniformDrafter(3, len(TABLE)).free([running(TABLE, [])])
    assert len(proposal.tokens) == 3
    assert proposal.q is None


def test_drafts_belong_to_a_request_and_a_step() -> None:
    drafter = UniformDrafter(4, len(TABLE))

    def drawn(seed: int, step: int) -> list[int]:
        sequence = running(TABLE, [], seed=seed)
        sequence.steps = step
        return drafter.free([running(TABLE, [], seed=9), sequence])[1].tokens

    assert drawn(1, 1) == drawn(1, 1)
    assert len({tuple(drawn(seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_without_room_nothing_is_drawn() -> None:
    (proposal,) = UniformDrafter(3, len(TABLE)).free([running(TABLE, [], max_new_tokens=1)], WARM)
    assert (proposal.tokens, proposal.q) == ([], None)
