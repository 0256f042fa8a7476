"""The garbage collector works where no time counts, and works there."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from harness.core import Sequence
from harness.errors import MatcherError
from harness.garbage import Garbage
from harness.grammar.spec import GrammarSpec
from harness.loop import DecodeLoop
from harness.step import Step
from strategies.plain import Plain
from strategies.vllm import Vllm
from tests.test_run_ahead import DigitsBench
from tests.toys import Toy, Watch, random_law, request, toy_table

T = TypeVar("T")

TABLE = toy_table("pabc")
REQUESTS = [request(TABLE, GrammarSpec.regex("[abc]{8,20}"), f"r{at}") for at in range(12)]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The collector wants to begin at every few objects."""
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def frozen() -> Iterator[None]:
    """An earlier run of the process has kept its set-up out of the collector's sight."""
    gc.freeze()
    yield
    gc.unfreeze()


class Knot:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


class Careless(Vllm):
    """Leaves a knot at each step, after it has kept so many of them for a while."""

    name = "careless"
    knots: list[weakref.ref[Knot]]
    kept: deque[Knot]

    def before_step(self, step: Step) -> None:
        super().before_step(step)
        knot = Knot()
        self.kept.append(knot)
        self.knots.append(weakref.ref(knot))


def made(kept: int = 0) -> tuple[Careless, Watch, DecodeLoop]:
    toy = Toy(TABLE, random_law(TABLE, 1), random_law(TABLE, 2))
    strategy = Careless(Careless.Options(), toy.setup)
    strategy.knots, strategy.kept = [], deque(maxlen=kept)
    return strategy, *toy.loop(strategy)


@contextmanager
def at_each_collection(seen: Callable[[int], T]) -> Iterator[list[T]]:
    """What is seen as each collection begins meanwhile, by the oldest generation that it walks."""
    all_seen: list[T] = []

    def begun(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            all_seen.append(seen(info["generation"]))

    gc.callbacks.append(begun)
    try:
        yield all_seen
    finally:
        gc.callbacks.remove(begun)


def collections(loop: DecodeLoop) -> AbstractContextManager[list[str]]:
    """In which phase of the loop's time each collection begins meanwhile."""
    return at_each_collection(lambda _: "left" if loop.clock.left else loop.clock.phase)


def to_walk(oldest: int) -> int | None:
    """How many objects a collection walks that the loop has asked for."""
    if gc.isenabled():
        return None
    return sum(len(gc.get_objects(generation)) for generation in range(oldest + 1))


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


@pytest.mark.usefixtures("frozen")
def test_what_a_strategy_leaves_later_is_collected_after_the_run() -> None:
    """Also where something was kept out of the collector's sight before."""
    strategy, _, loop = made(kept=3)
    loop.run(REQUESTS)
    strategy.kept.clear()
    gc.collect()
    assert not [knot for knot in strategy.knots if knot() is not None]


def test_a_collection_walks_what_is_new_alone() -> None:
    loop = made()[2]
    with at_each_collection(to_walk) as walked:
        loop.run(REQUESTS)
    assert max(filter(None, walked)) < 20_000 < len(gc.get_objects())


def test_no_collection_begins_while_the_device_works_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has failed behind the launch of their next step."""
    bench = DigitsBench(tmp_path, requests=3)
    loop = bench.loop("plain")
    bench.decode(loop)
    advance, retire, left = Plain.advance, DecodeLoop._retire, []

    def refuse(self: Plain, step: Step, index: int, sequence: Sequence, matcher: Any) -> None:
        if sequence.request is bench.run.requests[1] and len(sequence.output_ids) > 2:
            raise MatcherError("broken on purpose")
        advance(self, step, index, sequence, matcher)

    def watched(self: DecodeLoop) -> None:
        left.append(self.clock.left and any(each.error for each in self.running))
        retire(self)

    monkeypatch.setattr(Plain, "advance", refuse)
    monkeypatch.setattr(DecodeLoop, "_retire", watched)
    with collections(loop) as phases:
        bench.decode(loop)
    assert left.count(True) == 1
    assert set(phases) == {""}


def test_who_steps_alone_keeps_the_collector_that_he_has() -> None:
    _, _, loop = made()
    loop.submit(REQUESTS)
    with collections(loop) as phases:
        while loop.advance():
            assert gc.isenabled()
    assert len(phases) > len(REQUESTS)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_put_back(enabled: bool) -> None:
    garbage, frozen = Garbage(), gc.get_freeze_count()
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
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()


def test_who_is_not_paused_collects_nothing() -> None:
    knot = weakref.ref(Knot())
    gc.disable()
    try:
        Garbage().collect()
        assert knot() is not None
    finally:
        gc.enable()
