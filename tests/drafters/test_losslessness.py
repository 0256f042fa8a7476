"""Every strategy with every drafter that can serve it: the outputs of ``plain``, balanced books."""

from __future__ import annotations

from typing import Any

import pytest

import strategies
from harness.drafters.config import DrafterConfig
from harness.grammar.spec import GrammarSpec
from harness.results.metrics import check_identities, compare_with_plain, summarise
from harness.results.record import Recorder
from tests.drafters.makers import with_drafter
from tests.strategies.letters import TABLE as LETTERS
from tests.strategies.test_late_start import STARTS, late, ranked
from tests.strategies.test_properties import CASES
from tests.toys import ENGINES, Toy, Watch, random_law, request, toy_table

TABLE = toy_table(["a", "b", "c", "ab", "bc", "abc", "d"])
PATTERNS = ["(ab|c)*d", "abc(abd)?abcabc", "[abcd]{2,9}", "(abc){3,5}d?", "a(b|bc){1,4}"]
REQUESTS = [
    *(request(TABLE, GrammarSpec.regex(p), p, seed=i) for i, p in enumerate(PATTERNS)),
    request(TABLE, None, "free", max_new_tokens=9),
]

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram", "min_n": 1},
    "grammar": {"name": "grammar"},
    "chain": {"name": "chain", "min_n": 1},
    "oracle": {"name": "oracle", "rate": 0.7},
    "random": {"name": "random"},
    "model, p_min": {"length": "p_min", "p_min": 0.4},
    "model, adaptive": {"length": "adaptive"},
    "chain, adaptive": {"name": "chain", "min_n": 1, "length": "adaptive"},
}


def served() -> list[tuple[str, str]]:
    """Cases of strategies and drafters that go together."""
    pairs = []
    for case, (name, options) in CASES.items():
        strategy = strategies.find(name)
        needs = strategy.needs_logits(strategy.Options(**options))
        for drafter, fields in DRAFTERS.items():
            reference = "r" if drafter == "oracle" else None
            if DrafterConfig(**fields, reference=reference).has_logits or not needs:
                pairs.append((case, drafter))
    return [(case, drafter) for case, drafter in pairs if case != "plain"]


def identities_hold(watch: Watch, strategy: str) -> None:
    recorder = Recorder()
    recorder.steps, recorder.requests = watch.steps, watch.request_traces(strategy)
    steps, requests = recorder.frames()
    check_identities(summarise(steps, compare_with_plain(requests)), steps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("case", "drafter"), served())
def test_greedy_outputs_are_those_of_plain(case: str, drafter: str, engine: str) -> None:
    """Property 2; ``paranoid`` replays every matcher, and the loop checks every ledger."""
    name, options = CASES[case]
    toy = Toy(TABLE, random_law(TABLE, 3), random_law(TABLE, 4), engine, slots=2, paranoid=True)
    plain = toy.run("plain", REQUESTS)
    jig = with_drafter(toy, plain.outputs, **DRAFTERS[drafter])
    watch = jig.run(jig.strategy(name, **options), REQUESTS)
    assert not watch.errors
    if name != "sglang" or not options.get("jump_forward", True):  # a jump may re-encode
        assert watch.outputs == plain.outputs
    identities_hold(watch, name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("drafter", ["grammar", "chain", "random", "model, adaptive"])
def test_a_grammar_may_start_late_under_any_drafter(drafter: str, start: str, engine: str) -> None:
    """V1.5, S4, L20, D6: forced text only behind the start, also where a matcher lags (D12)."""
    for strategy in ("vllm", "deepinfer"):
        toy = Toy(LETTERS, ranked("xyxytuabac"), ranked("xyxytuabad"), engine, paranoid=True)
        jig = with_drafter(toy, **DRAFTERS[drafter])
        requests = [late(start), late(start, "other", max_new_tokens=7)]
        watch, plain = jig.run(strategy, requests), toy.run("plain", requests)
        assert watch.errors == plain.errors
        assert watch.outputs == plain.outputs


@pytest.mark.parametrize("drafter", ["ngram", "grammar", "random", "oracle"])
def test_a_drafter_without_a_model_costs_no_forward(drafter: str) -> None:
    toy = Toy(TABLE, random_law(TABLE, 3), random_law(TABLE, 4))
    jig = with_drafter(toy, toy.run("plain", REQUESTS).outputs, **DRAFTERS[drafter])
    watch = jig.run("vllm", REQUESTS)
    assert sum(step.draft_forwards for step in watch.steps) == 0
    assert sum(step.drafted_raw for step in watch.steps) > 0


def test_a_perfect_oracle_loses_no_draft() -> None:
    toy = Toy(TABLE, random_law(TABLE, 3), random_law(TABLE, 4))
    jig = with_drafter(toy, toy.run("plain", REQUESTS).outputs, name="oracle", rate=1.0)
    for strategy in ("vllm", "llamacpp", "deepinfer"):
        watch = jig.run(strategy, REQUESTS)
        assert all(step.accepted == step.drafted == step.drafted_raw for step in watch.steps)
