"""Masked decoding without drafts: the reference that every other strategy is compared with.

Invariant: the matcher holds exactly the emitted tokens. Pays one mask fill per token (CPU) and
one target row per token; nothing is drafted and nothing is rolled back.
"""

from __future__ import annotations

from typing import Any

from harness.models.verifiers import MatchOwnSample
from strategies.base import Setup, Strategy


class Plain(Strategy):
    """One token a step, sampled from the masked law."""

    name = "plain"
    uses_draft = False

    def __init__(self, options: Any, setup: Setup) -> None:
        super().__init__(options, setup)
        self.verifier = MatchOwnSample()
