"""Exact and statistical views of the law that a verifier emits from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from harness.core import Verdict
from harness.models import verification
from harness.models.draws import Draws

FALSE_ALARM = 1e-6


def log(law: Sequence[float]) -> list[float]:
    """Logits of a law; -inf where it is 0."""
    return [math.log(p) if p > 0 else -math.inf for p in law]


class Draw:
    """A cell of the unit cube on which every verdict is the same: a point in it, its volume."""

    def __init__(self, cell: Sequence[tuple[float, float]], streams: Sequence[int]) -> None:
        self.point = np.full(4, 0.5)
        self.point[list(streams)] = [(low + high) / 2 for low, high in cell]
        self.volume = math.prod(high - low for low, high in cell)


def cells(breaks: dict[int, Iterable[float]]) -> list[Draw]:
    """Cut the draws of some streams at the given breakpoints.

    The integral over the cells is exact if, on each, the verdict is constant; breaks that are
    not where the verifier's are show up as a wrong law.
    """
    intervals = []
    for points in breaks.values():
        # A sum of probabilities that misses 1 in its last bits is no break before 1.
        edges = sorted({0.0, 1.0, *(float(x) for x in points if 0 < x < 1 - 1e-12)})
        intervals.append(list(pairwise(edges)))
    return [Draw(cell, list(breaks)) for cell in product(*intervals)]


def use_draws(patch: pytest.MonkeyPatch, draws: Sequence[Draw]) -> None:
    """Let a request's seed name its draws, the same ones at every position."""

    def uniforms(seed: int, position: int, n: int) -> Draws:
        return np.tile(draws[seed].point, (n, 1))

    patch.setattr(verification, "uniforms", uniforms)


def cumulative(law: Sequence[float]) -> list[float]:
    """Where inverting the law's distribution changes its token."""
    total = sum(law)
    return [float(x) for x in np.cumsum(law) / total] if total else []


def first_token_law(
    verdicts: Sequence[Verdict], weights: Sequence[float], vocab: int
) -> np.ndarray:
    """``[vocab]``: mass of each first emitted token."""
    mass = np.zeros(vocab)
    for verdict, weight in zip(verdicts, weights, strict=True):
        mass[verdict.emitted[0]] += weight
    return mass


def assert_drawn_from(tokens: Sequence[int], law: Sequence[float]) -> None:
    """G-test of a sample against a law, at a false alarm rate of ``FALSE_ALARM``."""
    seen = Counter(tokens)
    assert all(law[token] > 0 for token in seen), f"impossible tokens among {dict(seen)}"
    total = sum(law)
    g = 2 * sum(n * math.log(n / (len(tokens) * law[token] / total)) for token, n in seen.items())
    freedom = sum(p > 0 for p in law) - 1
    if freedom:
        halves = torch.tensor([freedom / 2, g / 2], dtype=torch.float64)
        assert torch.special.gammaincc(halves[0], halves[1]) > FALSE_ALARM, dict(seen)
