"""Draft tokens from a draft model: freely, or with a guide between its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf

import torch

from harness.argmax import largest_allowed
from harness.core import PAD, Proposal, Sequence, longest_common_prefix
from harness.models.draws import draft_uniforms
from harness.models.graphs import StaticLM
from harness.models.language_model import LanguageModel, RowInput
from harness.models.sampling import Draw, Sampling, probabilities
from harness.static_logits import Places, choose, read_back

StopRule = Callable[[torch.Tensor], torch.Tensor]
"""Logits ``[rows, vocab]`` to flags ``[rows]``: stop this chain before adding its token."""


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
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: SequenceOf[Sequence],
        limits: SequenceOf[int],
        sampling: Sampling | None = None,
        width: int = 1,
        places: Places | None = None,
    ) -> None:
        self._model, self._sequences, self._limits = model, sequences, limits
        self._sampling, self._width, self._places = sampling, width, places
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

    def extend(self, logits: torch.Tensor, stop: StopRule | None = None) -> None:
        """Draw a draft for each active sequence; one that is full, is stopped, or has no draft to
        draw (an empty law) leaves ``active``."""
        pruned = self._model.draft_vocabulary
        if self._sampling is None and self._width == 1:
            tokens = choose(largest_allowed, logits, self._places)[:, None]
        elif self._sampling is None:
            tokens = logits.topk(self._width, dim=-1).indices
        else:
            q = probabilities(logits, self._sampling)
            u = [self._uniform(i, len(self._chains[i])) for i in self.active]
            uniforms = torch.tensor(u, dtype=torch.float64)
            tokens = choose(Draw(self._sampling), logits, self._places, uniforms)[:, None]
            laws = q if pruned is None else pruned.spread(q)
            for row, i in enumerate(self.active):
                self._q[i].append(laws[row])
        stopped = [False] * len(self.active) if stop is None else read_back(stop(logits)).tolist()
        nodes = read_back(tokens).tolist()
        if pruned is not None:
            nodes = [[pruned.target_id(token) for token in row] for row in nodes]
        still = []
        for i, (token, *leaves), ends in zip(self.active, nodes, stopped, strict=True):
            if ends or token == PAD:
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

    def _uniform(self, index: int, position: int) -> float:
        if index not in self._uniforms:
            sequence = self._sequences[index]
            draws = draft_uniforms(sequence.request.seed, sequence.steps, self._limits[index])
            self._uniforms[index] = draws.tolist()
        return self._uniforms[index][position]


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


class ModelDrafter:
    """Drafts with a smaller model of the same vocabulary.

    Args:
        model: the draft model.
        draft_tokens: K, the most drafts per step.
        places: logits that stay where they are.
    """

    def __init__(
        self, model: LanguageModel, draft_tokens: int, places: Places | None = None
    ) -> None:
        self.model = model
        self.draft_tokens = draft_tokens
        self._places = places
        self._in_one: bool | None = None  # whether the last drafts came from one replay

    def prefill(self, sequences: SequenceOf[Sequence]) -> None:
        """Feed the prompts, so that the first draft step is like the others."""
        self._in_one = None  # perhaps another strategy's turn
        self.model.forward(
            [RowInput(each.slot, each.draft_length, each.draft_pending) for each in sequences]
        )
        for sequence in sequences:
            sequence.draft_length = sequence.length

    def run_ahead(self, sequences: SequenceOf[Sequence]) -> bool:
        """Launch what the next drafts begin with, if they are made like the last ones.

        Returns:
            Whether anything was launched.
        """
        inputs = _pending(sequences, self._limits(sequences, None))
        if not inputs or self._in_one is None or not isinstance(self.model, StaticLM):
            return False
        return self.model.run_ahead(inputs, self.draft_tokens if self._in_one else 0)

    def chain(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
    ) -> DraftChain:
        """A draft loop of at most K tokens, or ``limit``; one of the remaining tokens is left
        to the target's own, so no draft stands past the length limit (L11)."""
        limits = self._limits(sequences, limit)
        self._in_one = False
        return DraftChain(self.model, sequences, limits, sampling, width, self._places)

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """Draft without a grammar."""
        if sampling is None and width == 1 and stop is None and isinstance(self.model, StaticLM):
            proposals = self._replay(self.model, sequences, limit)
            if proposals is not None:
                return proposals
        chain = self.chain(sequences, sampling, width, limit)
        while chain.active:
            chain.extend(chain.forward(), stop)
        return chain.proposals()

    def _limits(self, sequences: SequenceOf[Sequence], limit: int | None) -> list[int]:
        most = self.draft_tokens if limit is None else min(limit, self.draft_tokens)
        return [max(0, min(most, sequence.remaining - 1)) for sequence in sequences]

    def _replay(
        self, model: StaticLM, sequences: SequenceOf[Sequence], limit: int | None
    ) -> list[Proposal] | None:
        """All draft steps of the argmax chain in one go; None where that cannot be."""
        limits = self._limits(sequences, limit)
        inputs = _pending(sequences, limits)
        k = self.draft_tokens  # also where fewer are wanted: one graph serves all
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


def _pending(sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[RowInput]:
    """What the draft model has to read first, of the sequences that get drafts."""
    return [
        RowInput(each.slot, each.draft_length, each.draft_pending)
        for each, most in zip(sequences, limits, strict=True)
        if most
    ]


def settle(sequence: Sequence, emitted: SequenceOf[int]) -> None:
    """Keep of the draft model's cache what the output confirms; call before it is appended.

    After a fully accepted window the last draft was never fed: it stays pending together with
    the target's own token. That one is always pending, so that the next forward has something
    to feed.
    """
    sequence.draft_length += longest_common_prefix(sequence.draft_ahead, emitted[:-1])
    sequence.draft_ahead = []
