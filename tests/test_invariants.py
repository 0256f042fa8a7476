"""What is checked behind every step, and what ``engine.paranoid`` adds to it."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest

import strategies
from harness.core import Sequence, StepTrace
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.invariants import Invariants
from harness.step import Step
from strategies.base import NoOptions
from strategies.plain import Plain
from tests.strategies.letters import REGEXES, TABLE, ask, letters, spell, toy
from tests.toys import ENGINES, Toy, Watch, random_law

COUNTS = [each.name for each in fields(StepTrace) if not each.name.endswith("_us")]


def decode(strategy: str, text: str, engine: str = "xgrammar", paranoid: bool = True) -> Watch:
    """A regex beside a request that has none, with models of no sense."""
    laws = random_law(TABLE, 1), random_law(TABLE, 2)
    requests = [ask(GrammarSpec.regex(text)), ask(None, "free", max_new_tokens=8)]
    return Toy(TABLE, *laws, engine, paranoid=paranoid).run(strategy, requests)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", strategies.registry())
def test_paranoia_changes_no_output_and_no_count(strategy: str, engine: str) -> None:
    for text in (*REGEXES, "((a|b)(c|d)(x|y)){4}"):
        calm, paranoid = (decode(strategy, text, engine, paranoid) for paranoid in (False, True))
        assert paranoid.outputs == calm.outputs
        assert not paranoid.errors
        for one, other in zip(calm.steps, paranoid.steps, strict=True):
            for name in COUNTS:
                assert repr(getattr(one, name)) == repr(getattr(other, name)), name


class RollsBackUnbooked(Plain):
    """Moves a matcher behind the ledger's back, in its third step."""

    def advance(self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher) -> None:
        super().advance(step, index, sequence, matcher)
        if sequence.steps == 2:
            matcher.inner.rollback(1)


class ForgetsTheLastToken(Plain):
    """Does not tell the matcher what was emitted, in its third step."""

    def advance(self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher) -> None:
        if sequence.steps != 2:
            super().advance(step, index, sequence, matcher)


class FeedsAnother(Plain):
    """Tells the matcher of a b, whatever was emitted, in its third step."""

    def advance(self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher) -> None:
        assert matcher.accept(spell("b") if sequence.steps == 2 else step.kept[index])


class MasksNothing(FeedsAnother):
    """Lets the model write what it wants, in its third step."""

    def apply_masks(self, step: Step, logits: Any) -> None:
        if step.sequences[0].steps != 2:
            super().apply_masks(step, logits)


BREACHES: dict[str, tuple[type[Plain], bool]] = {
    "ledger balance": (RollsBackUnbooked, False),
    "matcher position": (ForgetsTheLastToken, False),
    "replayed mask": (FeedsAnother, True),
    "replay": (MasksNothing, True),
}


@pytest.mark.parametrize("invariant", BREACHES)
def test_a_broken_invariant_fails_its_request_by_name_and_step(invariant: str) -> None:
    strategy, paranoid = BREACHES[invariant]
    jig = toy(["a", "b", "zc", "d", "d", "d"], [], "xgrammar", paranoid=paranoid)
    watch = jig.run(
        strategy(NoOptions(), jig.setup),
        [ask(GrammarSpec.regex("ab(cd*|be*)")), ask(None, "free", max_new_tokens=8)],
    )
    assert list(watch.errors) == ["r"]
    assert f"invariant '{invariant}' is broken in step 2: " in watch.errors["r"]
    assert letters(watch.outputs["r"]) == ("abz" if strategy is MasksNothing else "abc")


def test_replaying_is_nobodys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, calls = Invariants._replay, []

    def slow(*arguments: Any) -> None:
        calls.append(time.sleep(0.05))
        replay(*arguments)

    monkeypatch.setattr(Invariants, "_replay", slow)
    watch = decode("vllm", "a[bc]{4}d")
    assert calls
    assert sum(each.host_us + each.grammar_us for each in watch.steps) < 50_000 * len(calls)
