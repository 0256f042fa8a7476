"""Do all ranks stand where this one stands? Compared behind every step."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from harness.core import Sequence
from harness.errors import RanksError
from harness.parallel.ranks import Ranks
from harness.step import Step

Fingerprint = tuple[str, str]
"""A request's id, and what stands for all that its next step depends on."""


class Agreement:
    """Compares the ranks' fingerprints of a step, and ends the run where they differ.

    A rank that went another way would sooner or later wait for a collective that no other one
    calls; here it is found in the step in which it left.

    Args:
        ranks: all of them; of a single one nothing is asked. What comparing takes is part of the
            step: the device works meanwhile at what was launched ahead.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def check(self, step: Step) -> None:
        """Compare the sequences of ``step``, whose matchers have been told.

        Raises:
            RanksError: a rank differs from rank 0.
        """
        if self._ranks.size == 1:
            return
        with self._ranks.clock.span("agree"):
            own = fingerprints(step)
            if self._ranks.alike(_digest(own)):
                return
            everyones = self._ranks.gather(own)
        if differing := list(_differences(everyones)):
            raise RanksError(
                f"engine.tp: the ranks differ in {self._ranks.now}: {'; '.join(differing)}; "
                "nothing behind it counts, correct the strategy or the matcher"
            )


def fingerprints(step: Step) -> list[Fingerprint]:
    """One per sequence: its output, its end, where its matcher stands and what it allowed."""
    return [
        (sequence.request.id, _fingerprint(step, index, sequence))
        for index, sequence in enumerate(step.sequences)
    ]


def _digest(own: list[Fingerprint]) -> int:
    return int.from_bytes(blake2b(repr(own).encode(), digest_size=8).digest(), "big", signed=True)


def _fingerprint(step: Step, index: int, sequence: Sequence) -> str:
    matcher = sequence.matcher
    position = None if matcher is None else (matcher.held, matcher.terminated)
    state = sequence.output_ids, str(sequence.finish), sequence.error is None, position
    digest = blake2b(repr(state).encode(), digest_size=8)
    for row in range(1 + len(step.proposals[index].tokens)):
        if step.masks.flagged(index, row):
            digest.update(step.masks.host[step.masks.row(index, row)].numpy().tobytes())
    return digest.hexdigest()


def _differences(everyones: Iterable[list[Fingerprint]]) -> Iterable[str]:
    """By rank that differs from rank 0, the requests in which it does."""
    first, *others = everyones
    for rank, own in enumerate(others, start=1):
        if own != first:
            unlike = set(first) ^ set(own) or own  # or they stand in another order
            ids = sorted({request for request, _ in unlike})
            yield f"rank {rank} from rank 0 in {', '.join(ids)}"
