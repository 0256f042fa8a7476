"""DeepInfer 0.1.0: commit lazily, mask by step.

Invariant: between steps the matcher holds the committed tokens but those of the last step. Each
step feeds these first, previews the drafts, and rolls the preview back at once; so the
verification leaves nothing to undo. It pays on the CPU only, while the target computes; drafts
are free, and rows behind an illegal one, or before the trigger, stay unmasked.

Rules: D6-D9 matcher with trigger and bound (``harness.grammar.gate``), D10-D15 step, D16 masks
addressed by step, D17-D18 verification.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.core import Sequence, first_rows
from harness.grammar.gate import Trigger, gate
from harness.grammar.matcher import CompiledGrammar, Matcher
from harness.grammar.tracked import TrackedMatcher
from harness.models.verifiers import RejectionSampling
from harness.step import Step
from strategies.base import Setup, Strategy, feed


class DeepInfer(Strategy):
    """Free drafts; one mask per draft step, addressed by the request's first row."""

    name = "deepinfer"

    def __init__(self, options: Any, setup: Setup) -> None:
        super().__init__(options, setup)
        self.verifier = RejectionSampling()

    def matcher(self, grammar: CompiledGrammar, trigger: Trigger | None) -> Matcher:
        """The matcher with its ledgers before the trigger and behind the stop token (D6-D9)."""
        trigger = trigger or Trigger("tokens")
        return gate(grammar.matcher(), trigger, self.setup.table, self.setup.draft_tokens)

    def propose(self, step: Step) -> None:
        """Draft K tokens from the draft model's own law; the grammar never sees it (D17)."""
        step.proposals = step.drafts.free(step.sequences, self.setup.draft_law)

    def fill_rows(
        self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher
    ) -> None:
        """Commit the previous step, fill row 0, preview the drafts, roll back (D11, D13)."""
        feed(matcher, sequence.state or [])
        sequence.state = []
        self.fill_first_row(step, index, matcher)
        advanced = legal = 0
        try:
            for draft in step.proposals[index].tokens:
                ended = matcher.terminated
                if not matcher.accept([draft]):
                    break
                advanced += 1
                legal += not ended  # behind the stop token all is accepted, nothing legal (D7)
                step.masks.fill(index, advanced, matcher)
        finally:
            matcher.rollback(advanced, "preview")
        step.proposals[index].legal_prefix(legal)

    def apply_masks(self, step: Step, logits: torch.Tensor) -> None:
        """One call per draft position that has a mask (D15, D16)."""
        step.masks.apply_by_step(logits, first_rows(step.proposals))

    def advance(self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher) -> None:
        """Keep the emitted tokens for the next step to feed (D12)."""
        sequence.state = step.kept[index]

    def follows(self, sequence: Sequence) -> tuple[int, int]:
        """All tokens but those of the last step (D12)."""
        return len(sequence.output_ids) - len(sequence.state), 0
