"""The timeline of ``engine.profile``: what a viewer finds in it, and that it changes nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core import Request
from harness.grammar.spec import GrammarSpec
from harness.results.record import RunFolder
from harness.timeline import STEPS, TIMELINE, write_timeline
from tests.test_real_pair import run
from tests.tiny_pair import save_pair
from tests.toys import Toy, random_law, request, toy_table

Event = dict[str, Any]
TABLE = toy_table(["a", "b", "c", "ab"])
TOY = Toy(TABLE, random_law(TABLE, 1), random_law(TABLE, 2), draft_tokens=2, slots=2)


def spans(path: Path, name: str) -> list[Event]:
    """The spans of this name that the CPU's tracks show, in order of time."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [each for each in events if each["name"] == name and each["cat"] == "user_annotation"]
    return sorted(found, key=lambda each: float(each["ts"]))


def inside(inner: Event, outer: Event) -> bool:
    """µs; the trace is rounded to the nanosecond."""
    start, end = inner["ts"] - outer["ts"], inner["ts"] + inner["dur"] - outer["ts"] - outer["dur"]
    return bool(start > -0.01 and end < 0.01)


def requests(count: int) -> list[Request]:
    grammar = GrammarSpec.regex("[abc]{8,40}")
    return [request(TABLE, grammar, f"r{i}", max_new_tokens=30) for i in range(count)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / TIMELINE
    loops = [TOY.loop(TOY.strategy(name))[1] for name in ("vllm", "trtllm")]
    write_timeline(path, loops, requests(5))
    return path


@pytest.mark.parametrize("phase", ["draft", "verify", "grammar"])
def test_every_phase_lies_inside_a_step(trace: Path, phase: str) -> None:
    steps = spans(trace, "step")
    inner = spans(trace, phase)
    assert len(inner) >= len(steps) > 0
    assert all(any(inside(each, step) for step in steps) for each in inner)


def test_every_step_lies_inside_its_strategy_and_there_are_ten_of_each(trace: Path) -> None:
    steps = spans(trace, "step")
    for name in ("vllm", "trtllm"):
        (whole,) = spans(trace, name)
        assert sum(inside(step, whole) for step in steps) == STEPS == 10
    assert len(steps) == 2 * STEPS


def test_requests_that_end_early_make_a_short_timeline(tmp_path: Path) -> None:
    watch, loop = TOY.loop(TOY.strategy("plain"))
    write_timeline(tmp_path / TIMELINE, [loop], requests(1), steps=1000)
    assert 8 <= len(spans(tmp_path / TIMELINE, "step")) <= 31
    assert not watch.steps  # a repetition: nobody counts it


def test_the_spans_of_other_threads_are_there(tmp_path: Path) -> None:
    def fill() -> None:
        with loop.clock.span("elsewhere"):
            pass

    def law(tokens: tuple[int, ...]) -> SequenceOf[float]:
        helper.submit(fill).result()
        return TOY.target(tokens)

    with ThreadPoolExecutor(1) as helper:
        helper.submit(str).result()  # the thread is older than the profiler
        _, loop = replace(TOY, target=law).loop(TOY.strategy("plain"))
        write_timeline(tmp_path / TIMELINE, [loop], requests(1))
    found = spans(tmp_path / TIMELINE, "elsewhere")
    assert len(found) == len(spans(tmp_path / TIMELINE, "step")) > 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of a short run. The target drafts for itself: only the grammar refuses drafts."""
    target, _ = save_pair(tmp_path_factory.mktemp("pair"))
    short = "profile=smoke", "workload.limit=2", "workload.max_new_tokens=24"
    return f"pair.target={target}", f"pair.draft={target}", *short


@pytest.fixture(scope="module")
def runs(
    pair: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunFolder, RunFolder]:
    """The same run without and with a timeline."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = "+strategy=llamacpp", *pair
    return (
        run(folder / "without", *arguments),
        run(folder / "with", *arguments, "engine.profile=true"),
    )


def test_a_profiled_run_has_a_timeline_and_a_plain_one_has_none(
    runs: tuple[RunFolder, RunFolder],
) -> None:
    plain, profiled = runs
    assert not (plain.path / TIMELINE).exists()
    steps = spans(profiled.path / TIMELINE, "step")
    assert steps
    for phase in ("draft", "verify", "grammar"):
        assert any(
            inside(each, step) for each in spans(profiled.path / TIMELINE, phase) for step in steps
        )


def test_the_timeline_changes_no_result(runs: tuple[RunFolder, RunFolder]) -> None:
    plain, profiled = runs
    assert not profiled.requests().error.any()
    for table in (RunFolder.steps, RunFolder.requests):
        counted = [name for name in table(plain) if not str(name).endswith(("_us", "_ms"))]
        assert table(plain)[counted].equals(table(profiled)[counted])
    own = [each.strategies()["llamacpp"]["own"] for each in runs]
    assert own[0] == own[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_kernels_of_the_captured_graphs_are_in_the_timeline(
    pair: tuple[str, ...], tmp_path: Path
) -> None:
    profiled = run(tmp_path, *pair, "pair.device=cuda", "engine.profile=true")
    events = json.loads(gzip.decompress((profiled.path / TIMELINE).read_bytes()))["traceEvents"]
    assert len([each for each in events if each.get("cat") == "kernel"]) > 1000
