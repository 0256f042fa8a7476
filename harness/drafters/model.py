"""Drafts of a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from harness.core import Proposal, Sequence, Verdict, longest_common_prefix
from harness.draft_vocabulary import DraftVocabulary
from harness.drafters.base import SteppedDrafter, StopRule
from harness.drafters.chain import DraftChain
from harness.drafters.length import Length
from harness.models.graphs import StaticLM
from harness.models.language_model import LanguageModel, RowInput
from harness.models.sampling import Sampling
from harness.static_logits import Places


class ModelDrafter(SteppedDrafter):
    """Drafts with a smaller model of the same vocabulary.

    Args:
        model: the draft model.
        draft_tokens: K, the most drafts per step.
        places: logits that stay where they are.
        length: see ``Drafter``.
        stop: ends every chain early, beside any rule of the strategy's own.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft_tokens: int,
        places: Places | None = None,
        length: Length | None = None,
        stop: StopRule | None = None,
    ) -> None:
        super().__init__(draft_tokens, length)
        self.model = model
        self._places, self._stop = places, stop
        self._in_one: bool | None = None  # whether the last drafts came from one replay

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """See ``SteppedDrafter``."""
        return self.model.draft_vocabulary

    def prefill(self, sequences: SequenceOf[Sequence]) -> None:
        """Feed the prompts, so that the first draft step is like the others."""
        self._in_one = None  # perhaps another strategy's turn
        self.model.forward(
            [RowInput(each.slot, each.draft_length, each.draft_pending) for each in sequences]
        )
        for sequence in sequences:
            sequence.draft_length = sequence.length

    def run_ahead(self, sequences: SequenceOf[Sequence]) -> bool:
        """Launch what the next drafts begin with, if they are made like the last ones."""
        inputs = _pending(sequences, self.limits(sequences))
        if not inputs or self._in_one is None or not isinstance(self.model, StaticLM):
            return False
        return self.model.run_ahead(inputs, self.most() if self._in_one else 0)

    def chain(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> DraftChain:
        """See ``SteppedDrafter``."""
        self._in_one = False
        return DraftChain(
            self.model,
            sequences,
            self.limits(sequences, limit),
            sampling,
            width,
            self._places,
            _either(stop, self._stop),
        )

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """Draft without a grammar."""
        argmax = sampling is None and width == 1 and stop is None and self._stop is None
        if argmax and isinstance(self.model, StaticLM):
            proposals = self._replay(self.model, sequences, limit)
            if proposals is not None:
                return proposals
        chain = self.chain(sequences, sampling, width, limit, stop)
        while chain.active:
            chain.extend(chain.forward())
        return chain.proposals()

    def settle(
        self,
        sequence: Sequence,
        proposal: Proposal,
        verdict: Verdict,
        kept: SequenceOf[int],
    ) -> None:
        """See ``Drafter``; the cache keeps what the output confirms."""
        super().settle(sequence, proposal, verdict, kept)
        keep_confirmed(sequence, kept)

    def _replay(
        self, model: StaticLM, sequences: SequenceOf[Sequence], limit: int | None
    ) -> list[Proposal] | None:
        """All draft steps of the argmax chain in one go; None where that cannot be."""
        limits = self.limits(sequences, limit)
        inputs = _pending(sequences, limits)
        k = self.most(limit)  # also where a sequence wants fewer: one graph serves all
        chains = model.greedy_chain(inputs, k) if inputs else []
        if chains is None:
            return None
        self._in_one = True
        chain = iter(chains)
        proposals = [Proposal() for _ in sequences]
        for index, (sequence, most) in enumerate(zip(sequences, limits, strict=True)):
            if most:
                drafts = next(chain)
                sequence.draft_length, sequence.draft_ahead = sequence.length, drafts[:-1]
                proposals[index] = Proposal(drafts[:most], draft_forwards=k)
        return proposals


@dataclass(frozen=True, slots=True)
class Either:
    """Stop where one of two rules says so."""

    one: StopRule
    other: StopRule

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.one(logits) | self.other(logits)


def _either(one: StopRule | None, other: StopRule | None) -> StopRule | None:
    """Stop where any of the rules says so."""
    return one or other if one is None or other is None else Either(one, other)


def _pending(sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[RowInput]:
    """What the draft model has to read first, of the sequences that get drafts."""
    return [
        RowInput(each.slot, each.draft_length, each.draft_pending)
        for each, most in zip(sequences, limits, strict=True)
        if most
    ]


def keep_confirmed(sequence: Sequence, emitted: SequenceOf[int]) -> None:
    """Keep of the draft model's cache what the output confirms; call before it is appended.

    After a fully accepted window the last draft was never fed: it stays pending together with
    the target's own token. That one is always pending, so that the next forward has something
    to feed.
    """
    sequence.draft_length += longest_common_prefix(sequence.draft_ahead, emitted[:-1])
    sequence.draft_ahead = []
