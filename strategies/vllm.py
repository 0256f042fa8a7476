"""vLLM 0.33: trim the drafts to their legal prefix, preview the rows, roll the preview back.

Invariant: between steps, and after every fill, the matcher holds exactly the emitted tokens.
It pays on the CPU: one validation of the drafts (V1.1) and a walk over them again for the rows
(V1.2), both beside the GPU in vLLM's asynchronous mode. The draft and the verification pay
nothing, but every illegal draft cuts all drafts behind it.

Rules: V1.1a-e trimming, V1.2b-h rows and rollback, V1.4a-d accepting, V1.5 reasoning
(``harness.grammar.gate``), V1.7 verification, V1.8 metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.core import PAD, Proposal, Sequence
from harness.grammar.tracked import TrackedMatcher
from harness.models.verifiers import RejectionSampling
from harness.step import Step
from strategies.base import Setup, Strategy, until_padding


@dataclass(frozen=True)
class VllmOptions:
    """Variants of vLLM.

    Attributes:
        keep_first_invalid: keep one draft behind the legal prefix, so that sampling from true
            draft probabilities stays lossless (V1.1b; not in a release).
        asynchronous: keep refused drafts as padding, with their rows (V1.1e); else shorten
            the draft (V1.1d).
        probabilistic: draw drafts from the draft's law and verify with it; vLLM's default is
            the draft's argmax, which is one-hot (V1.7b). Where drafts are shortened (not
            ``asynchronous``, not ``keep_first_invalid``) this is biased, as upstream is.
    """

    keep_first_invalid: bool = False
    asynchronous: bool = False
    probabilistic: bool = False


class SpecDecodingStats:
    """vLLM's own counters (V1.8), which differ from the harness's in what a draft is.

    Args:
        draft_tokens: N, the most drafts per step; each position has its rate.
    """

    def __init__(self, draft_tokens: int) -> None:
        self.drafts = self.draft_tokens = self.accepted = 0
        self.per_position = [0] * draft_tokens

    def observe(self, scheduled: int, invalid: int, accepted: int) -> None:
        """Count one request's step; a step without scheduled drafts is no draft (V1.1d).

        Args:
            scheduled: drafts in the window, padding included.
            invalid: of these, padding.
            accepted: accepted by the verifier, also past a stop token (1.1, accounting).
        """
        if not scheduled:
            return
        self.drafts += 1
        self.draft_tokens += scheduled - invalid
        self.accepted += accepted
        for position in range(accepted):
            self.per_position[position] += 1

    def summary(self) -> dict[str, Any]:
        """The figures of vLLM's log line; None or empty where it would divide by zero."""
        drafts, tokens = self.drafts, self.draft_tokens
        return {
            "mean_acceptance_length": 1 + self.accepted / drafts if drafts else None,
            "per_position_acceptance": [n / drafts for n in self.per_position if drafts],
            "draft_acceptance_rate": self.accepted / tokens if tokens else None,
        }


class Vllm(Strategy):
    """Drafts are free, then cut to what the grammar allows."""

    name = "vllm"
    Options = VllmOptions

    def __init__(self, options: VllmOptions, setup: Setup) -> None:
        super().__init__(options, setup)
        self.verifier = RejectionSampling()
        self.stats = SpecDecodingStats(setup.draft_tokens)

    def propose(self, step: Step) -> None:
        """Draft freely, then trim each constrained sequence's draft (V1.1)."""
        law = self.setup.draft_law if self.options.probabilistic else None
        step.proposals = step.drafts.free(step.sequences, law)
        step.pool.each(
            step.constrained(),
            lambda index, _, matcher: self.trim(step.proposals[index], matcher),
        )

    def trim(self, proposal: Proposal, matcher: TrackedMatcher) -> None:
        """Cut the draft to its legal prefix, or pad the rest (V1.1a, V1.1b, V1.1d, V1.1e)."""
        scheduled = len(proposal.tokens)
        keep = matcher.validate(until_padding(proposal.tokens))
        legal = keep
        if self.options.keep_first_invalid:
            keep = min(keep + 1, len(until_padding(proposal.tokens)))
        proposal.tokens = proposal.tokens[:keep]
        if self.options.asynchronous:
            proposal.tokens += [PAD] * (scheduled - keep)
        elif proposal.q is not None:
            proposal.q = proposal.q[:keep]
        proposal.legal_prefix(legal)

    def fill_rows(
        self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher
    ) -> None:
        """Preview the drafts row by row, then roll the preview back (V1.2c-g).

        Row i says what may stand at draft position i. A terminated matcher and everything
        behind padding leave their rows unmasked; behind a real illegal draft the rows are
        copies of the row that refused it.
        """
        drafts = step.proposals[index].tokens
        failed_row: int | None = None
        padding, advanced = False, 0
        try:
            for position in range(len(drafts) + 1):
                if failed_row is not None:
                    step.masks.copy(index, position, failed_row)
                    continue
                if position == 0:
                    self.fill_first_row(step, index, matcher)
                elif not padding:
                    step.masks.fill(index, position, matcher)
                if position == len(drafts):
                    break
                if drafts[position] == PAD:
                    padding = True
                elif not padding:
                    if not matcher.terminated and matcher.accept([drafts[position]]):
                        advanced += 1
                    else:
                        failed_row = position
        finally:
            matcher.rollback(advanced, "preview")

    def commit(self, step: Step) -> None:
        """Count the step as vLLM does (V1.8), free text too, then feed the output (V1.4a-d)."""
        for sequence, proposal, verdict in zip(
            step.sequences, step.proposals, step.verdicts, strict=True
        ):
            if sequence.error is None:
                tokens = proposal.tokens
                self.stats.observe(len(tokens), tokens.count(PAD), verdict.accepted)
        super().commit(step)

    def statistics(self) -> dict[str, Any]:
        """vLLM's own metrics."""
        return self.stats.summary()
