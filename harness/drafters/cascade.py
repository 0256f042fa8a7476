"""Several drafters, the cheapest first."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from harness.core import Proposal, Sequence, Verdict
from harness.drafters.base import Drafter, StopRule
from harness.drafters.forced import ForcedDrafter
from harness.drafters.length import Length
from harness.drafters.model import ModelDrafter
from harness.drafters.ngram import NgramDrafter
from harness.models.sampling import Sampling


class Cascade(Drafter):
    """The grammar's forced tokens, behind them the n-gram look-up, else the draft model.

    Both of the first are free, so the second fills up what the first leaves. The model costs a
    forward per draft: it is asked only where both are silent, which is llama.cpp's rule that the
    first drafter with anything to say wins (L12). What it has not read meanwhile it reads then.

    Args:
        forced, ngram, model: the three; their own lengths are not asked.
        length: see ``Drafter``.
    """

    def __init__(
        self,
        forced: ForcedDrafter,
        ngram: NgramDrafter,
        model: ModelDrafter,
        length: Length | None = None,
    ) -> None:
        super().__init__(model.draft_tokens, length)
        self._forced, self._ngram, self._model = forced, ngram, model

    def prefill(self, sequences: SequenceOf[Sequence]) -> None:
        """See ``Drafter``."""
        self._model.prefill(sequences)

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """See ``Drafter``; the model's drafts come with their own ``q``."""
        rooms = self.limits(sequences, limit)
        proposals = [
            Proposal(self._without_forward(sequence, room))
            for sequence, room in zip(sequences, rooms, strict=True)
        ]
        silent = [index for index, each in enumerate(proposals) if not each.tokens]
        asked = self._model.free([sequences[i] for i in silent], sampling, limit=self.most(limit))
        for index, proposal in zip(silent, asked, strict=True):
            proposals[index] = proposal
        return proposals

    def settle(
        self,
        sequence: Sequence,
        proposal: Proposal,
        verdict: Verdict,
        kept: SequenceOf[int],
    ) -> None:
        """See ``Drafter``."""
        super().settle(sequence, proposal, verdict, kept)
        self._model.settle(sequence, proposal, verdict, kept)

    def _without_forward(self, sequence: Sequence, room: int) -> list[int]:
        forced = self._forced.forced(sequence, room)
        text = [*sequence.tokens_from(0), *forced]
        return [*forced, *self._ngram.look_up(text, room - len(forced))]
