"""Which mask rows count, and on which rows of the logits they land."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness.bitmask import apply_by_step
from harness.captures import Captures
from harness.clock import Clock
from harness.errors import MatcherError
from harness.grammar.masks import MaskBuffer
from harness.static_logits import Places

CPU = torch.device("cpu")
INF = torch.inf


class Allows:
    """A matcher in one state: it allows these tokens, and these padding bits."""

    def __init__(self, *tokens: int, terminated: bool = False, constrained: bool = True) -> None:
        self.tokens = tokens
        self.terminated = terminated
        self.constrained = constrained
        self.fills = 0

    def fill(self, mask: torch.Tensor, row: int) -> None:
        self.fills += 1
        mask[row] = pack(self.tokens, mask.shape[1])


def pack(tokens: tuple[int, ...], words: int) -> torch.Tensor:
    """The mask row that allows ``tokens``, int32 ``[words]``."""
    bits = [0] * words
    for token in tokens:
        bits[token // 32] |= 1 << token % 32
    return torch.tensor(bits).to(torch.int32)


def allowed(logits: torch.Tensor) -> list[list[int]]:
    """By row, the columns that are not masked."""
    return [(row != -INF).nonzero().flatten().tolist() for row in logits]


def touched(logits: torch.Tensor) -> list[int]:
    """The rows with a masked column."""
    return (logits == -INF).any(1).nonzero().flatten().tolist()


# -- the buffer ---------------------------------------------------------------------------------


def test_every_sequence_owns_the_same_number_of_rows_whatever_it_drafts() -> None:
    """V1.2b, R5: request j owns rows [j·(N+1), (j+1)·(N+1))."""
    buffer = MaskBuffer(3, 4, 70, CPU)
    assert buffer.host.shape == (12, 3)
    assert buffer.host.dtype == torch.int32
    assert [buffer.row(sequence, 0) for sequence in range(3)] == [0, 4, 8]
    assert buffer.row(2, 3) == 11


@pytest.mark.parametrize("place", [(3, 0), (-1, 0), (0, 4), (0, -1)])
def test_a_row_of_another_sequence_cannot_be_reached(place: tuple[int, int]) -> None:
    with pytest.raises(MatcherError, match="3 sequences of 4 rows"):
        MaskBuffer(3, 4, 70, CPU).row(*place)


def test_a_stale_row_is_skipped_after_clear() -> None:
    """T1: nothing is filled with ones, the flag alone decides."""
    buffer = MaskBuffer(1, 2, 4, CPU)
    buffer.fill(0, 0, Allows(1))
    buffer.fill(0, 1, Allows(2))
    buffer.clear()
    buffer.fill(0, 1, Allows(3))
    logits = torch.zeros(2, 4)
    buffer.apply(logits, [0], [2])
    assert allowed(logits) == [[0, 1, 2, 3], [3]]
    assert buffer.allows(0, 0, 2)
    assert not buffer.allows(0, 1, 2)


@pytest.mark.parametrize(
    ("vocab_size", "tokens", "alive"),
    [
        (40, (), False),
        (40, (39,), True),
        (40, (40, 63), False),  # padding bits do not count
        (40, (31,), True),  # the sign bit does
        (64, (63,), True),
        (32, (), False),
    ],
)
def test_a_row_without_a_legal_token_is_a_dead_end_and_stays_unflagged(
    vocab_size: int, tokens: tuple[int, ...], alive: bool
) -> None:
    """T7."""
    buffer = MaskBuffer(1, 1, vocab_size, CPU)
    buffer.fill(0, 0, Allows(0))
    assert buffer.fill(0, 0, Allows(*tokens)) is alive
    assert buffer.flagged(0, 0) is alive


def test_a_terminated_matcher_is_not_asked_and_its_row_masks_nothing() -> None:
    """V1.2g, R8, R9, Q10: engines raise when they are asked after the end."""
    buffer = MaskBuffer(1, 1, 4, CPU)
    ended = Allows(terminated=True)
    buffer.fill(0, 0, Allows(1))
    assert buffer.fill(0, 0, ended)
    assert (ended.fills, buffer.flagged(0, 0)) == (0, False)


def test_a_matcher_whose_grammar_has_not_started_is_not_asked_either() -> None:
    """D13: rows before a late start are unmasked."""
    buffer = MaskBuffer(1, 1, 4, CPU)
    asleep = Allows(constrained=False)
    buffer.fill(0, 0, Allows(1))
    assert buffer.fill(0, 0, asleep)
    assert (asleep.fills, buffer.flagged(0, 0)) == (0, False)


def test_a_copied_row_says_what_its_source_says() -> None:
    """V1.2d, case D: rows behind a refused draft repeat the failing row."""
    buffer = MaskBuffer(2, 3, 4, CPU)
    buffer.fill(1, 1, Allows(2))
    buffer.copy(1, 2, 1)
    assert buffer.flagged(1, 2)
    assert [buffer.allows(1, 2, token) for token in range(4)] == [False, False, True, False]


def test_a_copy_of_an_unmasked_row_is_unmasked() -> None:
    """V1.2d, case E: the failing row of a terminated grammar masks nothing, nor do its copies."""
    buffer = MaskBuffer(1, 2, 4, CPU)
    buffer.fill(0, 1, Allows(2))
    buffer.copy(0, 1, 0)
    assert not buffer.flagged(0, 1)


def test_no_row_allows_a_token_outside_the_vocabulary() -> None:
    buffer = MaskBuffer(1, 1, 40, CPU)
    assert not buffer.allows(0, 0, -1)
    assert not buffer.allows(0, 0, 40)
    buffer.fill(0, 0, Allows(31, 39))
    assert [token for token in range(-1, 64) if buffer.allows(0, 0, token)] == [31, 39]


# -- packed -------------------------------------------------------------------------------------


def test_packed_rows_land_on_the_logits_of_their_own_sequence() -> None:
    """V1.3's example: A has 2 drafts, B is plain with 1, C has none; rows 3 and 4 stay free."""
    buffer = MaskBuffer(3, 3, 8, CPU)
    buffer.fill(2, 0, Allows(7))
    for position in range(3):
        buffer.fill(0, position, Allows(position))
    logits = torch.zeros(6, 8)
    buffer.apply(logits, [0, 3, 5], [3, 2, 1])
    everything = list(range(8))
    assert allowed(logits) == [[0], [1], [2], everything, everything, [7]]


def test_a_row_behind_the_sequences_logits_is_left_out() -> None:
    """V1.3d: a mask that was filled for a draft which was trimmed later hits no neighbour."""
    buffer = MaskBuffer(2, 2, 4, CPU)
    buffer.fill(0, 0, Allows(0))
    buffer.fill(0, 1, Allows(1))
    for apply in (
        lambda x: buffer.apply(x, [0, 1], [1, 1]),
        lambda x: buffer.apply_by_step(x, [0, 1]),
    ):
        logits = torch.zeros(2, 4)
        apply(logits)
        assert allowed(logits) == [[0], [0, 1, 2, 3]]


def test_a_row_that_allows_everything_leaves_the_next_row_alone() -> None:
    """The CPU kernel of xgrammar 0.2.9 writes one column past such a row."""
    buffer = MaskBuffer(2, 1, 5, CPU)
    buffer.fill(0, 0, Allows(*range(5)))
    logits = torch.zeros(2, 5)
    buffer.apply(logits, [0, 1], [1, 1])
    assert touched(logits) == []


def test_a_batch_without_drafts_has_one_row_per_sequence() -> None:
    """Q6: the layout follows the drafts of this step, not the largest number of them."""
    buffer = MaskBuffer(2, 5, 4, CPU)
    buffer.fill(0, 0, Allows(0))
    buffer.fill(1, 0, Allows(3))
    logits = torch.zeros(2, 4)
    buffer.apply(logits, [0, 1], [1, 1])
    assert allowed(logits) == [[0], [3]]


def test_logits_of_another_width_are_refused() -> None:
    """V1.3e: columns behind the mask would stay free."""
    buffer = MaskBuffer(1, 1, 4, CPU)
    with pytest.raises(MatcherError, match="width of the model's logits"):
        buffer.apply(torch.zeros(1, 5), [0], [1])
    with pytest.raises(MatcherError, match="width of the model's logits"):
        buffer.apply_by_step(torch.zeros(1, 5), [0])


def test_a_layout_past_the_logits_is_refused() -> None:
    with pytest.raises(MatcherError, match="sequence 0 owns logits rows 1 to 2"):
        MaskBuffer(1, 2, 4, CPU).apply(torch.zeros(2, 4), [1], [2])


# -- by step ------------------------------------------------------------------------------------

FTP = torch.tensor([0, 3, 4], dtype=torch.int32)
"""D16's example: three requests of 3, 1 and 2 rows."""


@pytest.mark.parametrize(
    ("ftp", "step", "indices", "expected"),
    [
        (FTP, 0, [0, 1, 2], {0: 0, 3: 1, 4: 2}),
        (FTP, 1, [0, 1, 2], {1: 0, 5: 2}),  # request 1 has no second row
        (FTP, 2, [0, 2], {2: 0}),
        (None, 0, [0, 2], {0: 0, 2: 2}),
        (FTP, 0, [], {}),
        (FTP, 1, [-1, 2, -1], {5: 2}),  # -1 stands for none
        (None, 0, [2, -1], {2: 2}),
    ],
)
def test_a_step_masks_one_row_of_each_listed_request_that_is_long_enough(
    ftp: torch.Tensor | None, step: int, indices: list[int], expected: dict[int, int]
) -> None:
    """D16: row to the request whose mask it gets."""
    masks = torch.stack([pack((request,), 1) for request in range(3)])
    logits = torch.zeros(6, 4)
    apply_by_step(logits, masks, torch.tensor(indices, dtype=torch.int32), ftp, step)
    assert touched(logits) == sorted(expected)
    assert {row: allowed(logits)[row] for row in expected} == {
        row: [request] for row, request in expected.items()
    }


def test_columns_behind_a_narrow_bitmask_stay_untouched() -> None:
    """D16: columns >= min(V, 32·words)."""
    logits = torch.zeros(1, 70)
    apply_by_step(logits, pack((31,), 1)[None], torch.zeros(1, dtype=torch.int32))
    assert allowed(logits) == [list(range(31, 70))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bitmask": torch.zeros(3, 2, dtype=torch.int32)}, "has 2 words, the logits 1"),
        ({"bitmask": torch.zeros(3, 1)}, "int32 bitmask"),
        ({"logits": torch.zeros(4)}, "logits"),
        ({"indices": torch.zeros(1)}, "indices: give an int32 list"),
        ({"ftp": FTP[:2]}, "each of the 3 requests"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "logits": torch.zeros(6, 32),
        "bitmask": torch.zeros(3, 1, dtype=torch.int32),
        "indices": torch.zeros(1, dtype=torch.int32),
        "ftp": FTP,
    }
    with pytest.raises(MatcherError, match=message):
        apply_by_step(**{**arguments, **change})


# -- both ---------------------------------------------------------------------------------------


MOST = 4
"""Sequences of a batch."""

Batch = list[tuple[int, list[list[int] | None]]]
"""By sequence, its rows and by position what is allowed, None for everything."""


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[int, int, list[Batch]]:
    """Vocabulary, rows per sequence, and batches, one after the other."""
    vocab_size, stride = draw(st.integers(1, 70)), draw(st.integers(1, 4))
    tokens = st.none() | st.lists(st.integers(0, vocab_size - 1), max_size=5)
    filled = st.lists(tokens, min_size=stride, max_size=stride)
    batches = st.lists(st.tuples(st.integers(1, stride), filled), min_size=1, max_size=MOST)
    return vocab_size, stride, draw(st.lists(batches, min_size=1, max_size=3))


def fill_and_mask(buffer: MaskBuffer, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Fill the rows of a batch; ``logits``, masked by the definition."""
    expected = logits.clone()
    buffer.clear()
    first = 0
    for sequence, (rows, filled) in enumerate(batch):
        for position, tokens in enumerate(filled):
            if tokens is None or not buffer.fill(sequence, position, Allows(*tokens)):
                continue
            if position < rows:
                forbidden = [token for token in range(buffer.vocab_size) if token not in tokens]
                expected[first + position, forbidden] = -INF
        first += rows
    return expected


@settings(max_examples=150, deadline=None)
@given(ragged_batches())
def test_packed_by_step_and_by_step_in_place_agree_on_any_ragged_layout(
    drawn: tuple[int, int, list[Batch]],
) -> None:
    """D15 against V1.3b, all against the definition; a place is used again and again."""
    vocab_size, stride, batches = drawn
    place = torch.zeros(MOST * stride + 1, vocab_size)
    places = Places(Captures(Clock()))
    places.add(place)
    buffer = MaskBuffer(MOST, stride, vocab_size, CPU, places)
    buffer.host.fill_(0x5A5A5A5A)  # stale bits everywhere
    for batch in batches:
        rows = [count for count, _ in batch]
        first = [sum(rows[:sequence]) for sequence in range(len(rows))]
        fresh = torch.randn(sum(rows), vocab_size)
        expected = fill_and_mask(buffer, batch, fresh)
        packed, by_step = fresh.clone(), fresh.clone()
        buffer.apply(packed, first, rows)
        buffer.apply_by_step(by_step, first)
        assert torch.equal(packed, expected)
        assert torch.equal(by_step, expected)

        place.zero_()
        place[: len(fresh)] = fresh
        buffer.apply_by_step(place[: len(fresh)], first)
        assert torch.equal(place[: len(fresh)], expected)
        assert not place[len(fresh) :].any()
    assert places.captures.graphs <= 1


def test_masks_need_no_gpu_packages_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harness.bitmask_triton", None)
    logits = torch.zeros(1, 4)
    apply_by_step(logits, pack((1,), 1)[None], torch.zeros(1, dtype=torch.int32))
    assert allowed(logits) == [[1]]


# -- Triton -------------------------------------------------------------------------------------


def triton_masks() -> ModuleType:
    """The kernel's module; without a GPU, in Triton's interpreter if that was asked for."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    pytest.importorskip("triton", reason="Triton is not installed")
    return importlib.import_module("harness.bitmask_triton")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_masks_what_the_reference_masks(seed: int) -> None:
    """D16 on random ragged layouts, several blocks wide, in strided rows, with and without ftp."""
    kernel = triton_masks().apply_by_step_triton
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    requests, vocab_size = number(1, 6), number(1, 5000)
    words = number(1, -(-vocab_size // 32))
    lengths = torch.randint(1, 4, (requests,), generator=draw)
    ftp = (lengths.cumsum(0) - lengths).to(torch.int32)
    step, ragged = number(0, 2), seed % 4 != 0
    masks = torch.randint(-(1 << 31), 1 << 31, (requests, 3, words), generator=draw)
    bitmask = masks.to(torch.int32)[:, step]
    listed = torch.randperm(requests, generator=draw)[: number(0, requests)].to(torch.int32)
    listed = torch.cat((listed, torch.full((number(0, 2),), -1, dtype=torch.int32)))  # of none
    expected = torch.randn(int(lengths.sum()), vocab_size, generator=draw)
    actual = expected.to(device, copy=True)

    apply_by_step(expected, bitmask, listed, ftp if ragged else None, step)
    kernel(
        actual,
        masks.to(torch.int32).to(device)[:, step],
        listed.to(device),
        ftp.to(device) if ragged else None,
        step,
    )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.gpu
def test_masks_on_a_gpu_are_those_on_a_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    results = []
    for device in (CPU, torch.device("cuda")):
        places = Places(Captures(Clock()))
        buffer = MaskBuffer(3, 3, 4099, device, places)
        for sequence, position in ((0, 0), (0, 1), (0, 2), (2, 0)):
            buffer.fill(sequence, position, Allows(sequence + position, 31, 4098))
        packed = torch.zeros(6, 4099, device=device)
        by_step = packed.clone()
        buffer.apply(packed, [0, 3, 5], [3, 2, 1])
        buffer.apply_by_step(by_step, [0, 3, 5])
        in_place = torch.zeros(8, 4099, device=device)
        places.add(in_place)
        buffer.apply_by_step(in_place[:6], [0, 3, 5])
        results += [packed.cpu(), by_step.cpu(), in_place[:6].cpu()]
        assert not in_place[6:].any()
    assert all(torch.equal(result, results[0]) for result in results)
