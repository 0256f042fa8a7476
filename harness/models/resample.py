"""llama.cpp's verification: the grammar sees the target's own samples and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from harness.bitmask import mask_rows, upload, words
from harness.core import PAD, Proposal, Verdict
from harness.models.draws import RESAMPLE, SAMPLE, Draws
from harness.models.verification import (
    Constraint,
    Verifier,
    VerifyBatch,
    argmax_tokens,
    own_tokens,
    require_chains,
)


class CheckThenResample(Verifier):
    """Sample unmasked, ask the grammar about that one token, resample if it refuses (L4, 2.4).

    The matcher advances with each emitted token and with nothing else, so nothing is ever
    rolled back (L14b). For legal t, P(t) = p(t) + P(illegal) p_masked(t): with temperature alone
    that is the masked law; top-k and top-p cut p before the check but p_masked after the mask,
    and then it is not (L4). A sequence without a constraint is as under ``MatchOwnSample``. Chains
    only.

    Sequences are walked in rounds, so that what several of them resample is one batch.
    """

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        require_chains(batch, self)
        draws = batch.draws()
        tokens, gaps = own_tokens(batch.logits, batch.sampling, draws[:, SAMPLE], batch.places)
        constraints = batch.constraints or [None] * len(batch.proposals)
        walks = [
            _Walk(*of_sequence)
            for of_sequence in zip(batch.proposals, batch.first_row, constraints, strict=True)
        ]
        while refused := [walk for walk in walks if walk.is_refused(tokens, gaps)]:
            _resample(batch, refused, draws[:, RESAMPLE])
        return [Verdict(walk.emitted, list(range(walk.accepted)), walk.gaps) for walk in walks]


@dataclass(slots=True)
class _Walk:
    """One sequence's way through its rows."""

    proposal: Proposal
    first_row: int
    constraint: Constraint | None
    emitted: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    accepted: int = 0
    ended: bool = False

    @property
    def row(self) -> int:
        return self.first_row + len(self.emitted)

    def is_refused(self, tokens: Sequence[int], gaps: Sequence[float]) -> bool:
        """Emit the target's choices until the walk ends or one is refused: is it the latter?"""
        while not self.ended:
            row = self.row
            if not self.emit(tokens[row], gaps[row : row + 1]):
                return True
        return False

    def emit(self, token: int, gap: Sequence[float]) -> bool:
        """Emit ``token`` if it is legal; a mismatch with the draft or a stop ends the walk."""
        constraint, drafts = self.constraint, self.proposal.tokens
        if token == PAD or (constraint is not None and not constraint.accept(token)):
            return False
        matched = self.accepted < len(drafts) and drafts[self.accepted] == token
        self.emitted.append(token)
        self.gaps += gap
        self.accepted += matched
        self.ended = not matched or (constraint is not None and constraint.terminated)
        return True

    def fill(self, mask: torch.Tensor, row: int) -> bool:
        return self.constraint is not None and self.constraint.fill(mask, row)


def _resample(batch: VerifyBatch, walks: list[_Walk], u: Draws) -> None:
    """Choose again in each walk's row, mask first; a walk with nothing legal ends."""
    mask = torch.empty(len(walks), words(batch.logits.shape[-1]), dtype=torch.int32)
    legal: list[_Walk] = []
    for walk in walks:
        if walk.fill(mask, len(legal)):
            legal.append(walk)
        else:
            walk.ended = True
    if not legal:
        return
    rows = [walk.row for walk in legal]
    for walk, token, gap in zip(
        legal, *_second_choices(batch, rows, mask[: len(legal)], u), strict=True
    ):
        if not walk.emit(token, [gap] if batch.sampling.greedy else []):
            walk.ended = True


def _second_choices(
    batch: VerifyBatch, rows: list[int], mask: torch.Tensor, u: Draws
) -> tuple[list[int], list[float]]:
    """What is chosen in ``rows`` under their masks, and for greedy sampling its lead."""
    place = batch.places.find(batch.logits) if batch.places else None
    if place is not None and batch.sampling.greedy:
        # In place: a row that is masked here has been refused, and is never looked at again.
        place.mask(mask, range(len(rows)), rows)
        tokens, gaps = argmax_tokens(batch.logits, batch.places)
        return [tokens[row] for row in rows], [gaps[row] for row in rows]
    logits = batch.logits[upload(torch.tensor(rows), batch.logits.device)]
    mask_rows(logits, upload(mask, logits.device))
    tokens, gaps = own_tokens(logits, batch.sampling, u[rows], batch.places)
    return tokens, gaps or [math.nan] * len(tokens)
