"""What the grammar forces anyway, as drafts that cost no forward."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from harness.core import Proposal, Sequence
from harness.drafters.base import Drafter, StopRule
from harness.drafters.length import Length
from harness.grammar.tracked import TrackedMatcher
from harness.models.sampling import Sampling
from harness.step import isolate
from harness.text import Codec


class ForcedDrafter(Drafter):
    """Forced text (S1d), encoded by the tokenizer.

    Not the rows in which a single token is legal: a vocabulary of pieces can spell a forced word
    in many ways, so such rows hardly exist. The grammar leaves the choice among the spellings to
    the target, and the tokenizer's own is the likeliest; if it is not the target's, the draft is
    rejected, and nothing is rewritten as a jump would (S1h).

    Args:
        draft_tokens: K, the most drafts per step.
        codec: the tokenizer.
        length: see ``Drafter``.
    """

    def __init__(self, draft_tokens: int, codec: Codec, length: Length | None = None) -> None:
        super().__init__(draft_tokens, length)
        self._codec = codec

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """See ``Drafter``; free text has no forced drafts."""
        rooms = self.limits(sequences, limit)
        return [
            Proposal(self.forced(sequence, room))
            for sequence, room in zip(sequences, rooms, strict=True)
        ]

    def forced(self, sequence: Sequence, room: int) -> list[int]:
        """At most ``room`` tokens that the grammar forces behind the output."""
        tokens: list[int] = []
        if sequence.matcher is not None and sequence.error is None and room:
            with isolate(sequence):
                matcher = caught_up(sequence.matcher, sequence.output_ids)
                encoded = self._codec.encode(matcher.forced_text())[:room]
                # Text that spells a special token is encoded as that, which no grammar allows.
                tokens = encoded[: matcher.validate(encoded)]
        return tokens


def caught_up(matcher: TrackedMatcher, output: SequenceOf[int]) -> TrackedMatcher:
    """The matcher itself, or, where a strategy feeds it late (D12), a fork that holds ``output``.

    A fork, for a rollback behind a late start may not reach as far (D8); its ledger is its own.
    """
    if matcher.held >= len(output):
        return matcher
    ahead = matcher.fork()
    ahead.accept(output[matcher.held :])
    return ahead
