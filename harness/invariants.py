"""What must hold between an output and its matcher behind every step.

Three invariants cost nothing and are always checked: *ledger balance* (advances minus rollbacks
are what the matcher holds), *matcher position* (what it holds are the committed tokens, as far as
the strategy follows them, and the drafts that it keeps), and that no mask row is empty, which
``MaskBuffer.fill`` finds where it fills (T7). ``engine.paranoid`` adds the *replay*: a matcher that
starts anew over the committed tokens must allow just what the live one allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from harness.bitmask import words
from harness.clock import Clock
from harness.core import Sequence
from harness.errors import MatcherError
from harness.grammar.matcher import Matcher
from harness.step import isolate

Follows = Callable[[Sequence], tuple[int, int]]
"""``Strategy.follows``: committed tokens and drafts that a matcher holds between steps."""


class Invariants:
    """Checks sequences behind their steps; one that breaks an invariant fails, and no other.

    Args:
        follows: of the strategy.
        vocab_size: width of the masks.
        clock: of the loop; replaying is booked under ``audit``, which is no part of a step.
        paranoid: replay as well. That takes a time that grows with the square of the output.
    """

    def __init__(self, follows: Follows, vocab_size: int, clock: Clock, paranoid: bool) -> None:
        self._follows, self._clock, self._paranoid = follows, clock, paranoid
        self._masks = torch.zeros(2, words(vocab_size), dtype=torch.int32)  # live, replayed
        self._starts: dict[int, Matcher] = {}  # by slot

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Remember where the matchers of new sequences start."""
        if not self._paranoid:
            return
        for sequence in sequences:
            if sequence.matcher is not None:
                with isolate(sequence), self._clock.span("audit"):
                    self._starts[sequence.slot] = sequence.matcher.inner.fork()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Check all that have a matcher and have not failed."""
        for sequence in sequences:
            if sequence.matcher is not None and sequence.error is None:
                with isolate(sequence):
                    self._check(sequence)

    def _check(self, sequence: Sequence) -> None:
        matcher, running = sequence.matcher, sequence.finish is None
        assert matcher is not None
        if matcher.ledger.held != matcher.held:
            raise _broken(
                "ledger balance",
                sequence,
                f"the ledger says {matcher.ledger.held} tokens, the matcher holds {matcher.held}",
            )
        # A matcher whose output has ended is dropped, wherever the end has left it (T13, D12).
        committed, drafts = self._follows(sequence) if running else (len(sequence.output_ids), 0)
        if running and matcher.held != committed + drafts:
            raise _broken(
                "matcher position",
                sequence,
                f"the matcher holds {matcher.held} tokens, not {committed} committed ones "
                f"and {drafts} drafts",
            )
        if self._paranoid:
            with self._clock.span("audit"):
                self._replay(sequence, matcher.inner, committed, drafts)

    def _replay(self, sequence: Sequence, live: Matcher, committed: int, drafts: int) -> None:
        """Feed the committed tokens anew; while the output goes on, compare what may follow."""
        fresh = self._starts[sequence.slot].fork()
        if not fresh.accept(sequence.output_ids[:committed]):
            raise _broken("replay", sequence, "the grammar refuses the committed tokens")
        if sequence.finish is not None:
            return
        if drafts:
            live = live.fork()
            live.rollback(drafts)
        for row, matcher in enumerate((live, fresh)):
            matcher.fill(self._masks, row)
        if not self._masks[0].equal(self._masks[1]):
            raise _broken(
                "replayed mask", sequence, "the matcher allows other tokens than a fresh one"
            )


def _broken(invariant: str, sequence: Sequence, how: str) -> MatcherError:
    return MatcherError(
        f"invariant {invariant!r} is broken in step {sequence.steps}: {how}; "
        "correct the strategy or the matcher"
    )
