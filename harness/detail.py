"""What a detailed run records of each verification besides its outcome (``engine.detail``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from harness.bitmask import upload
from harness.clock import Clock
from harness.core import PAD, Proposal, Verdict
from harness.grammar.masks import MaskBuffer
from harness.models.sampling import Sampling, probabilities
from harness.models.verification import Verifier, VerifyBatch
from harness.static_logits import read_back

UNCONSTRAINED = -1
"""Legal tokens of a row that nobody masked: all of them, or the grammar was asked otherwise."""

SOFTMAX = Sampling(temperature=1.0)
"""The law that is recorded of a greedy run, whose own is one-hot."""


@dataclass(slots=True)
class Detail:
    """One sequence's verification; the columns of ``StepTrace`` of the same names."""

    draft_p: list[float]
    draft_q: list[float]
    emitted_p: list[float]
    legal: list[int]


class DetailedVerifier(Verifier):
    """Verifies as ``inner`` does, and keeps the law that it verified with.

    So the law is the verification's own: masked where the strategy masks (V1.3f), unmasked
    where it asks the grammar afterwards (L4). The clock books this under ``audit``, which is no
    part of a step; on CUDA the copy of the logits still delays the verification.

    Args:
        inner: decides.
        clock: of the loop.
    """

    def __init__(self, inner: Verifier, clock: Clock) -> None:
        self.inner, self._clock = inner, clock
        self._judged: tuple[VerifyBatch, list[Verdict]] | None = None

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        """See ``Verifier``."""
        with self._clock.span("audit"):  # before: a verifier may mask more rows in place
            logits = batch.logits.clone()
        verdicts = self.inner.verify(batch)
        self._judged = replace(batch, logits=logits), verdicts
        return verdicts

    def take(self, masks: MaskBuffer) -> list[Detail]:
        """What the last verification looked like, by sequence, while its masks are still there.

        Empty where the strategy has decided without its verifier.
        """
        judged, self._judged = self._judged, None
        if judged is None:
            return []
        with self._clock.span("audit"):
            return _details(*judged, masks)


def _details(batch: VerifyBatch, verdicts: Sequence[Verdict], masks: MaskBuffer) -> list[Detail]:
    """Every p in one gather and one copy, then what belongs to each sequence."""
    law = probabilities(batch.logits, SOFTMAX if batch.sampling.greedy else batch.sampling)
    judged_in, drafts, decided_in, emitted = [], [], [], []
    for first, proposal, verdict in zip(batch.first_row, batch.proposals, verdicts, strict=True):
        judged_in += [first + 1 + parent for parent in proposal.parent_nodes]
        drafts += proposal.tokens
        rows = [first, *(first + 1 + node for node in verdict.path)]
        decided_in += rows[: len(verdict.emitted)]
        emitted += verdict.emitted
    p = iter(_gather(law, [*judged_in, *decided_in], [*drafts, *emitted]))
    draft_p = [_take(p, len(proposal.tokens)) for proposal in batch.proposals]
    return [
        Detail(
            draft_p[index],
            _draft_q(proposal),
            _take(p, len(verdict.emitted)),
            [_legal(masks, index, row) for row in range(1 + len(proposal.tokens))],
        )
        for index, (proposal, verdict) in enumerate(zip(batch.proposals, verdicts, strict=True))
    ]


def _draft_q(proposal: Proposal) -> list[float]:
    """The drafts' probabilities in the laws that they were drawn from; nan for an argmax."""
    if proposal.q is None:
        return [math.nan] * len(proposal.tokens)
    return _gather(proposal.q, range(len(proposal.tokens)), proposal.tokens)


def _gather(law: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """``law[row, token]`` of each pair on the CPU; nan for ``PAD``."""
    if not rows:
        return []
    where = upload(torch.tensor([list(rows), [max(token, 0) for token in tokens]]), law.device)
    found: list[float] = read_back(law[where[0], where[1]]).tolist()
    return [math.nan if token == PAD else p for token, p in zip(tokens, found, strict=True)]


def _take(values: Iterator[float], n: int) -> list[float]:
    return [next(values) for _ in range(n)]


def _legal(masks: MaskBuffer, sequence: int, position: int) -> int:
    """Set bits of a mask row; 0 for a dead end (T7), ``UNCONSTRAINED`` where no row counts."""
    if masks.dead(sequence, position):
        return 0
    if not masks.flagged(sequence, position):
        return UNCONSTRAINED
    row = masks.host[masks.row(sequence, position)].numpy()
    return int(np.bitwise_count(row.view(np.uint32)).sum())
