"""Drafts that know nothing: any token, all alike."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from harness.core import Proposal, Sequence
from harness.drafters.base import Drafter, StopRule
from harness.drafters.length import Length
from harness.models.draws import draft_uniforms
from harness.models.sampling import Sampling, sample


class UniformDrafter(Drafter):
    """The adversary: nearly every draft is illegal, and the law of all is known.

    Args:
        draft_tokens: K, the most drafts per step.
        vocab_size: of the tokens that are drawn from.
        length: see ``Drafter``.
    """

    def __init__(self, draft_tokens: int, vocab_size: int, length: Length | None = None) -> None:
        super().__init__(draft_tokens, length)
        self._law = torch.full((draft_tokens, vocab_size), 1 / vocab_size)

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """See ``Drafter``. Where a draft is taken for certain its law is not reported: given the
        draft, which nobody looked at when it was drawn, the one-hot test is exact as well."""
        rooms = self.limits(sequences, limit)
        return [
            self._draw(sequence, room, reports=sampling is not None) if room else Proposal()
            for sequence, room in zip(sequences, rooms, strict=True)
        ]

    def _draw(self, sequence: Sequence, room: int, reports: bool) -> Proposal:
        u = draft_uniforms(sequence.request.seed, sequence.steps, room)
        law = self._law[:room]
        tokens = sample(law, torch.from_numpy(u)).tolist()
        return Proposal(tokens, q=law if reports else None)
