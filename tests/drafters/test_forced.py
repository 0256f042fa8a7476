"""Forced text as drafts, on a matcher that nobody sees move."""

from __future__ import annotations

import pytest

from harness.clock import Clock
from harness.core import Sequence
from harness.drafters.forced import ForcedDrafter, caught_up
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from tests.drafters.makers import running, with_drafter
from tests.strategies.letters import steps_of
from tests.toys import ENGINES, Toy, ToyCodec, ids, random_law, request, toy_table

TABLE = toy_table(["a", "b", "c", "abc", "d"])
GRAMMAR = GrammarSpec.regex("d(abc)+d|aabcd")

engines = pytest.mark.parametrize("engine", ENGINES)


def constrained(engine: str, output: list[int], held: int | None = None) -> Sequence:
    """A sequence whose matcher holds the first ``held`` tokens of its output; None = all."""
    toy = Toy(TABLE, random_law(TABLE, 0), random_law(TABLE, 0), engine=engine)
    sequence = running(TABLE, output)
    matcher = toy.grammar_engine().compile(GRAMMAR).matcher()
    sequence.matcher = TrackedMatcher(matcher, Clock())
    assert sequence.matcher.accept(output[:held])
    return sequence


def drafts(sequence: Sequence, k: int = 4) -> list[int]:
    (proposal,) = ForcedDrafter(k, ToyCodec(TABLE)).free([sequence])
    assert proposal.q is None
    assert proposal.draft_forwards == 0
    return proposal.tokens


@engines
def test_forced_text_is_drafted_as_the_tokenizer_writes_it(engine: str) -> None:
    """S1d: ``a`` could come first too, so no row behind ``d`` has a single legal token."""
    assert drafts(constrained(engine, ids(TABLE, "d"))) == ids(TABLE, "abc")
    assert drafts(constrained(engine, ids(TABLE, "a"))) == ids(TABLE, "abc", "d")
    assert drafts(constrained(engine, ids(TABLE, "a")), k=1) == ids(TABLE, "abc")


@engines
def test_where_a_choice_begins_nothing_is_drafted(engine: str) -> None:
    assert drafts(constrained(engine, [])) == []
    assert drafts(constrained(engine, ids(TABLE, "d", "abc"))) == []
    assert drafts(running(TABLE, [])) == []  # free text


@engines
@pytest.mark.parametrize("held", [0, 1, None])
def test_the_matcher_and_its_ledger_stay_as_they_are(engine: str, held: int | None) -> None:
    """D12: a matcher that is fed late is looked past on a fork."""
    sequence = constrained(engine, ids(TABLE, "d", "a"), held)
    matcher = sequence.matcher
    assert matcher is not None
    before = matcher.ledger.copy()
    assert drafts(sequence) == ids(TABLE, "b", "c")
    assert matcher.ledger == before
    assert matcher.held == before.held


@engines
def test_a_fork_has_a_balanced_ledger_of_its_own(engine: str) -> None:
    sequence = constrained(engine, ids(TABLE, "d", "a"), held=1)
    assert sequence.matcher is not None
    fork = caught_up(sequence.matcher, sequence.output_ids)
    assert fork is not sequence.matcher
    assert (fork.ledger.held, fork.held, sequence.matcher.held) == (2, 2, 1)


def test_an_engine_that_breaks_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: TrackedMatcher) -> str:
        raise RuntimeError("engine lost")

    monkeypatch.setattr(TrackedMatcher, "forced_text", lost)
    broken = constrained("xgrammar", ids(TABLE, "d"))
    assert drafts(broken) == []
    assert broken.error is not None
    assert "engine lost" in broken.error


def test_text_that_spells_a_special_token_is_no_draft() -> None:
    class Special(ToyCodec):
        def encode(self, text: str) -> list[int]:
            return [self.table.eos_id, *super().encode(text)]

    sequence = constrained("xgrammar", ids(TABLE, "d"))
    assert ForcedDrafter(4, Special(TABLE)).forced(sequence, 4) == []


@engines
def test_what_is_forced_is_accepted_without_a_forward(engine: str) -> None:
    """The model wants the tokenizer's spelling."""
    wants = ids(TABLE, "a", "abc", "d", "$")

    def law(tokens: tuple[int, ...]) -> list[float]:
        wanted = wants[len(tokens) - 1] if len(tokens) <= len(wants) else wants[-1]
        return [float(token == wanted) for token in range(len(TABLE))]

    toy = with_drafter(Toy(TABLE, law, law, engine=engine), name="grammar")
    watch = toy.run("vllm", [request(TABLE, GRAMMAR)])
    (step,) = steps_of(watch)
    assert (step.drafted, step.accepted, step.emitted, step.draft_forwards) == (2, 2, 3, 0)
