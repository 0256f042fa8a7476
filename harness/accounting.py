"""What one step of one sequence comes to, in counts."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core import PAD, ROLLBACK_KINDS, Fate, Ledger, Sequence, StepTrace
from harness.step import Step


@dataclass(slots=True)
class Books:
    """What one sequence's step did to its matcher.

    Attributes:
        step: steps of the sequence before this one.
        before, after: its ledger at both ends of the step.
        fill_us: time of each mask fill, µs.
        jump_ids: what a jump wrote, from the first id that it changed on.
    """

    step: int
    before: Ledger
    after: Ledger
    fill_us: list[float]
    jump_ids: list[int]


def ledger(sequence: Sequence) -> Ledger:
    """A copy of the sequence's ledger as it is now."""
    return Ledger() if sequence.matcher is None else sequence.matcher.ledger.copy()


def close_books(step: Step, index: int, before: Ledger) -> Books:
    """Keep of a sequence's ledger what the next step would change."""
    sequence = step.sequences[index]
    fills = [] if sequence.matcher is None else sequence.matcher.take_fills()
    return Books(sequence.steps, before, ledger(sequence), fills, _jump_ids(step, index))


def _jump_ids(step: Step, index: int) -> list[int]:
    """The ids that stand, before those emitted, where a jump changed the output."""
    written = sum(step.jumped.get(index, (0, 0)))
    end = len(step.sequences[index].output_ids) - len(step.kept[index])
    return step.sequences[index].output_ids[end - written : end]


def fates(step: Step, index: int) -> list[Fate]:
    """What became of each draft of a sequence, in a tree of each node."""
    proposal, path = step.proposals[index], step.verdicts[index].path
    kept = step.kept[index]
    accepted, ended_on_a_draft = path[: len(kept)], len(kept) <= len(path)

    def fate(node: int, token: int) -> Fate:
        if token == PAD:
            return Fate.PADDING
        if node in accepted:
            return Fate.ACCEPTED
        if ended_on_a_draft:
            return Fate.PAST_STOP
        legal = proposal.legal is None or proposal.legal[node]
        return Fate.REJECTED_MODEL if legal else Fate.REJECTED_GRAMMAR

    return [fate(node, token) for node, token in enumerate(proposal.tokens)]


def trace_step(step: Step, index: int, books: Books, strategy: str, tick: int) -> StepTrace:
    """What one sequence's step comes to; times are left at 0."""
    sequence, proposal, kept = step.sequences[index], step.proposals[index], step.kept[index]
    fate = fates(step, index)
    trace = StepTrace(
        strategy,
        sequence.request.id,
        tick,
        books.step,
        step.prefill,
        len(step.sequences),
        drafted_raw=proposal.drafted_raw,
        drafted=proposal.drafted,
        accepted=fate.count(Fate.ACCEPTED),
        emitted=len(kept),
        trimmed=proposal.trimmed,
        rejected_grammar=fate.count(Fate.REJECTED_GRAMMAR),
        rejected_model=fate.count(Fate.REJECTED_MODEL),
        past_stop=fate.count(Fate.PAST_STOP),
        rows=1 + len(proposal.tokens),
        wasted_rows=1 + len(proposal.tokens) - len(kept),
        mask_rows=len(books.fill_us),
        draft_forwards=proposal.draft_forwards,
        advanced=books.after.advanced - books.before.advanced,
        held=books.after.held,
        fill_us=books.fill_us,
        draft_ids=list(proposal.tokens),
        emitted_ids=list(kept),
        fates="".join(fate),
        draft_parents=proposal.parents or [],
        trimmed_ids=proposal.trimmed_ids,
        jump_ids=books.jump_ids,
    )
    if step.details:
        detail = step.details[index]
        trace.draft_p, trace.draft_q, trace.legal = detail.draft_p, detail.draft_q, detail.legal
        trace.emitted_p = detail.emitted_p[: len(kept)]
    trace.jump_tokens, trace.retokenized = step.jumped.get(index, (0, 0))
    before, after = books.before, books.after
    if after.rollback_calls != before.rollback_calls:
        for kind in ROLLBACK_KINDS:
            calls = after.rollback_calls[kind] - before.rollback_calls[kind]
            tokens = after.rollback_tokens[kind] - before.rollback_tokens[kind]
            setattr(trace, f"rollback_{kind}_calls", calls)
            setattr(trace, f"rollback_{kind}_tokens", tokens)
    return trace
