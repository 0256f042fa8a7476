"""What a drafter is: where the loop and every strategy get their drafts.

In the order of a request's life: ``prefill`` with its prompt; then, step by step, ``free`` (or
``SteppedDrafter.chain``), ``settle`` when the output is about to grow, and ``run_ahead`` when it
has grown. How many drafts a step gets is decided by ``length``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as SequenceOf
from typing import TYPE_CHECKING

import torch

from harness.core import Proposal, Sequence, Verdict
from harness.drafters.length import FixedLength, Length
from harness.models.sampling import Sampling

if TYPE_CHECKING:
    from harness.draft_vocabulary import DraftVocabulary
    from harness.drafters.chain import DraftChain

StopRule = Callable[[torch.Tensor], torch.Tensor]
"""Logits ``[rows, vocab]`` to flags ``[rows]``: stop this chain before adding its token. It is part
of the choice (``harness.static_logits.Work``), so equal rules are captured once."""


class Drafter(ABC):
    """Proposes tokens for the target to verify.

    Args:
        draft_tokens: K, the most drafts per step.
        length: how many of these; None = always K.
    """

    def __init__(self, draft_tokens: int, length: Length | None = None) -> None:
        self.draft_tokens = draft_tokens
        self.length = length or FixedLength(draft_tokens)

    def prefill(self, sequences: SequenceOf[Sequence]) -> None:  # noqa: B027 (most read nothing)
        """New sequences: read their prompts."""

    @abstractmethod
    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """Draft without asking anybody in between; one proposal per sequence.

        A drafter that draws its drafts reports their law as ``q``; that of any other is one-hot,
        which is None.

        Args:
            sequences: the batch.
            sampling: the law that a model's drafts are drawn from; None = whoever verifies takes
                every draft for certain (one-hot), so no ``q`` may be reported.
            width: tokens per depth; above 1 from a ``SteppedDrafter`` only.
            limit: most drafts of a sequence, if fewer than ``length`` says.
            stop: ends a chain early; from a ``SteppedDrafter`` only.
        """

    def settle(
        self,
        sequence: Sequence,
        proposal: Proposal,
        verdict: Verdict,
        kept: SequenceOf[int],
    ) -> None:
        """What became of the drafts; told before ``kept``, emitted up to a stop, is appended."""
        self.length.observe(levels(proposal), verdict.accepted)

    def run_ahead(self, sequences: SequenceOf[Sequence]) -> bool:
        """Launch what the next drafts begin with, where that is known.

        Returns:
            Whether anything was launched.
        """
        return False

    def limits(self, sequences: SequenceOf[Sequence], limit: int | None = None) -> list[int]:
        """By sequence, the most drafts it may get; one of the remaining tokens is left to the
        target's own, so no draft stands past the length limit (L11)."""
        most = self.most(limit)
        return [max(0, min(most, sequence.remaining - 1)) for sequence in sequences]

    def most(self, limit: int | None = None) -> int:
        """The most drafts that any sequence may get now."""
        most = self.length.limit
        return most if limit is None else min(limit, most)


class SteppedDrafter(Drafter):
    """A drafter with logits at each draft step: it can be guided, widened and stopped by them."""

    @property
    @abstractmethod
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """What the columns of these logits stand for, if there are fewer than tokens."""

    @abstractmethod
    def chain(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> DraftChain:
        """A draft loop that somebody else drives; the arguments are those of ``free``."""


def levels(proposal: Proposal) -> int:
    """Drafts in a row: those of a chain without padding, in a tree its depth.

    What was cut before the verification counts: to the drafter that is a failure like others.
    """
    if proposal.parents is None:
        return proposal.drafted_raw
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
