"""Known outputs, right as often as asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import RequestTrace
from harness.drafters.config import DrafterConfig
from harness.drafters.oracle import OracleDrafter, check_references, references_of
from harness.errors import ConfigError
from harness.models.sampling import Sampling
from harness.results.record import Recorder, RunFolder
from tests.drafters.makers import running
from tests.toys import request, toy_table

TABLE = toy_table("abcdefg")
LONG = [token % 7 for token in range(4000)]


def oracle(rate: float, k: int = 4) -> OracleDrafter:
    return OracleDrafter(k, {"r": LONG}, rate, len(TABLE))


def test_a_perfect_oracle_drafts_the_reference() -> None:
    (proposal,) = oracle(1.0).free([running(TABLE, LONG[:3])])
    assert (proposal.tokens, proposal.q) == (LONG[3:7], None)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_drafts_are_right_at_the_rate_and_the_wrong_ones_are_any_other_token(rate: float) -> None:
    """4000 draws: four standard deviations are 0.03."""
    (proposal,) = oracle(rate, k=len(LONG)).free([running(TABLE, [], max_new_tokens=5000)])
    hits = [draft == right for draft, right in zip(proposal.tokens, LONG, strict=True)]
    assert sum(hits) / len(hits) == pytest.approx(rate, abs=0.03)
    offsets = {(d - right) % len(TABLE) for d, right in zip(proposal.tokens, LONG, strict=True)}
    assert offsets - {0} == set(range(1, len(TABLE)))


def test_a_draft_belongs_to_its_position_whatever_was_tried_before() -> None:
    window = oracle(0.5).replay(running(TABLE, LONG[:5]), 4)
    assert oracle(0.5).replay(running(TABLE, LONG[:7]), 2) == window[2:]
    other = oracle(0.5).replay(running(TABLE, LONG[:5], seed=1), 4)
    assert other != window


def test_an_output_that_has_left_the_reference_gets_no_drafts() -> None:
    assert oracle(1.0).replay(running(TABLE, [LONG[0], LONG[0]]), 4) == []
    ended = OracleDrafter(4, {"r": [1, 2]}, 1.0, len(TABLE))
    assert ended.replay(running(TABLE, [1]), 4) == [2]
    assert ended.replay(running(TABLE, [1, 2]), 4) == []


def reference_run(path: Path, strategy: str) -> str:
    """A run folder of one request."""
    recorder = Recorder()
    outputs = {"r": [1, 2, 3], "broken": []}
    for name, output in outputs.items():
        trace = RequestTrace(strategy, name, "toy", "none", "toy", 0, 1, output_ids=output)
        trace.finish = "stop" if output else "failed"
        recorder.requests.append(trace)
    folder = RunFolder.create(path)
    folder.write_frames(*recorder.frames())
    folder.write_manifest({})
    folder.write_summary({})
    return str(path)


def test_references_are_what_plain_emitted(tmp_path: Path) -> None:
    folder = reference_run(tmp_path / "run", "plain")
    known = references_of(DrafterConfig("oracle", reference=folder), Sampling())
    assert known == {"r": [1, 2, 3]}
    check_references(known, [request(TABLE, None)], folder)
    with pytest.raises(ConfigError, match=r"drafter\.reference: .*1 requests, broken first"):
        check_references(known, [request(TABLE, None, "broken")], folder)
    assert references_of(DrafterConfig("ngram"), Sampling()) == {}


def test_a_reference_without_plain_is_refused(tmp_path: Path) -> None:
    folder = reference_run(tmp_path / "run", "vllm")
    with pytest.raises(ConfigError, match=r"drafter\.reference: .*run plain first"):
        references_of(DrafterConfig("oracle", reference=folder), Sampling())


def test_sampling_is_refused_for_its_draws_are_not_independent(tmp_path: Path) -> None:
    folder = reference_run(tmp_path / "run", "plain")
    with pytest.raises(ConfigError, match=r"drafter\.name: .*sampling\.temperature"):
        references_of(DrafterConfig("oracle", reference=folder), Sampling(temperature=1.0))
