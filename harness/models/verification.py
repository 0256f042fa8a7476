"""What every verification shares: its input, its row layout, and the target's own tokens.

Row layout: a sequence owns ``1 + len(proposal.tokens)`` rows of logits. Row 0 scores what
follows the last committed token (the root), row ``i + 1`` what follows draft ``i``. So draft ``i``
is judged in its parent's row, and the last row of a chain is the bonus row. The output position
of a row is that of row 0 plus its depth. In a tree, parents stand before their children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from harness.argmax import leads
from harness.core import PAD, Proposal, Verdict, first_rows
from harness.errors import ConfigError
from harness.models.draws import Draws, uniforms
from harness.models.sampling import Draw, Sampling
from harness.static_logits import Places, choose


class Constraint(Protocol):
    """What a verifier that consults the grammar itself asks of it, one token at a time."""

    @property
    def terminated(self) -> bool:
        """A stop token was accepted."""
        ...

    def accept(self, token: int) -> bool:
        """Advance over ``token``; False = illegal (negative ids too), the state is what it was."""
        ...

    def fill(self, mask: torch.Tensor, row: int) -> bool:
        """Write what is legal next into ``mask[row]``: int32 words on the CPU, bit 1 = allowed.

        False = nothing is legal; the caller fails the request after the verification.
        """
        ...


@dataclass(slots=True)
class VerifyBatch:
    """One verification of several sequences.

    Attributes:
        logits: fp32 ``[Σ (1 + len(proposal.tokens)), vocab]``, packed in the order of the
            sequences, masked already (V1.3f), except where ``constraints`` do that.
        proposals: the drafts of each sequence.
        seeds: the seed of each request.
        positions: the output position of each sequence's row 0.
        sampling: how the target's law is made from its logits.
        constraints: each sequence's grammar, for ``CheckThenResample`` only; None = free text.
        places: logits that stay where they are, so that choosing from them can be a graph.
    """

    logits: torch.Tensor
    proposals: list[Proposal]
    seeds: list[int]
    positions: list[int]
    sampling: Sampling
    constraints: list[Constraint | None] | None = None
    places: Places | None = None

    @property
    def first_row(self) -> list[int]:
        """Index of each sequence's row 0 in ``logits``."""
        return first_rows(self.proposals)

    def draws(self) -> Draws:
        """``[rows, 4]``: each row's draws, those of its request and output position.

        Greedy sampling draws nothing: it gets zeros, which cost nothing.
        """
        if self.sampling.greedy:
            return np.zeros((len(self.logits), 4))
        parts = []
        for proposal, seed, position in zip(
            self.proposals, self.seeds, self.positions, strict=True
        ):
            depths = _depths(proposal)
            parts.append(uniforms(seed, position, max(depths) + 1)[depths])
        return np.concatenate(parts)

    def layout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row its parent's row, and the draft it stands behind.

        Returns:
            Two int64 ``[rows]`` on the CPU. A root is its own parent, behind ``PAD``.
        """
        parents: list[int] = []
        drafts: list[int] = []
        for first, proposal in zip(self.first_row, self.proposals, strict=True):
            parents += [first, *(first + 1 + parent for parent in proposal.parent_nodes)]
            drafts += [PAD, *proposal.tokens]
        return torch.tensor(parents), torch.tensor(drafts)


class Verifier(ABC):
    """Decides how much of each proposal is emitted.

    A verdict emits its accepted drafts and one token more, with two exceptions: the row of that
    last token allows nothing (all -inf: the caller fails the request), and, where the verifier
    asks the grammar itself, an accepted draft that is a stop token ends the run.
    """

    @abstractmethod
    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        """Judge every proposal of ``batch``, in order.

        Raises:
            ConfigError: a proposal is a tree and this verifier takes chains only.
        """


def argmax_tokens(
    logits: torch.Tensor, places: Places | None = None
) -> tuple[list[int], list[float]]:
    """Per row the first largest logit's token, and its lead over the runner-up.

    ``PAD`` where every token is forbidden; the lead over forbidden ones is infinite. One copy
    to the host.
    """
    tokens, gaps = choose(leads, logits, places).tolist()
    return [int(token) for token in tokens], gaps


def own_tokens(
    logits: torch.Tensor, sampling: Sampling, u: Draws, places: Places | None = None
) -> tuple[list[int], list[float]]:
    """Per row the token that the target itself chooses, and for greedy sampling its lead.

    Args:
        logits: ``[rows, vocab]``.
        sampling: how to choose.
        u: ``[rows]`` uniforms in [0, 1).
        places: where logits stay, if they do.
    """
    if sampling.greedy:
        return argmax_tokens(logits, places)
    return choose(Draw(sampling), logits, places, torch.from_numpy(u)).tolist(), []


def require_chains(batch: VerifyBatch, verifier: Verifier) -> None:
    """Refuse trees.

    Raises:
        ConfigError: a proposal has parents.
    """
    if any(proposal.parents is not None for proposal in batch.proposals):
        raise ConfigError(
            f"verifier {type(verifier).__name__} takes draft chains only; draft a chain, "
            "or verify trees with Greedy or TargetOnly"
        )


def _depths(proposal: Proposal) -> list[int]:
    """Depth of each of a sequence's rows; 0 for the root."""
    depths = [0]
    for parent in proposal.parent_nodes:
        depths.append(depths[parent + 1] + 1)
    return depths
