"""Letters for tokens, and models that have a second and third choice where the first is illegal."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
import torch

from harness.clock import Clock
from harness.core import Request, StepTrace, Verdict
from harness.grammar.masks import MaskBuffer
from harness.grammar.matcher import Matcher
from harness.grammar.service import grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.step import Step
from tests.toys import Law, Toy, Watch, ids, random_law, request, toy_table

TABLE = toy_table("pabcdexyzqtu")
"""``p`` is the prompt of every request; EOS, written ``$``, comes last."""

WORDS = GrammarSpec.choice(["abcd", "abce"])
"""The language of the worked examples."""


def spell(text: str) -> list[int]:
    """Token ids of letters."""
    return ids(TABLE, *text)


def letters(tokens: SequenceOf[int]) -> str:
    """Token ids as letters."""
    return "".join(
        "$" if token == TABLE.eos_id else TABLE.tokens[token].decode() for token in tokens
    )


def writes(*rankings: str) -> Law:
    """A model that wants the letters of ``rankings[n]``, best first, as its n-th output token.

    Behind the last ranking it wants EOS. All other tokens follow in the order of their ids.
    """

    def law(tokens: tuple[int, ...]) -> list[float]:
        position = len(tokens) - 1  # the prompt is one token
        wanted = spell(rankings[position] if position < len(rankings) else "$")
        scores = [-100.0 - token for token in range(len(TABLE))]
        for rank, token in enumerate(wanted):
            scores[token] = -float(rank)
        return scores

    return law


def toy(target: SequenceOf[str], draft: SequenceOf[str], engine: str, **fields: Any) -> Toy:
    """A target and a draft model that write these letters."""
    return Toy(TABLE, writes(*target), writes(*draft), engine=engine, **fields)


def ask(grammar: GrammarSpec | None = WORDS, name: str = "r", **fields: Any) -> Request:
    """A request over these letters."""
    return request(TABLE, grammar, name, **fields)


def steps_of(watch: Watch, name: str = "r") -> list[StepTrace]:
    """The verify steps of a request, without its prefill."""
    return [trace for trace in watch.steps if trace.request == name and not trace.prefill]


def tracked(engine: str, grammar: GrammarSpec = WORDS, text: str = "") -> TrackedMatcher:
    """A matcher of a real engine that has accepted ``text``."""
    compiled = grammar_engine(engine, TABLE).compile(grammar)
    matcher = TrackedMatcher(compiled.matcher(), Clock())
    assert matcher.accept(spell(text))
    return matcher


def allowed(matcher: TrackedMatcher | Matcher) -> str:
    """The letters that may follow, in the order of their ids; ``$`` last."""
    mask = torch.zeros(1, 1, dtype=torch.int32)
    matcher.fill(mask, 0)
    return letters([token for token in range(len(TABLE)) if int(mask[0, 0]) >> token & 1])


def judge(step: Step, emitted: SequenceOf[int]) -> None:
    """Let the step emit these tokens, the last one the target's own."""
    step.verdicts = [Verdict(list(emitted), list(range(len(emitted) - 1)))]
    step.kept = [list(emitted)]


def flags(masks: MaskBuffer, rows: int) -> str:
    """The flags of the first sequence's rows, as the specification writes them."""
    return "".join(str(int(masks.flagged(0, position))) for position in range(rows))


REGEXES = ("(ab|ac)*d", "a[bc]{2,5}(d|ee)", "[abcd]{0,6}", "x?(y|z[ab]+)q", "abcdeabcde")


def beside_plain(engine: str, seed: int, strategy: str, **options: Any) -> tuple[Watch, Watch]:
    """Several regexes decoded by a strategy whose drafts are arbitrary, and by plain.

    Two slots, so that requests wait and follow each other.
    """
    jig = Toy(TABLE, random_law(TABLE, seed), random_law(TABLE, seed + 50), engine, slots=2)
    requests = [ask(GrammarSpec.regex(text), f"r{i}") for i, text in enumerate(REGEXES)]
    watch = jig.run(jig.strategy(strategy, **options), requests)
    assert not watch.errors
    return watch, jig.run("plain", requests)


def forbid_fills_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    """Asking a terminated matcher for a mask fails from here on (Q10)."""
    fill = TrackedMatcher.fill

    def strict(self: TrackedMatcher, mask: torch.Tensor, row: int) -> None:
        assert not self.terminated
        fill(self, mask, row)

    patch.setattr(TrackedMatcher, "fill", strict)


def break_fills_before(patch: pytest.MonkeyPatch, letter: str) -> None:
    """The grammar engine breaks from here on where ``letter`` may follow."""
    fill = TrackedMatcher.fill

    def broken(self: TrackedMatcher, mask: torch.Tensor, row: int) -> None:
        if self.inner.validate(spell(letter)):
            raise RuntimeError("engine lost")
        fill(self, mask, row)

    patch.setattr(TrackedMatcher, "fill", broken)


def assert_a_broken_grammar_fails_alone(
    strategy: str, engine: str, patch: pytest.MonkeyPatch
) -> None:
    """One request's grammar engine breaks in mid-output; the request beside it goes on."""
    break_fills_before(patch, "z")
    model = ["a", "b", "c", "d", "$"]
    watch = toy(model, model, engine).run(
        strategy, [ask(GrammarSpec.choice(["abz"]), "broken"), ask(name="fine")]
    )
    assert list(watch.errors) == ["broken"]
    assert "engine lost" in watch.errors["broken"]
    assert letters(watch.outputs["fine"]) == "abcd$"
