"""Drafters over static shapes: the tokens of ``plain``, chains by length, and running ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import StepTrace
from harness.drafters.config import DrafterConfig
from harness.models.graphs import StaticLM
from tests.bench import Bench

COSTS = {"draft_ms": 0.02, "verify_ms": 1.0, "row_ms": 0.0}
ADAPTIVE = DrafterConfig(length="adaptive", **COSTS)  # type: ignore[arg-type]
"""So cheap that drafts pay though a random model's are seldom right."""
DRAFTERS = {
    "ngram": DrafterConfig("ngram", min_n=1),
    "grammar": DrafterConfig("grammar"),
    "chain": DrafterConfig("chain", min_n=1),
    "random": DrafterConfig("random"),
    "p_min": DrafterConfig(length="p_min", p_min=0.3),
    "adaptive": ADAPTIVE,
}


def bench(folder: Path, drafter: DrafterConfig) -> Bench:
    items: list[dict[str, object]] = [
        {"id": f"{i}", "prompt": f"Item {i}?", "regex": f"[0-9]{{{2 + 2 * i},30}} times (ab)+"}
        for i in range(4)
    ]
    return Bench(folder, items, max_new_tokens=16, slots=2, drafter=drafter)


def decode(made: Bench, strategy: str) -> tuple[dict[str, list[int]], list[StepTrace]]:
    """Outputs by request, and the decode steps."""
    made.recorder.steps.clear()
    made.recorder.requests.clear()
    made.loop(strategy).run(made.run.requests)
    assert not any(trace.error for trace in made.recorder.requests)
    outputs = {trace.request: trace.output_ids for trace in made.recorder.requests}
    return outputs, [step for step in made.recorder.steps if not step.prefill]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_static_outputs_are_those_of_plain(tmp_path: Path, drafter: str) -> None:
    made = bench(tmp_path, DRAFTERS[drafter])
    plain, _ = decode(made, "plain")
    for strategy in ("vllm", "llamacpp", "deepinfer"):
        outputs, steps = decode(made, strategy)
        assert outputs == plain
        assert sum(step.drafted_raw for step in steps) > 0


def test_a_chain_is_captured_for_each_length_and_no_longer_than_asked(tmp_path: Path) -> None:
    made = bench(tmp_path, ADAPTIVE)
    _, steps = decode(made, "vllm")
    lengths = {step.draft_forwards for step in steps}
    assert len(lengths - {0}) > 1
    draft = made.run.draft_model
    assert isinstance(draft, StaticLM)
    assert {k for _, k in draft._chains} == lengths - {0}


@pytest.mark.parametrize("strategy", ["vllm", "trtllm"])
def test_what_is_run_ahead_has_the_length_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The length is decided before the launch, and stays what it was until the drafts are made."""
    hits: list[bool] = []
    launch = StaticLM._launch

    def spy(model: StaticLM, station: object, inputs: object) -> None:
        if model._expected is not None:
            hits.append(model._expected == (station, inputs))
        launch(model, station, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(StaticLM, "_launch", spy)
    decode(bench(tmp_path, ADAPTIVE), strategy)
    assert len(hits) > 3
    assert all(hits)


def test_each_strategy_has_a_drafter_that_has_seen_no_other(tmp_path: Path) -> None:
    """Else what one learns would depend on the order of the turns."""
    made = bench(tmp_path, ADAPTIVE)
    _, alone = decode(made, "deepinfer")
    again = bench(tmp_path / "again", ADAPTIVE)
    decode(again, "vllm")
    _, behind = decode(again, "deepinfer")
    assert [step.drafted_raw for step in alone] == [step.drafted_raw for step in behind]
