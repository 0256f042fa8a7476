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
from harness.models.sampling import Sampling, probabilities, sample
from harness.models.verification import (
    Constraint,
    Verifier,
    VerifyBatch,
    argmax_tokens,
    own_tokens,
    require_chains,
)
from harness.static_logits import choose

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
        draws = batch.draws()
        rows = _judge(batch, draws, *_drawn_from(batch))
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
        draws = batch.draws()
        rows = _judge(batch, draws)
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


@dataclass(frozen=True)
class Judge:
    """Work: all that the host needs to judge any draft, for every row in advance (V1.7c)."""

    sampling: Sampling

    def __call__(
        self,
        logits: torch.Tensor,
        parents: torch.Tensor,
        drafts: torch.Tensor,
        u: torch.Tensor,
        q: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            logits: ``[rows, vocab]``.
            parents: int64 ``[rows]``, the row that each row's draft is judged in.
            drafts: int64 ``[rows]``, the draft that each row stands behind; ``PAD`` = none.
            u: fp64 ``[rows]`` uniforms.
            q: fp32 ``[rows, vocab]``, by the row that judges, the law that a draft is from.
            known: int ``[rows]``, 1 where ``q`` has one; elsewhere q is 1 at every draft judged
                there (in a chain: one-hot q).

        Returns:
            fp64 ``[3, rows]``: the row's token from max(p - q, 0), or from p where that is all
            zero (bonus rows have q = 0); then p and q, in the parent's row, of its draft.
        """
        p = probabilities(logits, self.sampling)
        real = (drafts != PAD).to(p.dtype)
        at = parents, drafts.clamp_min(0)
        children = torch.zeros_like(p).index_put_(at, real, accumulate=True)
        if q is not None and known is not None:
            children = torch.where(known[:, None] == 1, q, children)
        residual = (p - children).clamp_min_(0)
        law = torch.where(residual.amax(dim=-1, keepdim=True) > 0, residual, p)
        return torch.stack([sample(law, u).double(), p[at].double(), children[at].double()])


def _judge(batch: VerifyBatch, draws: Draws, *laws: torch.Tensor) -> list[list[float]]:
    """By row, its own token and its draft's p and q; ``laws`` as ``Judge`` takes them."""
    u = torch.from_numpy(draws[:, SAMPLE])
    work, layout = Judge(batch.sampling), batch.layout()
    rows: list[list[float]] = choose(work, batch.logits, batch.places, *layout, u, *laws).T.tolist()
    return rows


def _drawn_from(batch: VerifyBatch) -> tuple[torch.Tensor, ...]:
    """The laws that the drafts are from and which rows have one; nothing if all are one-hot."""
    if all(proposal.q is None for proposal in batch.proposals):
        return ()
    q = torch.zeros_like(batch.logits)
    known = torch.zeros(len(q), dtype=torch.long)
    for first, proposal in zip(batch.first_row, batch.proposals, strict=True):
        if proposal.q is not None:
            judged = slice(first, first + len(proposal.tokens))
            q[judged], known[judged] = proposal.q, 1
    return q, known


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
