"""One step of the loop, as a strategy sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness.core import Proposal, Sequence, Verdict
from harness.errors import HarnessError
from harness.grammar.masks import MaskBuffer
from harness.grammar.tracked import TrackedMatcher
from harness.models.drafters import ModelDrafter


@dataclass(slots=True)
class Step:
    """A batch on its way from drafts to emitted tokens; index i is its i-th sequence.

    Attributes:
        sequences: the batch; some may fail on the way and stay in place.
        masks: mask rows of the verification, ``masks.row(i, j)`` after draft j of sequence i.
        draft_masks: one mask row per sequence for a draft step.
        drafter: the draft model; None when the strategy uses none.
        prefill: the sequences are new: no drafts, one row each.
        proposals: what is verified.
        verdicts: what the verification said.
        kept: the emitted tokens up to the stop; what the output really got.
        jumped: by sequence, forced tokens inserted and ids changed before this step.
    """

    sequences: list[Sequence]
    masks: MaskBuffer
    draft_masks: MaskBuffer
    drafter: ModelDrafter | None
    prefill: bool
    proposals: list[Proposal] = field(init=False)
    verdicts: list[Verdict] = field(init=False, default_factory=list)
    kept: list[list[int]] = field(init=False)
    jumped: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.proposals = [Proposal() for _ in self.sequences]
        self.kept = [[] for _ in self.sequences]

    @property
    def drafts(self) -> ModelDrafter:
        """The drafter of a strategy that uses one."""
        assert self.drafter is not None, "a strategy that drafts sets uses_draft"
        return self.drafter

    def constrained(self) -> Iterator[tuple[int, Sequence, TrackedMatcher]]:
        """Index, sequence and matcher of those that have a grammar and have not failed.

        An exception inside the loop body would end it: wrap the body in ``isolate``.
        """
        for index, sequence in enumerate(self.sequences):
            if sequence.matcher is not None and sequence.error is None:
                yield index, sequence, sequence.matcher


@contextmanager
def isolate(sequence: Sequence) -> Iterator[None]:
    """Whatever a grammar engine raises ends this sequence, and no other."""
    try:
        yield
    except HarnessError as error:
        sequence.fail(str(error))
    except Exception as error:
        sequence.fail(f"{type(error).__name__}: {error}")
