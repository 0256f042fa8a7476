"""All kinds of faults, and how often each is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from experiments.faults import bench, compiles, drafts, kills, matchers, schemas
from experiments.faults.cases import Case, Outcome, Runner

RUNNERS: Mapping[str, Runner] = {
    "drafts": drafts.run,
    "compiles": compiles.run,
    "matchers": matchers.run,
    "schemas": schemas.run,
    "bench": bench.run,
    "kills": kills.run,
}

SHARES = {
    "drafts": 800,
    "compiles": 200,
    "matchers": 800,
    "schemas": 540,
    "bench": 1434,
    "kills": 26,
}
"""Of 3,800 cases; with those, every schema of JSONSchemaBench is met under both engines."""


def run_case(case: Case) -> Outcome:
    """One case of any kind."""
    return RUNNERS[case.kind](case)


def cases(total: int, seed: int, kinds: Sequence[str]) -> list[Case]:
    """About ``total`` cases of all kinds, as far as they are among ``kinds``."""
    return [
        Case(kind, seed + number)
        for kind, share in SHARES.items()
        if kind in kinds
        for number in range(ceil(share * total / sum(SHARES.values())))
    ]
