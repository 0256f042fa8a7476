"""Which drafts the target accepts, and the token of its own that it adds.

Each verifier works in two halves. On the device, for all rows at once: the token that is emitted
if the walk ends in this row, and what decides whether it goes on. The answers come back in one
copy. On the host, per sequence: a walk over the drafts, along the row layout that
``verification`` describes. At temperature 0 every verifier is ``Greedy``. The one that asks the
grammar on its way, ``CheckThenResample``, is in ``resample``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.core import PAD, Proposal, Verdict
from harness.errors import ConfigError
from harness.models.draws import COIN, SAMPLE, Draws
from harness.models.resample import CheckThenResample
from harness.models.sampling import probabilities, sample
from harness.models.verification import (
    Constraint,
    Verifier,
    VerifyBatch,
    argmax_tokens,
    own_tokens,
    require_chains,
)
from harness.static_logits import read_back

__all__ = [
    "CheckThenResample",
    "Constraint",
    "Greedy",
    "MatchOwnSample",
    "RejectionSampling",
    "TargetOnly",
    "Verifier",
    "VerifyBatch",
]


class Greedy(Verifier):
    """Follow the target's argmax: V1.7a for chains, S2g for trees. Fills ``Verdict.gaps``."""

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        return _follow(batch, *argmax_tokens(batch.logits, batch.places))


class MatchOwnSample(Verifier):
    """Accept a draft while it equals the target's own sample (L14, end of T18). Chains only.

    Each position's sample depends on its row and its draw alone, so the output is, token for
    token, that of decoding without drafts: exact for any drafter, without knowing its q.
    """

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        require_chains(batch, self)
        if batch.sampling.greedy:
            return Greedy().verify(batch)
        own = own_tokens(batch.logits, batch.sampling, batch.draws()[:, SAMPLE], batch.places)
        return _follow(batch, *own)


class RejectionSampling(Verifier):
    """The ratio test of speculative sampling (V1.7b-e, D17, T18). Chains only.

    Accept draft d iff q(d) > 0 and u < min(1, p(d) / q(d)); at the first rejection draw from
    max(p - q, 0), after the last acceptance from the bonus row. q is one-hot where the proposal
    brings none. ``PAD`` is always rejected, and recovered by the same rule (V1.7d): from
    max(p - q, 0) where its row of q is known, else from p. Source: arXiv 2211.17192, 2302.01318.
    """

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        require_chains(batch, self)
        if batch.sampling.greedy:
            return Greedy().verify(batch)
        p = probabilities(batch.logits, batch.sampling)
        parents, drafts = batch.layout()
        q = _one_hot(p, parents, drafts)
        for first, proposal in zip(batch.first_row, batch.proposals, strict=True):
            if proposal.q is not None:
                q[first : first + len(proposal.tokens)] = proposal.q
        draws = batch.draws()
        rows = read_back(_judge(p, q, parents, drafts, draws)).tolist()
        verdicts = []
        for first, proposal in zip(batch.first_row, batch.proposals, strict=True):
            accepted = 0
            for row, draft in enumerate(proposal.tokens, first + 1):
                _, p_draft, q_draft = rows[row]
                # u < p / q without the division: p = 0 never passes, not even u = 0 (T20).
                passed = q_draft > 0 and draws[row - 1, COIN] * q_draft < p_draft
                if draft == PAD or not passed:
                    break
                accepted += 1
            verdicts.append(_verdict(proposal, range(accepted), int(rows[first + accepted][0])))
        return verdicts


@dataclass(frozen=True)
class TargetOnly(Verifier):
    """Sampling along a chain or tree by the target's law alone (S2h).

    At each node one coin is compared with the summed p of its children tried so far; rejected
    children are taken out of p for the final draw. Lossless for every drafter at thresholds
    of 1; lower ones accept more and distort the law.

    Attributes:
        threshold_single: accept a child whose p reaches this.
        threshold_acc: accept a child once coin < summed p / this.
    """

    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        for name in ("threshold_single", "threshold_acc"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not in (0, 1]; 1 is lossless")

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        if batch.sampling.greedy:
            return Greedy().verify(batch)
        p = probabilities(batch.logits, batch.sampling)
        parents, drafts = batch.layout()
        children = _one_hot(p, parents, drafts)
        draws = batch.draws()
        rows = read_back(_judge(p, children, parents, drafts, draws)).tolist()
        verdicts = []
        for first, proposal in zip(batch.first_row, batch.proposals, strict=True):
            own = slice(first, first + 1 + len(proposal.tokens))
            masses = [p_draft for _, p_draft, _ in rows[own]]
            path = self._walk(proposal, masses[1:], draws[own, COIN].tolist())
            end = path[-1] + 1 if path else 0
            verdicts.append(_verdict(proposal, path, int(rows[first + end][0])))
        return verdicts

    def _walk(self, proposal: Proposal, p: Sequence[float], coins: Sequence[float]) -> list[int]:
        """The accepted nodes; ``p`` is by node, ``coins`` by row."""
        path: list[int] = []
        node, tried, mass = -1, {PAD}, 0.0
        for child, parent in enumerate(proposal.parent_nodes):
            token = proposal.tokens[child]
            # A token that two siblings share has its mass once.
            if parent != node or token in tried:
                continue
            tried.add(token)
            mass += p[child]
            lucky = coins[node + 1] < mass / self.threshold_acc
            if p[child] > 0 and (lucky or p[child] >= self.threshold_single):
                path.append(child)
                node, tried, mass = child, {PAD}, 0.0
        return path


def _one_hot(p: torch.Tensor, parents: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """``[rows, vocab]``: in each row 1 at every draft judged there (in a chain: one-hot q)."""
    real = (drafts != PAD).to(p.dtype)
    return torch.zeros_like(p).index_put_((parents, drafts.clamp_min(0)), real, accumulate=True)


def _judge(
    p: torch.Tensor, q: torch.Tensor, parents: torch.Tensor, drafts: torch.Tensor, draws: Draws
) -> torch.Tensor:
    """All that the host needs, for every row in advance (V1.7c).

    Returns:
        fp64 ``[rows, 3]``: the row's token from max(p - q, 0), or from p where that is all zero
        (bonus rows have q = 0); then p and q, in the parent's row, of the draft it stands behind.
    """
    residual = (p - q).clamp_min_(0)
    law = torch.where(residual.amax(dim=-1, keepdim=True) > 0, residual, p)
    final = sample(law, torch.from_numpy(draws[:, SAMPLE]).to(p.device))
    draft = parents, drafts.clamp_min(0)
    return torch.stack([final.double(), p[draft].double(), q[draft].double()], dim=1)


def _follow(batch: VerifyBatch, tokens: list[int], gaps: list[float]) -> list[Verdict]:
    """Accept while a child equals the token chosen in its parent's row; emit the last choice."""
    verdicts = []
    for first, proposal in zip(batch.first_row, batch.proposals, strict=True):
        path: list[int] = []
        node = -1
        for child, parent in enumerate(proposal.parent_nodes):
            choice = tokens[first + node + 1]
            if parent == node and proposal.tokens[child] == choice != PAD:
                path.append(child)
                node = child
        verdict = _verdict(proposal, path, tokens[first + node + 1])
        if gaps:
            decided = [first, *(first + child + 1 for child in path)]
            verdict.gaps = [gaps[row] for row in decided[: len(verdict.emitted)]]
        verdicts.append(verdict)
    return verdicts


def _verdict(proposal: Proposal, path: Sequence[int], final: int) -> Verdict:
    emitted = [proposal.tokens[node] for node in path]
    if final != PAD:
        emitted.append(final)
    return Verdict(emitted, list(path))
