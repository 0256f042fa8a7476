"""What ``engine.detail`` records, against the models' tables and the grammar itself."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import detail as detail_module
from harness.clock import Clock
from harness.config import Config
from harness.core import PAD, Proposal, StepTrace, Verdict
from harness.detail import SOFTMAX, UNCONSTRAINED, DetailedVerifier
from harness.engine import EngineConfig
from harness.grammar.masks import MaskBuffer
from harness.grammar.spec import GrammarSpec
from harness.models.pair import PairConfig
from harness.models.sampling import Sampling, probabilities
from harness.models.verification import Verifier, VerifyBatch
from harness.results.record import Recorder
from harness.run import Run
from harness.workloads.loaders import WorkloadConfig
from strategies.base import Strategy
from tests.strategies.letters import REGEXES, TABLE, ask, letters, spell, steps_of, toy
from tests.strategies.test_properties import CASES
from tests.tiny_pair import save_pair
from tests.toys import Law, Toy, Watch, random_law

WARM = Sampling(temperature=0.8, top_k=4)
RECORDED = ("draft_p", "draft_q", "emitted_p", "legal")
UNMASKED = ("unguided", "llamacpp")

every_case = pytest.mark.parametrize("case", [*CASES, "unguided"])
both_laws = pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])


def run(case: str, sampling: Sampling, detail: bool = True) -> tuple[Toy, Watch]:
    """Several regexes and free text over arbitrary models."""
    name, options = CASES.get(case, (case, {}))
    jig = Toy(TABLE, random_law(TABLE, 3), random_law(TABLE, 4), sampling=sampling, detail=detail)
    grammars = [*map(GrammarSpec.regex, REGEXES), None]
    requests = [ask(grammar, f"r{i}", seed=i) for i, grammar in enumerate(grammars)]
    watch = jig.run(jig.strategy(name, **options), requests)
    assert not watch.errors
    return jig, watch


def outputs_before(traces: list[StepTrace]) -> list[list[int]]:
    """The output that each step of one request drafts behind, and the last one it leaves."""
    outputs: list[list[int]] = [[]]
    for trace in traces:
        output = outputs.pop()
        kept = len(output) - trace.retokenized
        outputs += [before := [*output[:kept], *trace.jump_ids], [*before, *trace.emitted_ids]]
    return outputs


def by_request(watch: Watch) -> dict[str, list[StepTrace]]:
    return {name: [t for t in watch.steps if t.request == name] for name in watch.done}


def legal_next(jig: Toy, name: str, output: list[int]) -> list[int] | None:
    """What may follow an output; None if the grammar has nothing to say, or no longer."""
    index = int(name[1:])
    if index == len(REGEXES):
        return None
    matcher = jig.grammar_engine().compile(GrammarSpec.regex(REGEXES[index])).matcher()
    if not matcher.accept(output) or matcher.terminated:
        return None
    mask = torch.zeros(1, 1, dtype=torch.int32)
    matcher.fill(mask, 0)
    return [token for token in range(len(TABLE)) if int(mask[0, 0]) >> token & 1]


def p_of(law: Law, context: list[int], legal: list[int] | None, sampling: Sampling) -> Any:
    """The law of what follows a context behind the prompt, as ``[vocab]``."""
    logits = torch.tensor([law((0, *context))])
    if legal is not None:
        forbidden = torch.ones(len(TABLE), dtype=torch.bool)
        forbidden[legal] = False
        logits[:, forbidden] = -math.inf
    return probabilities(logits, SOFTMAX if sampling.greedy else sampling)[0]


def counts(watch: Watch) -> list[dict[str, object]]:
    """Everything of the traces but times and what detail records."""
    unlike = {*RECORDED, "fill_us"}
    return [
        {
            key: value
            for key, value in asdict(trace).items()
            if key not in unlike and not key.endswith("_us")
        }
        for trace in watch.steps
    ]


@both_laws
@every_case
def test_detail_changes_neither_outputs_nor_counts(case: str, sampling: Sampling) -> None:
    _, plain = run(case, sampling, detail=False)
    _, detailed = run(case, sampling)
    assert detailed.outputs == plain.outputs
    assert counts(detailed) == counts(plain)
    assert not any(getattr(trace, name) for trace in plain.steps for name in RECORDED)


@both_laws
@every_case
def test_p_is_the_law_that_the_verification_used(case: str, sampling: Sampling) -> None:
    jig, watch = run(case, sampling)
    for name, traces in by_request(watch).items():
        for before, trace in zip(outputs_before(traces), traces, strict=False):
            context = list(before)
            accepted = [node for node, fate in enumerate(trace.fates) if fate == "a"]
            for emitted, token in enumerate(trace.emitted_ids):
                legal = None if case in UNMASKED else legal_next(jig, name, context)
                if case.startswith("llamacpp"):
                    legal = None  # the law before the grammar is asked (L4)
                law = p_of(jig.target, context, legal, sampling)
                assert trace.emitted_p[emitted] == pytest.approx(float(law[token]), abs=1e-6)
                parent = accepted[emitted - 1] if emitted else -1
                parents = trace.draft_parents or range(-1, len(trace.draft_ids) - 1)
                for node, draft in enumerate(trace.draft_ids):
                    if draft != PAD and parents[node] == parent:
                        p = float(law[draft])
                        assert trace.draft_p[node] == pytest.approx(p, abs=1e-6)
                context.append(token)


@every_case
def test_legal_counts_the_tokens_that_the_mask_of_each_row_allows(case: str) -> None:
    jig, watch = run(case, Sampling())
    masked = 0
    for name, traces in by_request(watch).items():
        for before, trace in zip(outputs_before(traces), traces, strict=False):
            assert len(trace.legal) == trace.rows
            legal = legal_next(jig, name, before)
            if case.startswith(UNMASKED) or legal is None:
                assert set(trace.legal) == {UNCONSTRAINED}
                continue
            assert trace.legal[0] == len(legal)
            masked += 1
    assert bool(masked) is not case.startswith(UNMASKED)


def test_q_is_the_law_that_a_sampled_draft_came_from() -> None:
    jig, watch = run("deepinfer", WARM)
    for traces in by_request(watch).values():
        for before, trace in zip(outputs_before(traces), traces, strict=False):
            for node, (draft, q) in enumerate(zip(trace.draft_ids, trace.draft_q, strict=True)):
                law = p_of(jig.draft, [*before, *trace.draft_ids[:node]], None, WARM)
                assert q == pytest.approx(float(law[draft]), abs=1e-6)


def test_q_of_an_argmax_is_not_a_number() -> None:
    _, watch = run("vllm", WARM)
    drafted = [trace for trace in watch.steps if trace.drafted]
    assert drafted
    assert all(math.isnan(q) for trace in drafted for q in trace.draft_q)


@every_case
def test_steps_replay_to_the_output_through_every_jump(case: str) -> None:
    _, watch = run(case, Sampling())
    for name, traces in by_request(watch).items():
        assert outputs_before(traces)[-1] == watch.outputs[name]
        for trace in traces:
            assert len(trace.jump_ids) == trace.jump_tokens + trace.retokenized
    assert any(trace.jump_ids for trace in watch.steps) is case.startswith("sglang_jump")


def test_a_padded_draft_has_no_p_and_its_row_no_mask() -> None:
    """V1.1e: ``abx`` is padded behind ``ab``; the rows behind the padding stay unmasked (V1.2d)."""
    jig = toy(["a", "b", "c", "d"], ["a", "b", "x", "x"], "xgrammar", detail=True)
    (first, *_) = steps_of(jig.run(jig.strategy("vllm", asynchronous=True), [ask()]))
    assert first.fates == "a--"
    assert letters(first.trimmed_ids) == "xx"
    assert first.draft_p[0] == pytest.approx(1.0)
    assert all(map(math.isnan, first.draft_p[1:]))
    assert first.legal == [1, 1, -1, -1]
    assert len(first.emitted_p) == len(first.emitted_ids) == 2


def test_trimmed_drafts_are_kept_by_name() -> None:
    """V1.1d: the draft is shortened to its legal prefix; what it was stays known."""
    jig = toy(["a", "b", "c", "d"], ["a", "b", "x", "y"], "xgrammar")
    (first, *_) = steps_of(jig.run("vllm", [ask()]))
    assert letters(first.draft_ids) == "b"
    assert letters(first.trimmed_ids) == "xy"
    assert first.fates == "a"


def test_a_draft_that_is_cut_in_place_is_still_known() -> None:
    proposal = Proposal([3, 4, 5])
    del proposal.tokens[1:]
    assert proposal.trimmed_ids == [4, 5]
    assert proposal.trimmed == 2


class Overwriting(Verifier):
    """Masks more rows in place, as check-then-resample does in static shapes."""

    def verify(self, batch: VerifyBatch) -> list[Verdict]:
        batch.logits.fill_(-math.inf)
        return [Verdict(spell("a"), [])]


def test_a_verifier_that_masks_in_place_does_not_change_what_is_recorded() -> None:
    verifier = DetailedVerifier(Overwriting(), Clock())
    batch = VerifyBatch(torch.zeros(1, len(TABLE)), [Proposal()], [0], [0], Sampling())
    verifier.verify(batch)
    masks = MaskBuffer(1, 1, len(TABLE), torch.device("cpu"))
    (found,) = verifier.take(masks)
    assert found.emitted_p == [pytest.approx(1 / len(TABLE))]
    assert verifier.take(masks) == []


def test_the_time_of_recording_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = detail_module._details

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return original(*arguments)

    monkeypatch.setattr(detail_module, "_details", slow)
    jig = toy(["a", "b", "c", "d"], ["a", "b", "c", "d"], "xgrammar", detail=True)
    for trace in jig.run("vllm", [ask()]).steps:
        spent = trace.draft_us + trace.verify_us + trace.grammar_us + trace.host_us
        assert spent < 50_000


def test_without_detail_the_strategy_keeps_its_own_verifier() -> None:
    jig = toy(["a"], ["a"], "xgrammar")
    strategy: Strategy = jig.strategy("vllm")
    own = strategy.verifier
    jig.run(strategy, [ask()])
    assert strategy.verifier is own


def test_static_shapes_record_what_eager_ones_do(tmp_path: Path) -> None:
    """There rows are masked where they lie, the refused ones of L4 too, and overwritten soon."""
    target, draft = save_pair(tmp_path)
    items = tmp_path / "items.jsonl"
    items.write_text('{"id": "digits", "prompt": "A number?", "regex": "[0-9]{2,9}"}')
    found = {}
    for mode in ("eager", "graphs"):
        config = Config(
            strategy="",
            compare=["llamacpp", "vllm"],
            pair=PairConfig(str(target), str(draft), "float32", "cpu"),
            workload=WorkloadConfig("file", str(items), max_new_tokens=12),
            engine=EngineConfig(slots=1, mode=mode, detail=True),
        )
        recorder = Recorder()
        Run(config, recorder, lambda _: None).go()
        found[mode] = recorder.steps
    for eager, static in zip(found["eager"], found["graphs"], strict=True):
        assert static.emitted_ids == eager.emitted_ids
        assert static.legal == eager.legal
        assert static.draft_p == pytest.approx(eager.draft_p, abs=1e-5, nan_ok=True)
        assert static.emitted_p == pytest.approx(eager.emitted_p, abs=1e-5)
