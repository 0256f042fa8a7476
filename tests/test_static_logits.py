"""The work on static logits: masks that do not linger, each piece captured once."""

from __future__ import annotations

import pytest
import torch

from harness.argmax import largest, leads
from harness.bitmask import WORD_BITS, words
from harness.clock import Clock
from harness.static_logits import Captures, Places, choose

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
