"""Compilations that raise, hang, or take their time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from experiments.faults.cases import Case, Outcome, draw
from experiments.faults.drafts import among
from experiments.faults.scene import VICTIM, Scene, play
from harness.errors import GrammarError
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, Matcher
from harness.grammar.service import GrammarConfig
from harness.grammar.spec import GrammarSpec
from tests.strategies.letters import TABLE, ask
from tests.toys import Toy, random_law

SPECS = (GrammarSpec.regex("a[bcd]{6,9}e"), GrammarSpec.choice(["abcdex", "abcdey"]))
"""What only victims ask for."""

TIMEOUT_S = 1.0

ERRORS: tuple[type[BaseException], ...] = (
    *(GrammarError, KeyError, MemoryError, RecursionError, OSError, AssertionError),
    *(SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit),
)

Compile = Callable[[GrammarSpec], CompiledGrammar]


class Stillborn(CompiledGrammar):
    """A grammar that has no matchers."""

    engine, memory_bytes = "stillborn", 0

    def matcher(self) -> Matcher:
        raise RuntimeError("no matcher")


@dataclass
class FaultyToy(Toy):
    """A toy whose engine compiles the victims' grammars in another way.

    Attributes:
        faulty: makes that of the engine's own.
    """

    faulty: Callable[[Compile], Compile] = lambda sound: sound

    def grammar_engine(self) -> GrammarEngine:
        engine = super().grammar_engine()
        sound = engine.compile
        other = self.faulty(sound)
        engine.compile = (  # type: ignore[method-assign]
            lambda spec: (other if spec in SPECS else sound)(spec)
        )
        return engine


def run(case: Case) -> Outcome:
    """One victim, or several that ask for the same grammar or for two."""
    random = case.random()
    settings = draw(random, constrained=True)
    fault, faulty = _fault(random)
    limits = GrammarConfig(
        timeout_s=TIMEOUT_S,
        ahead=random.random() < 0.5,
        threads=random.choice((1, 2)),
        retry_s=random.choice((0.0, 600.0)),
    )
    toy = FaultyToy(
        TABLE,
        random_law(TABLE, random.getrandbits(32)),
        random_law(TABLE, random.getrandbits(32)),
        engine=settings.engine,
        sampling=settings.sampling,
        grammar=limits,
        faulty=faulty,
        **settings.fields,
    )
    victims = [
        ask(random.choice(SPECS), f"{VICTIM}{number}", max_new_tokens=16)
        for number in range(random.randint(1, 3))
    ]
    return play(case, Scene(settings, toy, among(random, *victims), fault))[0]


def _fault(random: Random) -> tuple[str, Callable[[Compile], Compile]]:
    """What goes wrong, in words and in deed."""
    error = random.choice(ERRORS)
    late = random.random() < 0.5

    def raising(_: Compile) -> Compile:
        def compile_(_: GrammarSpec) -> CompiledGrammar:
            raise error("sabotage")

        return compile_

    def waiting(seconds: float) -> Callable[[Compile], Compile]:
        def faulty(sound: Compile) -> Compile:
            def compile_(spec: GrammarSpec) -> CompiledGrammar:
                time.sleep(seconds)
                return raising(sound)(spec) if late else sound(spec)

            return compile_

        return faulty

    end = f"and then {error.__name__}" if late else "and then sound"
    faults = {
        f"{error.__name__} while compiling": raising,
        f"a compilation that hangs {end}": waiting(2 * TIMEOUT_S),
        f"a slow compilation {end}": waiting(0.1 * TIMEOUT_S),
        "a grammar without matchers": lambda _: lambda _: Stillborn(),
    }
    return random.choices(list(faults.items()), weights=(6, 2, 2, 1))[0]
