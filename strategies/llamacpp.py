"""llama.cpp: sample first, ask the grammar about that one token, resample if it says no.

Invariant: the matcher holds exactly the emitted tokens, and never anything else: it is fed the
target's own token, position by position, and stops at the first one that differs from the
draft. So there is nothing to roll back. It pays after the target's forward: one check per
emitted token, and a full mask and a second sampling round only where the target's own choice
was illegal.

Rules: L4 check-then-resample, L7-L11 draft, L14 verification, L20-L23 lazy grammars, L25
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from harness.bitmask import dead_end
from harness.core import Sequence, Verdict
from harness.drafters.length import Unsure
from harness.errors import ConfigError, DeadEnd, MatcherError
from harness.grammar.tracked import TrackedMatcher
from harness.models.verifiers import CheckThenResample
from harness.step import Step, isolate
from strategies.base import Setup, Strategy

TOP_K = 10
"""Candidates of llama.cpp's draft sampler; ``p_min`` is measured among these (L7, L8)."""


@dataclass(frozen=True)
class LlamaCppOptions:
    """Draft limits of llama.cpp (L9, L10, L27).

    Attributes:
        p_min: stop drafting before a token whose probability among the top 10 is lower.
        n_min: drop a draft with fewer tokens.
    """

    p_min: float = 0.0
    n_min: int = 0


@dataclass
class DraftStats:
    """llama.cpp's counters per run (L25)."""

    n_draft: int = 0
    n_accepted: int = 0
    n_verify_steps: int = 0
    per_position: list[int] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one finished verification; a step without drafts is none."""
        self.n_draft += drafted
        self.n_accepted += accepted
        self.n_verify_steps += 1
        self.per_position += [0] * (drafted - len(self.per_position))
        for position in range(accepted):
            self.per_position[position] += 1

    def summary(self) -> dict[str, Any]:
        """The figures of llama.cpp's log line; None where it would divide by zero."""
        steps = self.n_verify_steps
        return {
            "draft_acceptance": self.n_accepted / self.n_draft if self.n_draft else None,
            "mean_len": 1 + self.n_accepted / steps if steps else None,
            "acc_per_pos": [n / steps for n in self.per_position],
        }


class LlamaCpp(Strategy):
    """The grammar on the target side only."""

    name = "llamacpp"
    Options = LlamaCppOptions

    def __init__(self, options: LlamaCppOptions, setup: Setup) -> None:
        super().__init__(options, setup)
        if not 0 <= options.p_min <= 1:
            raise ConfigError("options.llamacpp.p_min: give a probability between 0 and 1")
        if not 0 <= options.n_min <= setup.draft_tokens:
            raise ConfigError(
                f"options.llamacpp.n_min: {options.n_min} is not between 0 and "
                f"engine.draft_tokens={setup.draft_tokens}"
            )
        self.verifier = CheckThenResample()
        self.stats = DraftStats()

    @classmethod
    def needs_logits(cls, options: LlamaCppOptions) -> str:
        """``p_min`` is measured in them (L8)."""
        return f"options.llamacpp.p_min={options.p_min}" if options.p_min > 0 else ""

    def propose(self, step: Step) -> None:
        """The draft's argmax, stopped at ``p_min``, dropped below ``n_min`` (L8-L10)."""
        stop = None
        if self.options.p_min > 0:  # no probability is below 0
            stop = Unsure(self.options.p_min, TOP_K)
        step.proposals = step.drafts.free(step.sequences, stop=stop)
        for proposal in step.proposals:
            if proposal.drafted < self.options.n_min:
                proposal.tokens = []
        # The accounting wants to know what is legal: here, where no work of the device hides it.
        for index, sequence, matcher in step.constrained():
            proposal = step.proposals[index]
            with isolate(sequence):
                proposal.legal_prefix(matcher.audit(proposal.tokens))

    def verify_rows(self, step: Step) -> None:
        """Mask no row (L4)."""

    def verify(self, step: Step, logits: torch.Tensor) -> list[Verdict]:
        """Sample, check, resample; the matchers advance on the way (L14)."""
        batch = self.verify_batch(step, logits)
        batch.constraints = [
            None
            if sequence.matcher is None or sequence.error
            else TargetSide(sequence, sequence.matcher, len(self.setup.table))
            for sequence in step.sequences
        ]
        return self.verifier.verify(batch)

    def commit(self, step: Step) -> None:
        """Nothing to feed: the verification did. Count every draft verified (L25, L26)."""
        for sequence, proposal, verdict in zip(
            step.sequences, step.proposals, step.verdicts, strict=True
        ):
            if proposal.drafted and sequence.error is None:
                self.stats.observe(proposal.drafted, verdict.accepted)

    def statistics(self) -> dict[str, Any]:
        """llama.cpp's own numbers."""
        return self.stats.summary()


class TargetSide:
    """What the verifier asks of one sequence's grammar (``Constraint``); errors stay its own."""

    def __init__(self, sequence: Sequence, matcher: TrackedMatcher, vocab_size: int) -> None:
        self._sequence, self._matcher, self._vocab_size = sequence, matcher, vocab_size
        self._masked = False

    @property
    def terminated(self) -> bool:
        return self._matcher.terminated

    def accept(self, token: int) -> bool:
        """Advance over the target's own token if it is legal."""
        accepted = False
        with isolate(self._sequence):
            accepted = self._matcher.accept([token])
            if not accepted and (self._masked or not self._matcher.constrained):
                # It came from a row that allows it, so another draw cannot mend that (L22).
                raise MatcherError(f"the grammar refuses token {token}, which its mask allows")
            self._masked = False
        return accepted

    def fill(self, mask: torch.Tensor, row: int) -> bool:
        """Fill the mask for the second draw; a dead end fails the request (L6)."""
        if self._sequence.error is None:
            with isolate(self._sequence):
                self._matcher.fill(mask, row)
                if dead_end(mask[row].numpy(), self._vocab_size):
                    raise DeadEnd
                self._masked = True
        return self._masked
