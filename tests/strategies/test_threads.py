"""Grammar work on several threads changes no output and no account."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

import strategies
from harness.grammar.spec import GrammarSpec
from tests.strategies.letters import REGEXES, TABLE, ask
from tests.toys import ENGINES, Toy, Watch, random_law

TIMES = ("draft_us", "verify_us", "grammar_us", "exposed_us", "host_us", "fill_us")


def accounts(watch: Watch) -> list[dict[str, Any]]:
    """The traces without their times; of the fills, how many."""
    rows = [asdict(trace) for trace in watch.steps]
    return [
        {name: value for name, value in row.items() if name not in TIMES}
        | {"fills": len(row["fill_us"])}
        for row in rows
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", strategies.registry())
def test_several_threads_do_what_one_does(strategy: str, engine: str) -> None:
    watches = []
    for threads in (1, 4):
        laws = random_law(TABLE, 3), random_law(TABLE, 53)
        toy = Toy(TABLE, *laws, engine, slots=8, grammar_threads=threads)
        requests = [
            ask(GrammarSpec.regex(regex), f"{regex} {seed}", seed=seed)
            for regex in REGEXES
            for seed in range(3)
        ]
        watches.append(toy.run(strategy, requests))
    one, several = watches
    assert not one.errors
    assert len(one.outputs) == 15
    assert several.outputs == one.outputs
    assert accounts(several) == accounts(one)
