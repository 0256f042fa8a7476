"""What one step of one sequence comes to, in counts."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core import PAD, ROLLBACK_KINDS, Ledger, Sequence, StepTrace, check_ledger
from harness.step import Step, isolate


@dataclass(slots=True)
class Books:
    """What one sequence's step did to its matcher.

    Attributes:
        step: steps of the sequence before this one.
        before, after: its ledger at both ends of the step.
        fill_us: time of each mask fill, µs.
    """

    step: int
    before: Ledger
    after: Ledger
    fill_us: list[float]


def ledger(sequence: Sequence) -> Ledger:
    """A copy of the sequence's ledger as it is now."""
    return Ledger() if sequence.matcher is None else sequence.matcher.ledger.copy()


def close_books(sequence: Sequence, before: Ledger) -> Books:
    """Audit the ledger at the end of a step, and keep what the next one would change.

    The sequence fails if it and its matcher disagree.
    """
    with isolate(sequence):
        check_ledger(sequence)
    fills = [] if sequence.matcher is None else sequence.matcher.take_fills()
    return Books(sequence.steps, before, ledger(sequence), fills)


def trace_step(step: Step, index: int, books: Books, strategy: str, tick: int) -> StepTrace:
    """What one sequence's step comes to; times are left at 0."""
    sequence, proposal = step.sequences[index], step.proposals[index]
    kept, path = step.kept[index], step.verdicts[index].path
    accepted = path[: len(kept)]
    trace = StepTrace(
        strategy,
        sequence.request.id,
        tick,
        books.step,
        step.prefill,
        len(step.sequences),
        drafted_raw=proposal.drafted_raw,
        drafted=proposal.drafted,
        accepted=len(accepted),
        emitted=len(kept),
        trimmed=proposal.trimmed,
        rows=1 + len(proposal.tokens),
        wasted_rows=1 + len(proposal.tokens) - len(kept),
        mask_rows=len(books.fill_us),
        draft_forwards=proposal.draft_forwards,
        advanced=books.after.advanced - books.before.advanced,
        held=books.after.held,
        fill_us=books.fill_us,
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
    before, after = books.before, books.after
    if after.rollback_calls != before.rollback_calls:
        for kind in ROLLBACK_KINDS:
            calls = after.rollback_calls[kind] - before.rollback_calls[kind]
            tokens = after.rollback_tokens[kind] - before.rollback_tokens[kind]
            setattr(trace, f"rollback_{kind}_calls", calls)
            setattr(trace, f"rollback_{kind}_tokens", tokens)
    return trace
