"""How many drafts a step gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

PRIOR_ACCEPTANCE = 0.8
"""What is believed of the drafts before any was seen. Above what most drafters reach: a drafter
that is not tried teaches nothing, so doubt must not be what keeps it from being tried."""
PRIOR_DRAFTS = 1.0
"""How many seen drafts that belief weighs."""
MEMORY = 0.98
"""Weight that an outcome keeps for each later step of a sequence: half of it after 34."""


class Length(Protocol):
    """Decides, from past outcomes alone, the most drafts of the next step.

    A decision that saw this step's drafts or the target's answer would bias what is emitted.
    """

    @property
    def limit(self) -> int:
        """Most drafts per sequence; the same until the next ``observe``."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """One sequence's step: of ``drafted`` drafts in a row the first ``accepted`` were right."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number."""

    limit: int

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the forwards of one step of a full batch take, ms.

    Attributes:
        draft_ms: one draft forward.
        verify_ms: the target's forward with one row of logits per sequence.
        row_ms: each further row per sequence.
    """

    draft_ms: float
    verify_ms: float
    row_ms: float

    def step_ms(self, drafts: int) -> float:
        """A step with that many drafts per sequence."""
        return self.verify_ms + drafts * (self.draft_ms + self.row_ms)


class AdaptiveLength:
    """The number of drafts that promises most tokens per second, for the whole batch.

    A step with k drafts emits (1 - a^(k+1)) / (1 - a) tokens per sequence where each draft is
    right with probability a, independent of the others (arXiv 2211.17192, equation 1), and is
    divided by its costs as in theorem 3.8 there; a verification that takes longer for each row
    replaces its constant. ``a`` is the share of right ones among the drafts that were tested, the
    first wrong one included and what stands behind it not. Each outcome is forgotten
    exponentially, also while nothing is drafted: then belief returns to ``PRIOR_ACCEPTANCE``, and
    where that makes drafting pay it is tried again.

    Args:
        draft_tokens: K, the largest number.
        costs: of a step.
    """

    def __init__(self, draft_tokens: int, costs: Costs) -> None:
        self._draft_tokens, self._costs = draft_tokens, costs
        self._tested = self._right = 0.0

    @property
    def acceptance(self) -> float:
        """What is believed of the next draft now."""
        right = self._right + PRIOR_DRAFTS * PRIOR_ACCEPTANCE
        return right / (self._tested + PRIOR_DRAFTS)

    @property
    def limit(self) -> int:
        """The best number; of equally good ones the smallest."""
        return max(range(self._draft_tokens + 1), key=self.tokens_per_ms)

    def tokens_per_ms(self, drafts: int) -> float:
        """What a step with that many drafts promises, per sequence."""
        tokens = sum(self.acceptance**level for level in range(drafts + 1))
        return tokens / self._costs.step_ms(drafts)

    def observe(self, drafted: int, accepted: int) -> None:
        """See ``Length``."""
        self._tested = MEMORY * self._tested + min(accepted + 1, drafted)
        self._right = MEMORY * self._right + accepted


@dataclass(frozen=True, slots=True)
class Unsure:
    """A rule to stop drafting: the best token is less likely than ``p_min``.

    It asks for the best token, not for the one that is drawn: a draft that is dropped for what it
    is would bias the output (V1.7), while the best token is known before the draw.

    Attributes:
        p_min: the least probability.
        among: renormalise among that many best tokens first (L7, L8); None = all.
    """

    p_min: float
    among: int | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab]`` to bool ``[rows]``."""
        if self.among is not None:
            logits = logits.topk(min(self.among, logits.shape[-1]), dim=-1).values
        doubtful: torch.Tensor = logits.softmax(-1).amax(-1) < self.p_min
        return doubtful
