"""The work on static logits: masks that do not linger, each piece captured once."""

from __future__ import annotations

import pytest
import torch

from harness.argmax import largest, leads
from harness.bitmask import WORD_BITS, words
from harness.captures import Captures
from harness.clock import Clock
from harness.core import PAD, Proposal, Verdict
from harness.models.sampling import Sampling, probabilities
from harness.models.verification import VerifyBatch
from harness.models.verifiers import MatchOwnSample, RejectionSampling, TargetOnly, Verifier
from harness.static_logits import Places, choose

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


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_by_step_holds_for_one_forward_and_for_its_requests_only(
    places: Places, device: torch.device
) -> None:
    """D15, D16: three requests of 3, 1 and 2 rows, then two of 1 and 2."""
    vocab = 2 * WORD_BITS
    place = torch.empty((7, vocab), device=device)
    places.add(place)
    static = places.find(place)
    assert static is not None
    masks = torch.zeros((3, 3, words(vocab)), dtype=torch.int32)
    for request in range(3):
        for step in range(3):
            masks[request, step, 0] = 1 << 10 * request + step
    fresh = torch.arange(7.0 * vocab, device=device).view(7, vocab)
    last = vocab - 1

    place.copy_(fresh)
    static.mask_by_step(masks, [0, 3, 4], [[0, 1, 2], [0, 1, 2], [0, 2]], rows=6)
    assert choose(largest, place, places).tolist() == [0, 1, 2, 10, 20, 21, last]

    place.copy_(fresh)
    static.mask_by_step(masks, [0, 1], [[1], [0, 1], [1]], rows=3)
    assert choose(largest, place, places).tolist() == [last, 10, 11, last, last, last, last]

    place.copy_(fresh)
    static.mask_by_step(masks, [0, 1], [[], [0], []], rows=3)
    assert choose(largest, place, places).tolist() == [last] * 7
    assert places.captures.graphs == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_takes_masks_by_step_of_several_widths(
    places: Places, device: torch.device
) -> None:
    """A place with fewer rows than a buffer has sequences holds fewer requests."""
    place = torch.zeros((2, WORD_BITS), device=device)
    places.add(place)
    static = places.find(place)
    assert static is not None
    for positions in (1, 3, 1):
        place.zero_()
        masks = torch.full((4, positions, 1), 1 << positions, dtype=torch.int32)
        static.mask_by_step(masks, [0, 1], [[0, 1]], rows=2)
        assert choose(largest, place, places).tolist() == [positions, positions]
    assert places.captures.graphs == 3  # two of masking, one of choosing


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_host", [True, False], ids=["from the host", "on the device"])
def test_arguments_are_those_of_each_call_and_rows_without_one_get_padding(
    places: Places, device: torch.device, on_host: bool
) -> None:
    logits = torch.arange(3.0, device=device)[:, None].expand(3, 32).contiguous()
    places.add(logits)
    static = places.find(logits)
    assert static is not None

    def plus(logits: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        return logits[:, 0] + argument

    where = torch.device("cpu") if on_host else device
    three, one = torch.tensor([10.0, 20.0, 30.0], device=where), torch.tensor([5.0], device=where)
    assert choose(plus, logits, places, three).tolist() == [10, 21, 32]
    assert choose(plus, logits[:1], places, one).tolist() == [5]
    assert static.choose(plus, [one]).tolist() == [5, 1 + PAD, 2 + PAD]
    assert places.captures.graphs == 1


VOCAB = 40
SAMPLED = Sampling(temperature=0.7, top_k=20, top_p=0.9)


def _batch(logits: torch.Tensor, places: Places | None, seed: int, with_q: bool) -> VerifyBatch:
    """Three sequences: two drafts, none, and one draft behind padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = logits[[0, 1, 4]].argmax(dim=-1).tolist()
    proposals = [Proposal(tokens[:2]), Proposal(), Proposal([tokens[2], PAD])]
    if with_q:
        law = probabilities(torch.randn(2, VOCAB, generator=generator), SAMPLED)
        proposals[0].q = law.to(logits.device)
    return VerifyBatch(logits, proposals, [seed, 1, 2], [0, 5, 9], SAMPLED, places=places)


def _verify_all(
    verifier: Verifier, place: torch.Tensor, places: Places | None, with_q: bool
) -> list[list[Verdict]]:
    """Thirty verifications, each of other logits in the same place."""
    verdicts = []
    for seed in range(30):
        place[:7] = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        verdicts.append(verifier.verify(_batch(place[:7], places, seed, with_q)))
    return verdicts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("verifier", "with_q"),
    [
        (RejectionSampling(), False),
        (RejectionSampling(), True),
        (MatchOwnSample(), False),
        (TargetOnly(), False),
    ],
    ids=["rejection", "rejection with q", "own sample", "target only"],
)
def test_a_sampled_verification_in_place_decides_as_elsewhere(
    places: Places, verifier: Verifier, with_q: bool, device: torch.device
) -> None:
    place = torch.zeros((9, VOCAB), device=device)
    elsewhere = _verify_all(verifier, place, None, with_q)
    places.add(place)
    assert _verify_all(verifier, place, places, with_q) == elsewhere
    assert places.captures.graphs == 1
    assert {len(verdict.path) for step in elsewhere for verdict in step} >= {0, 1}
