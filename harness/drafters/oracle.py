"""Drafts that are right as often as one likes: a knob for the acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as SequenceOf
from pathlib import Path

from harness.core import Finish, Proposal, Request, Sequence
from harness.drafters.base import Drafter, StopRule
from harness.drafters.config import DrafterConfig
from harness.drafters.length import Length
from harness.errors import ConfigError
from harness.models.draws import ORACLE, uniforms
from harness.models.sampling import Sampling
from harness.results.metrics import PLAIN
from harness.results.record import RunFolder

References = Mapping[str, SequenceOf[int]]
"""By request id, the output that is right."""


class OracleDrafter(Drafter):
    """Replays known outputs, each draft being another token with probability ``1 - rate``.

    Whether a draft is right is drawn by request and output position, so all strategies get the
    same drafts at the same places. An output that has left the reference gets none.

    Args:
        draft_tokens: K, the most drafts per step.
        references: the outputs.
        rate: probability that a draft is right.
        vocab_size: of the tokens that a wrong one is drawn from.
        length: see ``Drafter``.
    """

    def __init__(
        self,
        draft_tokens: int,
        references: References,
        rate: float,
        vocab_size: int,
        length: Length | None = None,
    ) -> None:
        super().__init__(draft_tokens, length)
        self._references, self._rate, self._vocab_size = references, rate, vocab_size

    def free(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> list[Proposal]:
        """See ``Drafter``."""
        rooms = self.limits(sequences, limit)
        return [
            Proposal(self.replay(sequence, room))
            for sequence, room in zip(sequences, rooms, strict=True)
        ]

    def replay(self, sequence: Sequence, room: int) -> list[int]:
        """At most ``room`` drafts behind the output."""
        reference = self._references[sequence.request.id]
        position = len(sequence.output_ids)
        if list(reference[:position]) != sequence.output_ids:
            return []
        right = reference[position : position + room]
        draws = uniforms(sequence.request.seed, position, len(right))[:, ORACLE].tolist()
        return [self._perhaps(token, u) for token, u in zip(right, draws, strict=True)]

    def _perhaps(self, right: int, u: float) -> int:
        """``right``, or one of the other tokens, all alike: what is left of ``u`` says which."""
        if u < self._rate:
            return right
        other = int((u - self._rate) / (1 - self._rate) * (self._vocab_size - 1))
        return (right + 1 + other) % self._vocab_size


def references_of(config: DrafterConfig, sampling: Sampling) -> References:
    """What ``plain`` emitted in the run that ``drafter.reference`` names, by request.

    A run folder, not the ``plain`` of the same comparison: that may not have ended yet, or have
    been decoded before the run was resumed. For greedy decoding only: drafts that were drawn with
    a request's seed are not independent of the draws that verify them, which the ratio test
    needs (V1.7b); and under it, no draft is right with a set probability.

    Returns:
        Nothing for any other drafter; requests that failed are left out.

    Raises:
        ConfigError: there is no such run, ``plain`` is not in it, or tokens are sampled.
    """
    if config.name != "oracle":
        return {}
    if not sampling.greedy:
        raise ConfigError(
            "drafter.name: oracle knows what greedy decoding emits, and sampling.temperature is "
            f"{sampling.temperature}; set that to 0, or use another drafter"
        )
    rows = RunFolder.open(Path(str(config.reference))).requests()
    rows = rows[(rows["strategy"] == PLAIN) & (rows["finish"] != Finish.FAILED)]
    if rows.empty:
        raise ConfigError(
            f"drafter.reference: {config.reference} has no outputs of plain; run plain first"
        )
    outputs = (ids.tolist() for ids in rows["output_ids"])
    return dict(zip(rows["request"], outputs, strict=True))


def check_references(references: References, requests: SequenceOf[Request], folder: str) -> None:
    """Every request needs an output to replay.

    Raises:
        ConfigError: one has none; names the first.
    """
    missing = [each.id for each in requests if each.id not in references]
    if missing:
        raise ConfigError(
            f"drafter.reference: {folder} has no output of plain for {len(missing)} requests, "
            f"{missing[0]} first; run plain on this workload and name that run"
        )
