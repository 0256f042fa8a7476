"""The draft loop: what it feeds, what it proposes, and what its cache keeps."""

from __future__ import annotations

import pytest
import torch

from harness.core import Sequence
from harness.drafters.model import ModelDrafter, keep_confirmed
from harness.models.sampling import Sampling, probabilities
from tests.toys import TableLM, request, toy_table

TABLE = toy_table("abcdef")


def counting(tokens: tuple[int, ...]) -> list[float]:
    """The next letter follows the last; the one after it is the runner-up."""
    last = tokens[-1]
    return [3.0 if t == last + 1 else 2.0 if t == last + 2 else -float(t) for t in range(7)]


def drafter(k: int = 3, slots: int = 2) -> ModelDrafter:
    return ModelDrafter(TableLM(counting, len(TABLE), slots), k)


def running(slot: int = 0, output: tuple[int, ...] = (1,), limit: int = 20) -> Sequence:
    sequence = Sequence(request(TABLE, None, max_new_tokens=limit), slot)
    sequence.output_ids = list(output)
    return sequence


def test_the_argmax_chain_is_one_hot() -> None:
    (proposal,) = drafter().free([running()])
    assert proposal.tokens == [2, 3, 4]
    assert proposal.q is None
    assert proposal.parents is None
    assert proposal.draft_forwards == 3


def test_sampled_drafts_report_the_law_they_were_drawn_from() -> None:
    warm = Sampling(temperature=0.7)
    (proposal,) = drafter().free([running()], warm)
    assert proposal.q is not None
    for i in range(3):
        seen = (0, 1, *proposal.tokens[:i])
        expected = probabilities(torch.tensor([counting(seen)]), warm)[0]
        torch.testing.assert_close(proposal.q[i], expected)


def test_one_of_the_remaining_tokens_is_left_to_the_target() -> None:
    proposals = drafter().free([running(0, (1,), limit=3), running(1, (1,), limit=2)])
    assert [len(proposal.tokens) for proposal in proposals] == [1, 0]
    (proposal,) = drafter().free([running(limit=1, output=())], limit=5)
    assert proposal.tokens == []


def test_a_stopped_chain_does_not_get_the_token_it_stopped_before() -> None:
    def at_d(logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1) == 3

    (proposal,) = drafter().free([running()], stop=at_d)
    assert proposal.tokens == [2]
    assert proposal.draft_forwards == 2
    (tree,) = drafter().free([running()], width=2, stop=at_d)
    assert (tree.tokens[0], len(tree.tokens), tree.draft_forwards) == (2, 2, 2)


def test_after_full_acceptance_the_last_draft_is_fed_with_the_new_token() -> None:
    sequence = running()
    model = drafter()
    model.free([sequence])
    keep_confirmed(sequence, [2, 3, 4, 5])
    sequence.output_ids += [2, 3, 4, 5]
    assert sequence.draft_pending == [4, 5]
    (proposal,) = model.free([sequence])
    assert proposal.tokens[0] == 6


@pytest.mark.parametrize(("emitted", "pending"), [([9], [9]), ([2, 9], [9]), ([2, 3, 9], [9])])
def test_after_a_rejection_only_the_new_token_is_pending(
    emitted: list[int], pending: list[int]
) -> None:
    sequence = running()
    drafter().free([sequence])
    keep_confirmed(sequence, emitted)
    sequence.output_ids += emitted
    assert sequence.draft_pending == pending


def test_a_wide_chain_has_the_runners_up_as_leaves() -> None:
    (proposal,) = drafter().free([running()], width=2)
    assert proposal.tokens == [2, 3, 3, 4, 4, 5]
    assert proposal.parents == [-1, -1, 0, 0, 2, 2]


def test_prefill_leaves_one_step_like_the_others() -> None:
    sequence = running(output=())
    model = drafter()
    model.prefill([sequence])
    assert sequence.draft_pending == []
    sequence.output_ids = [1]
    assert sequence.draft_pending == [1]
