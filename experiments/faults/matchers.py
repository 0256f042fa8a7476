"""Matchers that raise or lie, once or from some use on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch

from experiments.faults.cases import Case, Outcome, draw
from experiments.faults.compiles import SPECS, Compile, FaultyToy
from experiments.faults.drafts import among
from experiments.faults.scene import VICTIM, Scene, play
from harness.errors import MatcherError
from harness.grammar.matcher import CompiledGrammar, Matcher
from harness.grammar.spec import GrammarSpec
from tests.forwarding import ForwardingMatcher
from tests.strategies.letters import TABLE, ask
from tests.toys import random_law

Use = Literal["accept", "validate", "fill", "rollback", "fork", "forced_text", "forced_tokens"]
USES: tuple[Use, ...] = (
    *("accept", "validate", "fill", "rollback"),
    *("fork", "forced_text", "forced_tokens"),
)
ERRORS = (RuntimeError, MemoryError, KeyError, MatcherError, RecursionError, AssertionError)


@dataclass
class Plan:
    """When a matcher breaks, shared by all of its forks.

    Attributes:
        use: what breaks.
        left: sound uses before.
        once: only one use does.
        error: what is raised; None = it lies.
    """

    use: Use
    left: int
    once: bool
    error: type[Exception] | None

    def __str__(self) -> str:
        how = f"raises {self.error.__name__}" if self.error else "lies"
        return f"{self.use} {how} {'once' if self.once else 'for ever'} after {self.left} uses"

    def due(self, use: Use) -> bool:
        """Whether this use is broken.

        Raises:
            Exception: it is, and raises.
        """
        if use != self.use:
            return False
        self.left -= 1
        if self.left >= 0 or (self.once and self.left < -1):
            return False
        if self.error is not None:
            raise self.error("sabotage")
        return True


class Saboteur(ForwardingMatcher):
    """Does what ``inner`` does until it breaks."""

    def __init__(self, inner: Matcher, plan: Plan) -> None:
        super().__init__(inner)
        self.plan = plan

    def accept(self, tokens: Sequence[int]) -> bool:
        return not self.plan.due("accept") and self.inner.accept(tokens)

    def validate(self, tokens: Sequence[int]) -> int:
        return len(tokens) if self.plan.due("validate") else self.inner.validate(tokens)

    def rollback(self, n: int) -> None:
        if not self.plan.due("rollback"):
            self.inner.rollback(n)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        if self.plan.due("fill"):
            mask[row] = 0
        else:
            self.inner.fill(mask, row)

    def forced_text(self) -> str:
        return "tu" if self.plan.due("forced_text") else self.inner.forced_text()

    def forced_tokens(self) -> list[int]:
        return [0, 0] if self.plan.due("forced_tokens") else self.inner.forced_tokens()

    def fork(self) -> Matcher:
        if self.plan.due("fork"):
            return self  # no copy at all
        return Saboteur(self.inner.fork(), self.plan)


class Sabotaged(CompiledGrammar):
    """A grammar with such matchers."""

    def __init__(self, inner: CompiledGrammar, plan: Plan) -> None:
        self.inner, self.plan = inner, plan
        self.engine, self.memory_bytes = inner.engine, inner.memory_bytes

    def matcher(self) -> Matcher:
        return Saboteur(self.inner.matcher(), self.plan)


def run(case: Case) -> Outcome:
    """One victim, whose matcher breaks."""
    random = case.random()
    settings = draw(random, constrained=True)
    plan = _plan(random)
    laws: dict[str, Any] = {
        name: random_law(TABLE, random.getrandbits(32)) for name in ("target", "draft")
    }
    fault = str(plan)  # before it is used up

    def faulty(sound: Compile) -> Compile:
        def compile_(spec: GrammarSpec) -> CompiledGrammar:
            return Sabotaged(sound(spec), plan)

        return compile_

    toy = FaultyToy(
        TABLE,
        **laws,
        engine=settings.engine,
        sampling=settings.sampling,
        faulty=faulty,
        **settings.fields,
    )
    victim = ask(random.choice(SPECS), VICTIM, max_new_tokens=16)
    return play(case, Scene(settings, toy, among(random, victim), fault))[0]


def _plan(random: Random) -> Plan:
    return Plan(
        use=random.choice(USES),
        left=random.randint(0, 12),
        once=random.random() < 0.5,
        error=random.choice((None, *ERRORS)),
    )
