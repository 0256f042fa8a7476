"""Speculative decoding without any grammar: the ceiling of what drafts could give.

Invariant: no matcher exists. Its outputs need not be valid; its acceptance and speed say what
the grammar costs the others.
"""

from __future__ import annotations

from typing import Any

from harness.models.verifiers import RejectionSampling
from harness.step import Step
from strategies.base import Setup, Strategy


class Unguided(Strategy):
    """Free drafts, unmasked verification by rejection sampling (V1.7)."""

    name = "unguided"
    constrained = False

    def __init__(self, options: Any, setup: Setup) -> None:
        super().__init__(options, setup)
        self.verifier = RejectionSampling()

    def propose(self, step: Step) -> None:
        """Draft K tokens from the draft model's own law."""
        step.proposals = step.drafts.free(step.sequences, self.setup.draft_law)
