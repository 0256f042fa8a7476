"""TensorRT-LLM: guide the draft model, and keep three ledgers to find back.

Invariant: between steps the matcher holds all committed tokens but the last (the golden token)
plus the legal drafts of the last verification; the rejected tail among them is rolled back at
the start of the next draft loop. It pays in the draft loop, where each draft step waits for the
grammar (one round trip), and on the CPU, where every draft is fed twice. In return no draft is
illegal until the chain leaves the grammar.

Rules: T1-T6 build, T7 dead ends, T8-T10 the two rollbacks, 1.4(a) order, T13-T14 stop tokens
inside drafts, T17-T20 verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

from harness.core import Sequence
from harness.drafters.chain import DraftChain
from harness.errors import DeadEnd, MatcherError
from harness.grammar.masks import MaskBuffer
from harness.grammar.tracked import TrackedMatcher
from harness.models.verifiers import MatchOwnSample, RejectionSampling
from harness.step import Step
from strategies.base import Setup, Strategy

FillRow = Callable[[int], bool]
"""Fill and flag row i; False when no token is legal there."""


@dataclass(frozen=True)
class TrtllmOptions:
    """Variants of TensorRT-LLM.

    Attributes:
        overlap: the overlap scheduler, whose acceptance is pure token equality (1.4b, T18).
    """

    overlap: bool = False


@dataclass(slots=True)
class Ledgers:
    """The three ledgers of a slot and what belongs to them (1.1).

    Attributes:
        advanced: ADV, tokens that the latest build counted as accepted.
        guided: GUI, rows that the latest build filled.
        advanced_drafts: ADVD, sum of ADV over the draft builds of this loop.
        draft_terminated: DT, the chain left the grammar: stop advancing and masking.
        accepted: drafts that the latest verification accepted, clamped to ADV (T13).
    """

    advanced: int = 0
    guided: int = 0
    advanced_drafts: int = 0
    draft_terminated: bool = False
    accepted: int = 0

    def build(
        self,
        matcher: TrackedMatcher,
        fill: FillRow,
        new_token: int | None,
        drafts: SequenceOf[int] = (),
        draft_pass: bool = False,
    ) -> None:
        """Advance over the golden token and the drafts, and fill the rows behind them (1.2).

        Args:
            matcher: shared by the draft and the target pass (T2).
            fill: fills and flags one row.
            new_token: the last token of the request; None in the context phase, where nothing
                is consumed and yet ADV counts a virtual 1 (step 4).
            drafts: the target pass's drafts.
            draft_pass: this is one step of the draft loop.

        Raises:
            MatcherError: the target's own token is refused, or nothing may follow it (T7).
        """
        self.advanced = self.guided = 0
        if new_token is not None:
            if matcher.terminated or self.draft_terminated:
                return
            if not matcher.accept([new_token]):
                if not draft_pass:
                    raise MatcherError(f"the grammar refuses the emitted token {new_token}")
                self.draft_terminated = True
                return
        self.advanced = 1
        if not matcher.terminated:
            self._fill_rows(matcher, fill, drafts, draft_pass)
        if draft_pass:
            self.advanced_drafts += self.advanced

    def _fill_rows(
        self, matcher: TrackedMatcher, fill: FillRow, drafts: SequenceOf[int], draft_pass: bool
    ) -> None:
        """Step 5 of the build, with the has-valid-token check (T7)."""
        if not fill(0):
            if draft_pass:
                self.draft_terminated = True
                return
            self.advanced = 0
            raise DeadEnd
        self.guided = 1
        for position, draft in enumerate(drafts, start=1):
            if not matcher.accept([draft]):
                return
            self.advanced += 1
            if matcher.terminated or not fill(position):
                return
            self.guided += 1

    def roll_back_rejected(self, matcher: TrackedMatcher) -> None:
        """Undo what the latest verification refused (T8); the 1 is the golden token."""
        if self.advanced > 0:
            rejected = self.advanced - (1 + self.accepted)
            if rejected < 0:
                raise MatcherError(f"{self.accepted} drafts accepted of {self.advanced} fed")
            matcher.rollback(rejected, "rejected")

    def roll_back_drafts(self, matcher: TrackedMatcher) -> None:
        """Undo the draft loop, and let the next one be guided whatever happened (T9)."""
        try:
            matcher.rollback(self.advanced_drafts, "draft")
        finally:
            self.advanced_drafts, self.draft_terminated = 0, False


class Trtllm(Strategy):
    """Drafts are masked at every draft step."""

    name = "trtllm"
    Options = TrtllmOptions

    def __init__(self, options: TrtllmOptions, setup: Setup) -> None:
        super().__init__(options, setup)
        self.verifier = MatchOwnSample() if options.overlap else RejectionSampling()

    @classmethod
    def needs_logits(cls, options: TrtllmOptions) -> str:
        """They are masked at every draft step (1.4a, step 4)."""
        return "strategy trtllm"

    def propose(self, step: Step) -> None:
        """The draft loop between its two rollbacks (1.4a, steps 3 to 5)."""
        step.pool.each(
            step.constrained(),
            lambda _, sequence, matcher: ledgers(sequence).roll_back_rejected(matcher),
        )
        law = None if self.options.overlap else self.setup.draft_law
        chain = step.stepped_drafts.chain(step.sequences, law)
        while chain.active:
            logits = chain.forward()
            step.draft_masks.clear()
            drafting = [job for job in step.constrained() if job[0] in chain.active]
            step.pool.each(drafting, partial(self.fill_draft_row, step.draft_masks, chain))
            step.draft_masks.apply(logits, *chain.layout)
            chain.extend(logits)
        step.proposals = chain.proposals()
        step.pool.each(
            step.constrained(),
            lambda _, sequence, matcher: ledgers(sequence).roll_back_drafts(matcher),
        )

    def fill_draft_row(
        self,
        masks: MaskBuffer,
        chain: DraftChain,
        index: int,
        sequence: Sequence,
        matcher: TrackedMatcher,
    ) -> None:
        """The build of one draft step (1.4a, step 4)."""
        fill = partial(fill_row, masks, index, matcher)
        ledgers(sequence).build(matcher, fill, chain.last_token(index), draft_pass=True)

    def fill_rows(
        self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher
    ) -> None:
        """The target's build (1.4a, step 6); in the context phase it consumes nothing."""
        proposal, books = step.proposals[index], ledgers(sequence)
        new_token = None if step.prefill else sequence.output_ids[-1]
        fill = partial(fill_row, step.masks, index, matcher)
        books.build(matcher, fill, new_token, proposal.tokens)
        proposal.legal_prefix(max(0, books.advanced - 1))

    def advance(self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher) -> None:
        """Remember the acceptance, clamped to what the build fed (T13); M is not touched."""
        books = ledgers(sequence)
        books.accepted = max(0, min(len(step.verdicts[index].emitted), books.advanced) - 1)

    def follows(self, sequence: Sequence) -> tuple[int, int]:
        """All tokens but the golden one (T6), and the tail to be rolled back next (T8)."""
        books = ledgers(sequence)
        return len(sequence.output_ids) - 1, books.advanced - 1 - books.accepted


def fill_row(masks: MaskBuffer, index: int, matcher: TrackedMatcher, position: int) -> bool:
    """Fill and flag one row of a sequence; False for a dead end (T7)."""
    return masks.fill(index, position, matcher)


def ledgers(sequence: Sequence) -> Ledgers:
    """The ledgers of a sequence's slot."""
    if sequence.state is None:
        sequence.state = Ledgers()
    books: Ledgers = sequence.state
    return books
