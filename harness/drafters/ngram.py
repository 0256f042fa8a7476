"""Prompt look-up: what followed the last time that the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from harness.core import PAD, Proposal, Sequence
from harness.drafters.base import Drafter, StopRule
from harness.drafters.length import Length
from harness.models.sampling import Sampling


class NgramDrafter(Drafter):
    """Copies from prompt and output (V1.7b, S2k and L12 name it; arXiv 2304.04487).

    Like vLLM's, a window that has less to say than it may is filled up with ``PAD``, which every
    verifier rejects (V1.7d), so that all windows have one shape. Where nothing is found there
    is no window at all: an ordinary decode step (V1.1d).

    Args:
        draft_tokens: K, the most drafts per step.
        min_n, max_n: tokens that must agree, and at which more agreement counts no more.
        length: see ``Drafter``.
    """

    def __init__(
        self, draft_tokens: int, min_n: int, max_n: int, length: Length | None = None
    ) -> None:
        super().__init__(draft_tokens, length)
        self._min_n, self._max_n = min_n, max_n

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """See ``Drafter``."""
        proposals = []
        for sequence, room in zip(sequences, self.limits(sequences, limit), strict=True):
            found = self.look_up(sequence.tokens_from(0), room)
            proposals.append(Proposal(found + [PAD] * (room - len(found)) if found else []))
        return proposals

    def look_up(self, tokens: SequenceOf[int], room: int) -> list[int]:
        """At most ``room`` tokens that may follow ``tokens``; empty where nothing agrees."""
        start = last_match(tokens, self._min_n, self._max_n)
        return [] if start is None else list(tokens[start : start + room])


def last_match(tokens: SequenceOf[int], min_n: int, max_n: int) -> int | None:
    """Where the text goes on behind the best earlier match of its own end.

    The best is the longest, up to ``max_n`` tokens; of equally long ones the most recent.

    Returns:
        Index of the token behind that match; None if fewer than ``min_n`` agree anywhere.
    """
    best, longest = None, min_n - 1
    for start in range(len(tokens) - 1, min_n - 1, -1):
        agreeing, most = 0, min(max_n, start)
        while agreeing < most and tokens[start - 1 - agreeing] == tokens[-1 - agreeing]:
            agreeing += 1
        if agreeing > longest:
            best, longest = start, agreeing
        if longest == max_n:
            break
    return best
