"""The G-test of a sample of outputs against an exact law: how many draws, and what they say.

G = 2 Σ n_i ln(n_i / (N p_i)) is chi-square with (outcomes - 1) degrees of freedom if the law is
right, and noncentral chi-square with noncentrality 2 N KL if it is another one (Cressie & Read,
"Multinomial goodness-of-fit tests", 1984). Pinsker's inequality KL >= 2 TV² bounds that from below
by 4 N TV² for every law at total variation TV, so ``draws_needed`` knows no alternative but TV.
Outcomes that are expected less than ``POOLED`` times share one cell (Cochran's rule).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.exact.laws import Outcome, OutcomeLaw

POOLED = 5.0
CONFIDENCE = 0.99
"""Of the upper bound of the total variation."""


def chi_square_tail(x: float, freedom: float) -> float:
    """P(chi-square > x)."""
    halves = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def noncentral_tail(x: float, freedom: float, noncentrality: float) -> float:
    """P(noncentral chi-square > x): a Poisson mixture of chi-squares of freedom + 2 j.

    Source: Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions 2, (29.2).
    """
    mean = noncentrality / 2
    j = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 30), dtype=torch.float64)
    weights = torch.exp(j * math.log(mean) - mean - torch.lgamma(j + 1)) if mean else j == 0
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, x / 2))
    return float((weights * tails).sum())


def threshold(freedom: float, false_alarm: float) -> float:
    """The G that is exceeded with probability ``false_alarm`` if the law is right."""
    return smallest(lambda g: chi_square_tail(g, freedom) <= false_alarm)


def draws_needed(outcomes: int, variation: float, false_alarm: float, power: float) -> int:
    """Draws with which any law at this total variation is rejected with at least that power."""
    critical = threshold(outcomes - 1, false_alarm)
    noncentrality = smallest(lambda x: noncentral_tail(critical, outcomes - 1, x) >= power)
    return math.ceil(noncentrality / (4 * variation**2))


def smallest(holds: Callable[[float], bool]) -> float:
    """Where a condition on positive numbers begins to hold, to nine digits."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class GTest:
    """What a sample says about a law.

    Attributes:
        draws: N.
        g: the statistic; None if an impossible outcome was seen.
        freedom: degrees of freedom.
        p_value: probability of a g like this or larger, if the law is right.
        variation: total variation between the sample and the law.
        bound: the total variation of the sample's own law from the given one is at most this,
            with ``CONFIDENCE``: the estimate and sqrt((outcomes ln 2 - ln(1 - c)) / 2N)
            (Weissman et al., "Inequalities for the L1 deviation", 2003).
    """

    draws: int
    g: float | None
    freedom: int
    p_value: float
    variation: float
    bound: float


def g_test(outcomes: Sequence[Outcome], law: OutcomeLaw) -> GTest:
    """Compare a sample with a law."""
    seen, draws = Counter(outcomes), len(outcomes)
    impossible = any(outcome not in law for outcome in seen)
    rare = {outcome for outcome, mass in law.items() if mass * draws < POOLED}
    cells = [(seen[outcome], mass) for outcome, mass in law.items() if outcome not in rare]
    if rare:
        cells.append((sum(seen[o] for o in rare), math.fsum(law[o] for o in rare)))
    g = 2 * math.fsum(n * math.log(n / (draws * mass)) for n, mass in cells if n)
    freedom = len(cells) - 1
    every = {*seen, *law}
    variation = math.fsum(abs(seen[o] / draws - law.get(o, 0.0)) for o in every) / 2
    slack = math.sqrt((len(every) * math.log(2) - math.log(1 - CONFIDENCE)) / (2 * draws))
    if impossible:
        return GTest(draws, None, freedom, 0.0, variation, variation + slack)
    p_value = chi_square_tail(g, freedom) if freedom else 1.0
    return GTest(draws, g, freedom, p_value, variation, variation + slack)
