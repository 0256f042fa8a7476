"""The draft loop of a model: free, or with a guide between its steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from harness.argmax import largest_allowed
from harness.core import PAD, Proposal, Sequence
from harness.drafters.base import StopRule
from harness.models.draws import draft_uniforms
from harness.models.language_model import LanguageModel, RowInput
from harness.models.sampling import Draw, Sampling, probabilities
from harness.static_logits import Places, Work, choose, decide


class DraftChain:
    """The draft loop of one step: ``forward``, then ``extend``, until no sequence is active.

    A guide masks the logits in between. Draft i of a sequence is drawn after the draft model
    saw drafts 0..i-1; the last draft is never fed.

    Args:
        model: the draft model.
        sequences: the batch.
        limits: by sequence, the most drafts it may get.
        sampling: the law that drafts are drawn from and reported as ``q``; None = argmax,
            which is one-hot.
        width: tokens per depth; above 1 the runners-up become leaves beside the chain.
        places: logits that stay where they are, so that choosing from them can be a graph.
        stop: ends a chain before a token.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: SequenceOf[Sequence],
        limits: SequenceOf[int],
        sampling: Sampling | None = None,
        width: int = 1,
        places: Places | None = None,
        stop: StopRule | None = None,
    ) -> None:
        self._model, self._sequences, self._limits = model, sequences, limits
        self._sampling, self._width, self._places = sampling, width, places
        self._stop = stop
        self._chains: list[list[int]] = [[] for _ in sequences]
        self._leaves: list[list[list[int]]] = [[] for _ in sequences]
        self._q: list[list[torch.Tensor]] = [[] for _ in sequences]
        self._forwards = [0] * len(sequences)
        self._uniforms: dict[int, list[float]] = {}
        self.active = [i for i, limit in enumerate(limits) if limit > 0]

    @property
    def layout(self) -> tuple[list[int], list[int]]:
        """By sequence, its row in ``forward``'s logits and how many rows it has there."""
        row_of = {index: row for row, index in enumerate(self.active)}
        every = range(len(self._sequences))
        return [row_of.get(i, 0) for i in every], [int(i in row_of) for i in every]

    def last_token(self, index: int) -> int:
        """The token whose forward gives the next draft: the last draft, or the last output."""
        if self._chains[index]:
            return self._chains[index][-1]
        return self._sequences[index].tokens_from(self._sequences[index].length - 1)[0]

    def forward(self) -> torch.Tensor:
        """Feed each active sequence's pending tokens.

        Returns:
            Logits ``[len(active), vocab]`` (``draft_vocab`` of a pruned head), one row per entry
            of ``active``.
        """
        inputs = []
        for i in self.active:
            sequence, chain = self._sequences[i], self._chains[i]
            self._forwards[i] += 1
            if chain:
                start, tokens = sequence.length + len(chain) - 1, [chain[-1]]
                sequence.draft_ahead = list(chain)
            else:
                start, tokens = sequence.draft_length, sequence.draft_pending
                sequence.draft_length, sequence.draft_ahead = sequence.length, []
            inputs.append(RowInput(sequence.slot, start, tokens))
        return self._model.forward(inputs)

    def extend(self, logits: torch.Tensor) -> None:
        """Draw a draft for each active sequence; one that is full, is stopped, or has no draft to
        draw (an empty law) leaves ``active``."""
        pruned = self._model.draft_vocabulary
        if self._sampling is None and self._width == 1:
            tokens = choose(self._unless(largest_allowed), logits, self._places)[:, None]
        elif self._sampling is None:
            tokens = decide(self._unless(Best(self._width))(logits), self._places).T
        else:
            q = probabilities(logits, self._sampling)
            u = [self._uniform(i, len(self._chains[i])) for i in self.active]
            uniforms = torch.tensor(u, dtype=torch.float64)
            draw = self._unless(Draw(self._sampling))
            tokens = choose(draw, logits, self._places, uniforms)[:, None]
            laws = q if pruned is None else pruned.spread(q)
            for row, i in enumerate(self.active):
                self._q[i].append(laws[row])
        nodes = tokens.tolist()
        if pruned is not None:
            nodes = [[pruned.target_id(token) for token in row] for row in nodes]
        still = []
        for i, (token, *leaves) in zip(self.active, nodes, strict=True):
            if token == PAD:
                continue
            self._chains[i].append(token)
            self._leaves[i].append(leaves)
            if len(self._chains[i]) < self._limits[i]:
                still.append(i)
        self.active = still

    def proposals(self) -> list[Proposal]:
        """One proposal per sequence of the batch."""
        return [
            Proposal(
                tokens=chain if self._width == 1 else _flatten(chain, leaves),
                parents=None if self._width == 1 else _parents(leaves),
                q=torch.stack(q[: len(chain)]) if chain and q else None,
                draft_forwards=forwards,
            )
            for chain, leaves, q, forwards in zip(
                self._chains, self._leaves, self._q, self._forwards, strict=True
            )
        ]

    def _unless(self, choice: Work) -> Work:
        """A choice of tokens, with the chain's rule to stop."""
        return choice if self._stop is None else Unless(self._stop, choice)

    def _uniform(self, index: int, position: int) -> float:
        if index not in self._uniforms:
            sequence = self._sequences[index]
            draws = draft_uniforms(sequence.request.seed, sequence.steps, self._limits[index])
            self._uniforms[index] = draws.tolist()
        return self._uniforms[index][position]


@dataclass(frozen=True, slots=True)
class Best:
    """Work: the likeliest tokens of each row, int64 ``[width, rows]``."""

    width: int

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.topk(self.width, dim=-1).indices.T.contiguous()


@dataclass(frozen=True, slots=True)
class Unless:
    """Work: what ``choice`` says, but ``PAD`` in the rows where ``stop`` ends the chain."""

    stop: StopRule
    choice: Work

    def __call__(self, logits: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        return torch.where(self.stop(logits), PAD, self.choice(logits, *arguments))


def _flatten(chain: list[int], leaves: list[list[int]]) -> list[int]:
    """Nodes by depth, the chain's token before its leaves."""
    return [node for token, rest in zip(chain, leaves, strict=True) for node in (token, *rest)]


def _parents(leaves: list[list[int]]) -> list[int]:
    """The parent of each node of ``_flatten``: the chain's node one level up."""
    parents: list[int] = []
    above, node = -1, 0
    for rest in leaves:
        parents += [above] * (1 + len(rest))
        above, node = node, node + 1 + len(rest)
    return parents
