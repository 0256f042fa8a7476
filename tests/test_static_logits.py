"""The work on static logits: the same choices as plain reductions, masks that do not linger."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness.bitmask import WORD_BITS, words
from harness.clock import Clock
from harness.core import PAD
from harness.static_logits import BLOCK, Captures, Places, choose, largest, leads

DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.fixture
def places() -> Places:
    return Places(Captures(Clock()))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.sampled_from([3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]),
    levels=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_two_stages_choose_what_one_reduction_chooses(
    rows: int, vocab: int, levels: int, seed: int
) -> None:
    """Few levels make many ties: the first of equals wins, with a lead of 0."""
    torch.manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab)).float()
    logits[torch.rand(rows, vocab) < 0.3] = -math.inf
    allowed = logits.amax(-1) > -math.inf
    tokens, gaps = leads(logits)
    assert torch.equal(tokens[allowed].long(), logits.argmax(-1)[allowed])
    assert torch.equal(largest(logits)[allowed], logits.argmax(-1)[allowed])
    top = logits.topk(2).values
    assert torch.equal(gaps[allowed].float(), (top[:, 0] - top[:, 1])[allowed])
    assert bool((tokens[~allowed] == PAD).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_holds_for_one_forward_and_for_its_rows_only(
    places: Places, device: torch.device
) -> None:
    vocab = 2 * WORD_BITS
    place = torch.empty((3, vocab), device=device)
    places.add(place)
    only_token_5 = torch.zeros((2, words(vocab)), dtype=torch.int32)
    only_token_5[1, 0] = 1 << 5
    fresh = torch.arange(3.0 * vocab, device=device).view(3, vocab)

    place.copy_(fresh)
    static = places.find(place[:2])
    assert static is not None
    static.mask(only_token_5, sources=[1], targets=[1])
    assert choose(largest, place[:2], places).tolist() == [vocab - 1, 5]

    place.copy_(fresh)
    static.mask(only_token_5, sources=[1], targets=[0])
    assert choose(largest, place, places).tolist() == [5, vocab - 1, vocab - 1]


def test_other_logits_are_worked_on_as_they_are(places: Places) -> None:
    places.add(torch.zeros(2, 64))
    other = torch.eye(2, 64)
    assert places.find(other) is None
    assert choose(largest, other, places).tolist() == [0, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_each_piece_of_work_is_captured_once(places: Places, device: torch.device) -> None:
    logits = torch.zeros((2, 64), device=device)
    places.add(logits)
    for value in (1.0, 2.0, 3.0):
        logits[:, 7] = value
        assert choose(leads, logits, places).tolist() == [[7.0, 7.0], [value, value]]
        choose(largest, logits, places)
    assert places.captures.graphs == 2
