"""One step of the loop, as a strategy sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, cast

from harness.core import Proposal, Sequence, Verdict
from harness.errors import HarnessError, RanksError
from harness.grammar.masks import MaskBuffer
from harness.grammar.tracked import TrackedMatcher
from harness.static_logits import Places

if TYPE_CHECKING:
    from harness.detail import Detail
    from harness.drafters.base import Drafter, SteppedDrafter
    from harness.grammar.pool import GrammarPool


@dataclass(slots=True)
class Step:
    """A batch on its way from drafts to emitted tokens; index i is its i-th sequence.

    Attributes:
        sequences: the batch; some may fail on the way and stay in place.
        masks: mask rows of the verification, ``masks.row(i, j)`` after draft j of sequence i.
        draft_masks: one mask row per sequence for a draft step.
        drafter: where drafts come from; None when the strategy uses none.
        prefill: the sequences are new: no drafts, one row each.
        pool: does grammar work that sequences do not share.
        places: logits that stay where they are.
        proposals: what is verified.
        verdicts: what the verification said.
        kept: the emitted tokens up to the stop; what the output really got.
        jumped: by sequence, forced tokens inserted and ids changed before this step.
        details: by sequence, what was recorded of the verification, if it was.
        ran_ahead: the next step's first forward is under way.
    """

    sequences: list[Sequence]
    masks: MaskBuffer
    draft_masks: MaskBuffer
    drafter: Drafter | None
    prefill: bool
    pool: GrammarPool
    places: Places | None = None
    proposals: list[Proposal] = field(init=False)
    verdicts: list[Verdict] = field(init=False, default_factory=list)
    kept: list[list[int]] = field(init=False)
    jumped: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)
    details: list[Detail] = field(init=False, default_factory=list)
    ran_ahead: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.proposals = [Proposal() for _ in self.sequences]
        self.kept = [[] for _ in self.sequences]

    @property
    def drafts(self) -> Drafter:
        """The drafter of a strategy that uses one."""
        assert self.drafter is not None, "a strategy that drafts sets uses_draft"
        return self.drafter

    @property
    def stepped_drafts(self) -> SteppedDrafter:
        """The drafter of a strategy that comes between its steps."""
        return cast("SteppedDrafter", self.drafts)  # ``Strategy.needs_logits`` has asked for it

    def constrained(self) -> Iterator[tuple[int, Sequence, TrackedMatcher]]:
        """Index, sequence and matcher of those that have a grammar and have not failed.

        An exception inside the loop body would end it: wrap the body in ``isolate``.
        """
        for index, sequence in enumerate(self.sequences):
            if sequence.matcher is not None and sequence.error is None:
                yield index, sequence, sequence.matcher


class isolate:
    """``with isolate(sequence)``: whatever a grammar engine raises ends this sequence, and no
    other. That ranks have parted ends them all."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, RanksError):
            return False
        plain = isinstance(error, HarnessError)
        self._sequence.fail(str(error) if plain else f"{type(error).__name__}: {error}")
        return True
