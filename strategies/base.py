"""What a strategy is: hooks that the loop calls, in the order of a step.

``before_step``, ``propose``, (the target's forward is launched), ``verify_rows``, ``verify``,
``commit``. A strategy overrides those where its engine differs from the defaults here, which are
masked decoding without drafts. ``verify_rows`` and ``commit`` do ``fill_rows`` and ``advance`` for
each sequence, which is where most differ.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from harness.core import PAD, Sequence, Verdict, first_rows
from harness.errors import DeadEnd, MatcherError
from harness.grammar.gate import Trigger, gate
from harness.grammar.matcher import CompiledGrammar, Matcher, TokenTable
from harness.grammar.tracked import TrackedMatcher
from harness.models.sampling import Sampling
from harness.models.verifiers import Greedy, Verifier, VerifyBatch
from harness.step import Step
from harness.text import Codec


@dataclass(frozen=True)
class Setup:
    """What a strategy may know of the run when it is made.

    Attributes:
        sampling: the law of the target's tokens.
        draft_tokens: K, drafts per step.
        table: the vocabulary.
        codec: the tokenizer, for strategies that re-encode text.
    """

    sampling: Sampling
    draft_tokens: int
    table: TokenTable
    codec: Codec

    @property
    def draft_law(self) -> Sampling | None:
        """The law of sampled drafts: the target's own settings; None (argmax) when greedy."""
        return None if self.sampling.greedy else self.sampling


@dataclass(frozen=True)
class NoOptions:
    """Options of a strategy that has none."""


class Strategy:
    """How a grammar and a draft model share the loop.

    Attributes:
        options: the strategy's own config dataclass, upstream's released behaviour by default.
        name: what the user calls it.
        uses_draft: it drafts, so it needs a drafter.
        constrained: it applies grammars at all.
        tree_width: draft nodes per depth; 1 for a chain.
        verifier: decides which drafts live.

    Raises:
        ConfigError: an option cannot be combined with the setup.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions
    uses_draft: ClassVar[bool] = True
    constrained: ClassVar[bool] = True
    tree_width: int = 1

    def __init__(self, options: Any, setup: Setup) -> None:
        self.options, self.setup = options, setup
        self.verifier: Verifier = Greedy()

    @classmethod
    def needs_logits(cls, options: Any) -> str:
        """The setting that looks at the drafter's logits between its steps, by its name for the
        user: only a draft model can then draft. Empty = the strategy takes any drafter."""
        return ""

    @property
    def reserve(self) -> int:
        """Cache cells beyond prompt and output that a step may need."""
        return 1 + (self.setup.draft_tokens * self.tree_width if self.uses_draft else 0)

    @property
    def rewrites(self) -> bool:
        """Outputs may change before anything is drafted, so nothing can be launched before."""
        return False

    def matcher(self, grammar: CompiledGrammar, trigger: Trigger | None) -> Matcher:
        """The matcher of a new request; any strategy takes any late start."""
        matcher = grammar.matcher()
        return gate(matcher, trigger, self.setup.table) if trigger else matcher

    def before_step(self, step: Step) -> None:
        """Change outputs before anything is drafted (jump-forward)."""

    def propose(self, step: Step) -> None:
        """Set ``step.proposals``."""

    def verify_rows(self, step: Step) -> None:
        """Fill the mask rows of every constrained sequence while the target computes."""
        step.pool.each(step.constrained(), partial(self.fill_rows, step))

    def fill_rows(
        self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher
    ) -> None:
        """Fill the mask rows of one sequence, perhaps beside others on several threads."""
        self.fill_first_row(step, index, matcher)

    def fill_first_row(self, step: Step, index: int, matcher: TrackedMatcher) -> None:
        """Fill the row after the last committed token.

        Raises:
            DeadEnd: nothing may follow; the request cannot go on.
        """
        if not step.masks.fill(index, 0, matcher):
            raise DeadEnd

    def verify(self, step: Step, logits: torch.Tensor) -> list[Verdict]:
        """Mask ``logits`` (``[rows, vocab]``, packed) in place and decide."""
        self.apply_masks(step, logits)
        return self.verifier.verify(self.verify_batch(step, logits))

    def apply_masks(self, step: Step, logits: torch.Tensor) -> None:
        """Apply the filled rows to the packed logits (V1.3b)."""
        rows = [1 + len(proposal.tokens) for proposal in step.proposals]
        step.masks.apply(logits, first_rows(step.proposals), rows)

    def verify_batch(self, step: Step, logits: torch.Tensor) -> VerifyBatch:
        """What the verifier needs of the step."""
        return VerifyBatch(
            logits=logits,
            proposals=step.proposals,
            seeds=[sequence.request.seed for sequence in step.sequences],
            positions=[sequence.draw_position for sequence in step.sequences],
            sampling=self.setup.sampling,
            places=step.places,
        )

    def commit(self, step: Step) -> None:
        """Tell every constrained sequence's matcher what the output got."""
        step.pool.each(step.constrained(), partial(self.advance, step))

    def advance(self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher) -> None:
        """Advance one matcher over the tokens just emitted, perhaps beside others.

        Raises:
            MatcherError: the grammar refuses them (V1.4d).
        """
        feed(matcher, step.kept[index])

    def follows(self, sequence: Sequence) -> tuple[int, int]:
        """How far the matcher of a running sequence is between steps.

        Returns:
            How many of the first output tokens it holds, and how many drafts behind them.
        """
        return len(sequence.output_ids), 0

    def statistics(self) -> dict[str, Any]:
        """The numbers that the mirrored engine would print itself; empty if it has none."""
        return {}


def feed(matcher: TrackedMatcher, tokens: SequenceOf[int]) -> None:
    """Advance over tokens that must be legal.

    Raises:
        MatcherError: they are not; the state is what it was.
    """
    if not matcher.accept(tokens):
        raise MatcherError(f"the grammar refuses emitted tokens {list(tokens)}")


def until_padding(tokens: SequenceOf[int]) -> list[int]:
    """Drafts before the first ``PAD``: it and everything behind it are none (V1.1a, R3)."""
    tokens = list(tokens)
    return tokens[: tokens.index(PAD)] if PAD in tokens else tokens
