"""What one step of one sequence comes to, in counts."""

from __future__ import annotations

from harness.core import PAD, ROLLBACK_KINDS, Ledger, Sequence, StepTrace
from harness.step import Step


def books(sequence: Sequence) -> Ledger:
    """A copy of the sequence's ledger as it is now."""
    return Ledger() if sequence.matcher is None else sequence.matcher.ledger.copy()


def trace_step(step: Step, index: int, before: Ledger, strategy: str, tick: int) -> StepTrace:
    """What one sequence's step comes to; times are left at 0."""
    sequence, proposal = step.sequences[index], step.proposals[index]
    kept, path = step.kept[index], step.verdicts[index].path
    accepted = path[: len(kept)]
    trace = StepTrace(
        strategy,
        sequence.request.id,
        tick,
        sequence.steps,
        step.prefill,
        len(step.sequences),
        drafted_raw=proposal.drafted_raw,
        drafted=proposal.drafted,
        accepted=len(accepted),
        emitted=len(kept),
        trimmed=proposal.trimmed,
        rows=1 + len(proposal.tokens),
        wasted_rows=1 + len(proposal.tokens) - len(kept),
        draft_forwards=proposal.draft_forwards,
        draft_ids=list(proposal.tokens),
        emitted_ids=list(kept),
    )
    ended_on_a_draft = len(kept) <= len(path)
    for node, token in enumerate(proposal.tokens):
        if token == PAD or node in accepted:
            continue
        if ended_on_a_draft:
            trace.past_stop += 1
        elif proposal.legal is None or proposal.legal[node]:
            trace.rejected_model += 1
        else:
            trace.rejected_grammar += 1
    trace.jump_tokens, trace.retokenized = step.jumped.get(index, (0, 0))
    if sequence.matcher is not None:
        trace.fill_us = sequence.matcher.take_fills()
        trace.mask_rows = len(trace.fill_us)
        after = sequence.matcher.ledger
        trace.held = after.held
        trace.advanced = after.advanced - before.advanced
        for kind in ROLLBACK_KINDS:
            for unit in ("calls", "tokens"):
                was, now = getattr(before, f"rollback_{unit}"), getattr(after, f"rollback_{unit}")
                setattr(trace, f"rollback_{kind}_{unit}", now[kind] - was[kind])
    return trace
