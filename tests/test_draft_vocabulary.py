"""From draft ids to target ids and back: bit by bit, and token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness.argmax import largest_allowed
from harness.bitmask import WORD_BITS, words
from harness.captures import Captures
from harness.clock import Clock
from harness.core import PAD
from harness.draft_vocabulary import DraftVocabulary
from harness.errors import MatcherError
from harness.grammar.masks import MaskBuffer
from harness.static_logits import Places, choose

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
VOCAB = 4 * WORD_BITS + 5
EDGES = (0, 31, 32, 63, 64, 96, 127, 128, VOCAB - 1)
"""First and last bits of words, the sign bit (T7) and the last token."""


def bitmask(*rows: set[int]) -> torch.Tensor:
    """Mask rows that allow these target ids."""
    bits = torch.zeros((len(rows), words(VOCAB) * WORD_BITS), dtype=torch.int64)
    for row, allowed in zip(bits, rows, strict=True):
        row[list(allowed)] = 1
    values = bits.view(len(rows), -1, WORD_BITS) << torch.arange(WORD_BITS)
    return values.sum(-1).to(torch.int32)


class Allows:
    """A matcher that allows these tokens."""

    terminated, constrained = False, True

    def __init__(self, *tokens: int) -> None:
        self.row = bitmask(set(tokens))[0]

    def fill(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = self.row


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40, unique=True),
    allowed=st.lists(st.sets(st.integers(0, VOCAB - 1)), min_size=1, max_size=3),
)
def test_a_draft_id_is_forbidden_where_its_target_id_is(
    device: torch.device, ids: list[int], allowed: list[set[int]]
) -> None:
    """1.4a, step 4: ``execute(draft logits, d2t)``."""
    logits = torch.zeros(len(allowed), len(ids), device=device)
    DraftVocabulary(ids, VOCAB, device).mask(logits, bitmask(*allowed).to(device))
    for row, tokens in zip(logits.tolist(), allowed, strict=True):
        assert [value == 0 for value in row] == [token in tokens for token in ids]


@pytest.mark.parametrize("token", EDGES)
def test_every_bit_of_every_word_is_gathered(token: int) -> None:
    """One off in the word or in the bit is another token, which this mask forbids."""
    pruned = DraftVocabulary(EDGES, VOCAB, CPU)
    logits = torch.zeros(2, len(EDGES))
    pruned.mask(logits, bitmask({token}, set(range(VOCAB)) - {token}))
    draft_id = EDGES.index(token)
    assert logits[0].isfinite().nonzero().tolist() == [[draft_id]]
    assert logits[1].isinf().nonzero().tolist() == [[draft_id]]


def test_draft_ids_become_target_ids_on_the_host_and_on_the_device_alike() -> None:
    pruned = DraftVocabulary([7, 3, 100], VOCAB, CPU)
    assert len(pruned) == 3
    assert [pruned.target_id(draft_id) for draft_id in (2, 0, 1)] == [100, 7, 3]
    assert pruned.target_ids(torch.tensor([[2], [0]])).tolist() == [[100], [7]]
    assert pruned.target_id(PAD) == PAD


def test_a_law_over_draft_ids_is_spread_over_the_vocabulary() -> None:
    """T18: with d2t, q is scattered into target ids."""
    q = torch.tensor([[0.5, 0.2, 0.3], [0.0, 1.0, 0.0]])
    spread = DraftVocabulary([7, 3, 100], VOCAB, CPU).spread(q)
    assert spread.shape == (2, VOCAB)
    assert spread[:, [7, 3, 100]].equal(q)
    assert spread.sum(-1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_masks_reach_pruned_logits_wherever_they_lie(device: torch.device, static: bool) -> None:
    """By eager work, and by the graph that belongs to a place; a row that is not flagged, and one
    from the step before, masks nothing (T1)."""
    ids = (64, 5, VOCAB - 1)
    pruned, places = DraftVocabulary(ids, VOCAB, device), Places(Captures(Clock()))
    logits = torch.empty(3, len(ids), device=device)
    if static:
        places.add(logits, pruned)
    buffer = MaskBuffer(3, 1, VOCAB, device, places, pruned)
    fresh = torch.tensor([1.0, 3.0, 2.0], device=device)  # free: 5, then the last token, then 64
    for matchers, expected in (
        ({0: Allows(64, 7), 2: Allows(8, VOCAB - 1)}, [0, 1, 2]),
        ({1: Allows(64, VOCAB - 1), 2: Allows(6, 4)}, [1, 2, PAD]),
    ):
        logits[:] = fresh
        buffer.clear()
        for sequence, matcher in matchers.items():
            assert buffer.fill(sequence, 0, matcher)  # T7 asks for target ids: none is dead
        buffer.apply(logits, [0, 1, 2], [1, 1, 1])
        assert choose(largest_allowed, logits, places).tolist() == expected


def test_masks_by_step_are_for_whole_rows_only() -> None:
    buffer = MaskBuffer(1, 1, VOCAB, CPU, pruned=DraftVocabulary([1, 2], VOCAB, CPU))
    with pytest.raises(MatcherError, match=r"\[1, 2\] do not fit masks of 133 tokens"):
        buffer.apply_by_step(torch.zeros(1, 2), [0])
    with pytest.raises(MatcherError, match=r"\[1, 133\] do not fit masks of 2 tokens"):
        buffer.apply(torch.zeros(1, VOCAB), [0], [1])
