"""What the loop launches ahead of the next step, and what it must not cost or change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import pytest

import strategies
from harness.errors import MatcherError
from harness.grammar.tracked import TrackedMatcher
from harness.loop import DecodeLoop
from harness.models.graphs import StaticLM
from harness.parallel.agreement import Agreement
from harness.static_logits import Mailbox
from strategies.plain import Plain
from tests.bench import Bench

SLOTS = 4
PAUSE_S = 0.02
FREE = [name for name in strategies.registry() if name != "sglang"]


class DigitsBench(Bench):
    """Requests that end at different times."""

    def __init__(self, folder: Path, requests: int, **options: object) -> None:
        items: list[dict[str, object]] = [
            {"id": f"{i}", "prompt": f"Item {i}?", "regex": f"[0-9]{{{2 + 2 * i},30}}"}
            for i in range(requests)
        ]
        super().__init__(folder, items, max_new_tokens=16, slots=SLOTS, **options)  # type: ignore[arg-type]

    def decode(self, loop: DecodeLoop) -> None:
        self.recorder.steps.clear()
        self.recorder.requests.clear()
        loop.run(self.run.requests)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts launches ahead, and whether the next call was the one that was expected."""
    counts: Counter[str] = Counter()
    launch, run_ahead = StaticLM._launch, StaticLM.run_ahead

    def spy(model: StaticLM, station: object, inputs: object) -> None:
        if model._expected is not None:
            counts["hit" if model._expected == (station, inputs) else "miss"] += 1
        launch(model, station, inputs)  # type: ignore[arg-type]

    def ahead(model: StaticLM, inputs: object, k: int = 0) -> bool:
        launched = run_ahead(model, inputs, k)  # type: ignore[arg-type]
        counts["ahead"] += launched
        return launched

    monkeypatch.setattr(StaticLM, "_launch", spy)
    monkeypatch.setattr(StaticLM, "run_ahead", ahead)
    return counts


@pytest.mark.parametrize("strategy", FREE)
def test_all_that_is_run_ahead_is_what_comes_next(
    tmp_path: Path, expected: Counter[str], strategy: str
) -> None:
    """Also where requests end, wait and are admitted in between."""
    bench = DigitsBench(tmp_path, requests=2 * SLOTS)
    for loop in (bench.loop("trtllm"), bench.loop(strategy)):  # another way of drafting before
        expected.clear()
        bench.decode(loop)
    assert expected["miss"] == 0
    assert expected["hit"] == expected["ahead"]
    ticks = {trace.tick for trace in bench.recorder.steps if not trace.prefill}
    assert expected["hit"] > len(ticks) / 3


def test_nothing_is_run_ahead_of_a_jump(tmp_path: Path, expected: Counter[str]) -> None:
    bench = DigitsBench(tmp_path, requests=2, sglang={"jump_forward": True})
    bench.decode(bench.loop("sglang"))
    assert expected["ahead"] == 0


def test_nothing_is_run_ahead_of_checks_that_are_not_timed(
    tmp_path: Path, expected: Counter[str]
) -> None:
    bench = DigitsBench(tmp_path, requests=2)
    loop = bench.loop("vllm")
    loop.config = replace(loop.config, paranoid=True)
    bench.decode(loop)
    assert expected["ahead"] == 0


def test_the_accounting_asks_a_grammar_only_while_the_device_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is dropped, and must not hide a forward's."""
    bench = DigitsBench(tmp_path, requests=2)
    loop = bench.loop("llamacpp")
    bench.decode(loop)
    events: list[str] = []
    for owner, name in ((StaticLM, "_launch"), (Mailbox, "read"), (TrackedMatcher, "audit")):
        inner = getattr(owner, name)

        def seen(*given: object, _inner: Any = inner, _name: str = name) -> object:
            events.append(_name)
            return _inner(*given)

        monkeypatch.setattr(owner, name, seen)
    bench.decode(loop)
    before = [earlier for earlier, event in pairwise(events) if event == "audit"]
    assert set(before) == {"read", "audit"}


def test_a_request_that_fails_behind_a_launch_takes_no_other_along(
    tmp_path: Path, expected: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DigitsBench(tmp_path, requests=3)
    loop = bench.loop("vllm")
    bench.decode(loop)
    alone = {trace.request: trace.output_ids for trace in bench.recorder.requests}

    accept = TrackedMatcher.accept
    victim = bench.run.requests[1].id

    def refuse(matcher: TrackedMatcher, tokens: list[int]) -> bool:
        (of,) = [each for each in loop.running if each.matcher is matcher]
        if of.request.id == victim and len(of.output_ids) > 4 and len(tokens) > 0:
            raise MatcherError("broken on purpose")
        return accept(matcher, tokens)

    monkeypatch.setattr(TrackedMatcher, "accept", refuse)
    bench.decode(loop)
    assert expected["miss"] == 1  # the failed one was launched in vain, with the others
    for trace in bench.recorder.requests:
        if trace.request == victim:
            assert "broken on purpose" in trace.error
        else:
            assert trace.output_ids == alone[trace.request]


@pytest.mark.parametrize("owner", [DecodeLoop, Agreement])
@pytest.mark.parametrize("strategy", ["plain", "vllm"])
def test_what_passes_behind_a_launch_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, owner: type
) -> None:
    """The device is at work on what runs ahead, so none of its time may be left out."""
    bench = DigitsBench(tmp_path, requests=SLOTS)
    loop = bench.loop(strategy)
    bench.decode(loop)
    name = {DecodeLoop: "_retire", Agreement: "check"}[owner]
    inner = getattr(owner, name)

    def dawdle(*given: object) -> None:
        sleep(PAUSE_S)
        inner(*given)

    monkeypatch.setattr(owner, name, dawdle)
    bench.decode(loop)
    third_step = [trace for trace in bench.recorder.steps if trace.step == 2]
    assert len(third_step) == SLOTS
    for trace in third_step:
        spent_us = trace.draft_us + trace.verify_us + trace.grammar_us + trace.host_us
        assert spent_us * SLOTS > PAUSE_S * 1e6


def test_nothing_is_paid_for_behind_a_step_in_which_all_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Counter[str]
) -> None:
    """What the next strategy waits for is not its own work."""
    bench = DigitsBench(tmp_path, requests=1)
    loop, other = bench.loop("plain"), bench.loop("vllm")
    bench.decode(loop)
    bench.decode(other)
    expected.clear()

    def refuse(*_: object) -> bool:
        raise MatcherError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Plain, "advance", refuse)
        bench.decode(loop)
    assert bench.recorder.requests[0].error
    assert expected["ahead"] == 1
    sleep(pause_s := 1)  # far more than this step takes
    bench.decode(other)
    (first,) = [trace for trace in bench.recorder.steps if trace.step == 0]
    spent_us = first.draft_us + first.verify_us + first.grammar_us + first.host_us
    assert spent_us < pause_s * 1e6


def test_the_traces_of_a_step_outlive_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DigitsBench(tmp_path, requests=2)
    loop = bench.loop("plain")
    propose, calls = DecodeLoop._propose, iter(range(100))

    def interrupt(*args: object) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        propose(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeLoop, "_propose", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.decode(loop)
    assert {trace.tick for trace in bench.recorder.steps} == {0, 1, 2}
