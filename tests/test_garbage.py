"""The garbage collector works where no time counts, and works there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from harness.garbage import Garbage
from harness.grammar.spec import GrammarSpec
from harness.loop import DecodeLoop
from harness.step import Step
from strategies.vllm import Vllm
from tests.toys import Toy, Watch, random_law, request, toy_table

TABLE = toy_table("pabc")
REQUESTS = [request(TABLE, GrammarSpec.regex("[abc]{8,20}"), f"r{at}") for at in range(12)]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The collector wants to begin at every few objects; what was kept out of its sight stays."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(5, 1, 1)
    yield
    gc.set_threshold(*before)
    if not frozen:
        gc.unfreeze()


class Knot:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


class Careless(Vllm):
    """Leaves a knot at each step."""

    name = "careless"
    knots: list[weakref.ref[Knot]]

    def before_step(self, step: Step) -> None:
        super().before_step(step)
        self.knots.append(weakref.ref(Knot()))


def made() -> tuple[Careless, Watch, DecodeLoop]:
    toy = Toy(TABLE, random_law(TABLE, 1), random_law(TABLE, 2))
    strategy = Careless(Careless.Options(), toy.setup)
    strategy.knots = []
    return strategy, *toy.loop(strategy)


@contextmanager
def collections(loop: DecodeLoop) -> Iterator[list[str]]:
    """In which phase of the loop's time each collection begins meanwhile."""
    phases: list[str] = []

    def begun(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            phases.append(loop.clock.phase)

    gc.callbacks.append(begun)
    try:
        yield phases
    finally:
        gc.callbacks.remove(begun)


def test_no_collection_begins_where_time_counts() -> None:
    _, watch, loop = made()
    with collections(loop) as phases:
        loop.run(REQUESTS)
    assert len(watch.done) == len(REQUESTS)
    assert set(phases) == {""}


def test_what_a_strategy_leaves_is_collected_before_the_run_is_over() -> None:
    strategy, _, loop = made()
    loop.run(REQUESTS)
    assert len(strategy.knots) > 20
    assert not [knot for knot in strategy.knots if knot() is not None]


def test_a_collection_walks_what_is_new_alone() -> None:
    loop, walked = made()[2], []

    def begun(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and not gc.isenabled():
            walked.append(len(gc.get_objects()))

    gc.callbacks.append(begun)
    loop.run(REQUESTS)
    gc.callbacks.remove(begun)
    assert max(walked) < 20_000 < len(gc.get_objects())


def test_who_steps_alone_keeps_the_collector_that_he_has() -> None:
    _, _, loop = made()
    loop.submit(REQUESTS)
    with collections(loop) as phases:
        while loop.advance():
            assert gc.isenabled()
    assert len(phases) > len(REQUESTS)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_collector_is_put_back(enabled: bool, frozen: bool) -> None:
    if gc.get_freeze_count() and not frozen:
        pytest.skip("something before has frozen its objects")
    garbage = Garbage()
    if frozen:
        gc.freeze()
    if not enabled:
        gc.disable()
    try:
        with suppress(KeyError), garbage.paused():
            assert not gc.isenabled()
            with garbage.paused():
                garbage.collect()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
        assert (gc.get_freeze_count() > 0) == frozen
        before = gc.get_freeze_count()
        garbage.collect()  # does nothing any more
        assert gc.get_freeze_count() == before
    finally:
        gc.enable()
