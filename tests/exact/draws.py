"""Integrate a whole run over all its random draws, with the real loop, strategy and verifier.

Every draw has an address (``harness.models.draws``): stream and output position for the target,
step and index for the drafts. So an output is a function on a unit cube with one axis per address,
constant on boxes, since all that is ever done with a draw is to compare it. A run at a point of a
box is watched: each comparison tells up to where its answer stays the same, which gives the *cell*
around the point; what is left of the box falls into new boxes, until nothing is left. The volumes
of the cells with one output add up to its probability: no statistics, and two uses of one draw
(which would not be independent) come out as the bias that they are.

Coins are objects that note what they are compared with. Tokens come from ``sample``, which inverts
a distribution: the interval of its token is known. Points are random inside their boxes, and each
cell is run at a second one: a cell that is not constant is an error (``confirm``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from harness.core import Verdict
from harness.drafters import chain, uniform
from harness.models import sampling, verification, verifiers
from harness.models.draws import COIN, RESAMPLE, SAMPLE, Draws
from harness.models.sampling import sample
from harness.models.verifiers import (
    CheckThenResample,
    MatchOwnSample,
    Verifier,
    VerifyBatch,
)
from tests.exact.laws import Outcome, OutcomeLaw

Address = tuple[int, int, int]
"""(stream, output position, 0) of a target's draw; (``DRAFT``, step, index) of a draft's."""
Interval = tuple[float, float]
Box = Mapping[Address, Interval]
"""By address the interval of its draw; addresses that are not named range over [0, 1)."""

DRAFT = 3
"""Stands for the stream of drafts: the target's streams are 0 to 2."""
UNIT: Interval = (0.0, 1.0)
DUST = 1e-13
"""Boxes of less volume come from rounding; they are dropped, and their volume is reported."""

Decode = Callable[[int, "Tape"], list[Outcome]]
"""Decode that many requests, with seeds 0, 1, …, under a tape; the output of each."""


def volume(box: Box) -> float:
    return math.prod(high - low for low, high in box.values())


class Coin(float):
    """A draw that tells where the answer to a comparison turns."""

    scale: float
    tell: Callable[[float], None]

    def __new__(cls, value: float, tell: Callable[[float], None], scale: float = 1.0) -> Coin:
        coin = super().__new__(cls, value * scale)
        coin.tell, coin.scale = tell, scale
        return coin

    def __mul__(self, factor: float) -> Coin:
        return Coin(float(self) / self.scale, self.tell, self.scale * factor)

    def __lt__(self, threshold: float) -> bool:
        self.tell(threshold / self.scale)
        return float(self) < threshold


class WatchedDraws(np.ndarray[Any, Any]):
    """Draws of a batch whose single values are coins."""

    tape: Tape

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, WatchedDraws):
            self.tape = source.tape

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return self.tape.coin(float(found)) if isinstance(found, np.floating) else found

    def tolist(self) -> Any:
        return [self.tape.coin(value) for value in super().tolist()]


@dataclass
class Tape:
    """The draws of a batch of runs, and what was asked of them; a request's seed is its run.

    Attributes:
        boxes: by run, where its draws come from.
        rng: for the points inside the boxes.
        cells: by run, the box in which all that was asked has the same answers.
    """

    boxes: Sequence[Box]
    rng: np.random.Generator
    cells: list[dict[Address, Interval]] = field(init=False)
    _values: dict[tuple[int, Address], float] = field(init=False, default_factory=dict)
    _owners: dict[float, tuple[int, Address]] = field(init=False, default_factory=dict)
    _rows: list[tuple[int, Address, Interval]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.cells = [{} for _ in self.boxes]

    def draw(self, run: int, address: Address) -> float:
        """The value at an address: in one run always the same."""
        key = run, address
        if key not in self._values:
            low, high = self.boxes[run].get(address, UNIT)
            value = low + (high - low) * float(self.rng.random())
            self._values[key] = value
            self._owners[value] = key
        return self._values[key]

    def coin(self, value: float) -> Coin:
        """The draw with this value, as an object that watches its comparisons."""
        run, address = self._owners[value]

        def tell(threshold: float) -> None:
            self.cut(run, address, (0.0, threshold) if value < threshold else (threshold, 1.0))

        return Coin(value, tell)

    def cut(self, run: int, address: Address, interval: Interval) -> None:
        """An answer holds on this interval only."""
        box = self.boxes[run].get(address, UNIT)
        low, high = self.cells[run].get(address, box)
        self.cells[run][address] = max(low, interval[0]), min(high, interval[1])

    def use(self, row: int) -> None:
        """The token that was drawn in this row of the verification matters."""
        self.cut(*self._rows[row])

    # What stands in for the functions of the harness:

    def uniforms(self, seed: int, position: int, n: int) -> Draws:
        rows = range(position, position + n)
        streams = (COIN, SAMPLE, RESAMPLE)
        return np.array([[*(self.draw(seed, (s, row, 0)) for s in streams), 0.0] for row in rows])

    def draft_uniforms(self, seed: int, step: int, n: int) -> Draws:
        return np.array([self.draw(seed, (DRAFT, step, index)) for index in range(n)])

    def sample(self, probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """``sample``, noting the interval of each draw that gives the same token."""
        tokens = sample(probabilities, u)
        sums = torch.nn.functional.pad(probabilities.double().cumsum(-1), (1, 0))
        places = tokens.clamp_min(0)[:, None]
        ends = torch.cat([sums.gather(-1, places), sums.gather(-1, places + 1)], dim=-1)
        intervals = (ends / sums[:, -1:]).tolist()
        drawn = [
            (*self._owners[value], (low, high))
            for value, (low, high) in zip(u.tolist(), intervals, strict=True)
        ]
        if drawn[0][1][0] == SAMPLE:  # in advance, for every row
            self._rows = drawn
        else:
            for run, address, interval in drawn:
                self.cut(run, address, interval)
        return tokens

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Let the harness draw from this tape."""
        draws = VerifyBatch.draws

        def watched(batch: VerifyBatch) -> Draws:
            found = draws(batch).view(WatchedDraws)
            found.tape = self
            return found

        with ExitStack() as stack:
            for module, name in (
                (verification, "uniforms"),
                *((module, "draft_uniforms") for module in (chain, uniform)),
                *((module, "sample") for module in (sampling, verifiers, uniform)),
            ):
                stack.enter_context(patch.object(module, name, getattr(self, name)))
            stack.enter_context(patch.object(VerifyBatch, "draws", watched))
            yield


@dataclass(frozen=True)
class WatchedVerifier(Verifier):
    """A verifier, and which of the tokens that it drew in advance mattered."""

    inner: Verifier
    tape: Tape

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        verdicts = self.inner.verify(batch)
        if batch.sampling.greedy:
            return verdicts
        for first, verdict in zip(batch.first_row, verdicts, strict=True):
            decided = [first, *(first + 1 + node for node in verdict.path)]
            # A ratio test uses the token of the row where it ends; the others compare each one.
            compares = isinstance(self.inner, (MatchOwnSample, CheckThenResample))
            for row in decided[: len(verdict.emitted)] if compares else decided[-1:]:
                self.tape.use(row)
        return verdicts


@dataclass
class Integral:
    """A law of outputs, and what it took.

    Attributes:
        law: probability by output.
        cells: boxes on which a run is constant.
        lost: volume that was dropped as dust; bounds what ``law`` misses.
    """

    law: OutcomeLaw = field(default_factory=dict)
    cells: int = 0
    lost: float = 0.0


def integrate(decode: Decode, seed: int = 0, batch: int = 2048) -> Integral:
    """The law of the outputs of one request, over all of its draws.

    Args:
        decode: runs a batch under a tape.
        seed: of the points inside the boxes; the law does not depend on it.
        batch: most runs at once.

    Raises:
        AssertionError: two points of a cell gave two outputs.
    """
    rng = np.random.default_rng(seed)
    integral, boxes = Integral(), list[Box]([{}])
    while boxes:
        taken, boxes = boxes[-batch:], boxes[:-batch]
        tape = Tape(taken, rng)
        outcomes = decode(len(taken), tape)
        cells = [{**box, **cell} for box, cell in zip(taken, tape.cells, strict=True)]
        again = decode(len(cells), Tape(cells, rng))
        assert again == outcomes, "a cell is not constant: its draws are used in another way"
        for box, cell, outcome in zip(taken, cells, outcomes, strict=True):
            integral.law[outcome] = integral.law.get(outcome, 0.0) + volume(cell)
            for rest in remainders(box, cell):
                if volume(rest) > DUST:
                    boxes.append(rest)
                else:
                    integral.lost += volume(rest)
        integral.cells += len(cells)
    return integral


def remainders(box: Box, cell: Box) -> Iterator[Box]:
    """Disjoint boxes that fill what ``cell`` leaves of ``box``."""
    inside = dict(box)
    for address, (low, high) in cell.items():
        bottom, top = box.get(address, UNIT)
        if bottom < low:
            yield {**inside, address: (bottom, low)}
        if high < top:
            yield {**inside, address: (high, top)}
        inside[address] = low, high
