"""Strategies with a draft model whose head has some tokens only (EAGLE-3's ``d2t``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import strategies
from harness.config import Config
from harness.core import PAD, Request, StepTrace
from harness.drafters.model import ModelDrafter
from harness.engine import EngineConfig
from harness.grammar.spec import GrammarSpec
from harness.models.pair import PairConfig
from harness.models.sampling import Sampling
from harness.results.record import Recorder
from harness.run import Run
from harness.workloads.loaders import WorkloadConfig
from tests.exact.cases import LOSSLESS, SAMPLINGS, TABLE as EXACT_TABLE, Case, find
from tests.exact.laws import Problem
from tests.pruned import prune_folder, pruned
from tests.strategies.letters import REGEXES, TABLE, ask, letters, spell, steps_of, toy
from tests.strategies.test_properties import CASES
from tests.tiny_pair import byte_tokenizer, random_llama
from tests.toys import ENGINES, Toy, Watch, ids, random_law

DRAFTING = {label: case for label, case in CASES.items() if label != "plain"}
LOSSLESS_GREEDY = [
    label for label in DRAFTING if label not in ("sglang_jump", "sglang_jump_hold_back")
]
WARM = Sampling(temperature=0.8)
KEPT = [12, *spell("edbyza")]
"""EOS and some letters, in no order; c, q and x are not among them."""
REQUESTS = [ask(GrammarSpec.regex(text), f"r{i}") for i, text in enumerate(REGEXES)]
FREE = ask(None, "free")
TIMES = ("draft_us", "verify_us", "grammar_us", "exposed_us", "host_us", "fill_us")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows of a few tokens are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_toy(seed: int, **fields: Any) -> Toy:
    laws = random_law(TABLE, seed), random_law(TABLE, seed + 1)
    return Toy(TABLE, *laws, slots=2, detail=True, **fields)


def decode(jig: Toy, label: str, requests: list[Request]) -> Watch:
    name, options = CASES[label]
    watch = jig.run(jig.strategy(name, **options), requests)
    assert not watch.errors
    return watch


def counts(steps: list[StepTrace]) -> list[str]:
    """All that was recorded of the steps but times; as text, in which a nan equals itself."""
    return [repr(replace(trace, **dict.fromkeys(TIMES))) for trace in steps]


def until_end(trace: StepTrace, eos_id: int) -> str:
    """The fates of the drafts up to a drafted end, behind which anything is drafted (1.8, T20)."""
    drafts = trace.draft_ids
    return trace.fates[: drafts.index(eos_id) + 1] if eos_id in drafts else trace.fates


# --- a pruned head of the whole vocabulary ----------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("label", DRAFTING)
def test_the_whole_vocabulary_drafts_as_without_a_map(label: str, sampling: Sampling) -> None:
    """Also where the grammar's own dead ends are (T7, T20)."""
    whole = random_toy(1, sampling=sampling)
    mapped = replace(whole, drafter=pruned(ModelDrafter, range(len(TABLE))))
    steps, same = (decode(jig, label, [*REQUESTS, FREE]).steps for jig in (whole, mapped))
    assert any(trace.drafted for trace in steps)
    assert counts(same) == counts(steps)


@pytest.mark.parametrize("label", DRAFTING)
def test_the_order_of_draft_ids_changes_no_greedy_draft(label: str) -> None:
    """No two logits are alike, so the best token is the best in every order."""
    backwards = range(len(TABLE) - 1, -1, -1)
    whole = random_toy(2)
    mapped = replace(whole, drafter=pruned(ModelDrafter, backwards))
    steps, same = (decode(jig, label, [*REQUESTS, FREE]).steps for jig in (whole, mapped))
    assert counts(same) == counts(steps)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """A target, a draft whose map is the identity, the same file without saying so, and a draft of
    100 tokens. No logit is padding, and both whole drafts lie in memory alike: a product of another
    width or alignment rounds otherwise."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = folder / "target", folder / "draft"
    random_llama(0, vocab_size=257).save_pretrained(target)
    random_llama(1, layers=1, vocab_size=257).save_pretrained(draft)
    for each in (target, draft):
        byte_tokenizer().save_pretrained(each)
    identity = prune_folder(draft, folder / "identity", range(257))
    unmapped = shutil.copytree(identity, folder / "unmapped")
    shutil.copy(draft / "config.json", unmapped)
    few = prune_folder(draft, folder / "few", [256, *range(16, 115)])
    return target, identity, unmapped, few


def run_pair(target: Path, draft: Path, mode: str, sampling: Sampling) -> Recorder:
    """All strategies over a pair."""
    items = [
        {"id": "digits", "prompt": "Count", "regex": "[0-9]{3,20}"},
        {"id": "object", "prompt": "Go", "json_schema": {"properties": {"a": {"type": "string"}}}},
        {"id": "free", "prompt": "Say"},
    ]
    path = draft.parent / "items.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in items))
    config = Config(
        strategy="",
        options={"vllm": {"probabilistic": True}},
        pair=PairConfig(str(target), str(draft), "float32", "cpu"),
        workload=WorkloadConfig("file", str(path), max_new_tokens=12),
        engine=EngineConfig(slots=2, mode=mode, detail=True),
        sampling=sampling,
    )
    recorder = Recorder()
    Run(config, recorder, lambda _: None).go()
    assert not any(trace.error for trace in recorder.requests)
    return recorder


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_map_of_zeros_is_no_map_in_either_engine(
    folders: tuple[Path, Path, Path, Path], mode: str, sampling: Sampling
) -> None:
    """Drafts, the laws that they were drawn from, and every count of every strategy."""
    target, identity, unmapped, _ = folders
    steps, same = (run_pair(target, each, mode, sampling).steps for each in (unmapped, identity))
    assert any(trace.draft_q for trace in steps)
    assert counts(same) == counts(steps)


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_pruned_pair_decodes_what_the_target_does(
    folders: tuple[Path, Path, Path, Path], mode: str
) -> None:
    target, _, _, few = folders
    recorder = run_pair(target, few, mode, Sampling())
    plain = {
        each.request: each.output_ids for each in recorder.requests if each.strategy == "plain"
    }
    for each in recorder.requests:
        if each.strategy not in ("unguided", "sglang"):  # which jumps
            assert each.output_ids == plain[each.request], each.strategy
    drafts = {token for trace in recorder.steps for token in (*trace.draft_ids, *trace.trimmed_ids)}
    for trace in recorder.steps:
        if trace.strategy == "trtllm":  # guided (1.4a, step 4)
            assert "g" not in until_end(trace, 256)
    assert len(drafts) > 20
    assert drafts <= {PAD, 256, *range(16, 115)}


# --- some tokens only -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("label", LOSSLESS_GREEDY)
def test_drafts_are_kept_tokens_and_outputs_are_those_of_plain(label: str, engine: str) -> None:
    """Requirement 2 of spec/regressions.md."""
    for seed in range(5):
        jig = random_toy(seed, engine=engine, drafter=pruned(ModelDrafter, KEPT), paranoid=True)
        watch = decode(jig, label, REQUESTS)
        assert watch.outputs == jig.run("plain", REQUESTS).outputs
        drafts = {t for trace in watch.steps for t in (*trace.draft_ids, *trace.trimmed_ids)}
        assert drafts <= {PAD, *KEPT}


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("engine", ENGINES)
def test_guided_drafts_are_all_legal(engine: str, sampling: Sampling) -> None:
    """1.4a, step 4 and T17: also where the grammar has gone on to tokens that were not kept."""
    accepted = 0
    for seed in range(5):
        jig = random_toy(seed, engine=engine, sampling=sampling, drafter=pruned(ModelDrafter, KEPT))
        steps = decode(jig, "trtllm", REQUESTS).steps
        for trace in steps:
            assert "g" not in until_end(trace, 12), (letters(trace.draft_ids), trace.fates)
        accepted += sum(trace.accepted for trace in steps)
    assert accepted > 10


def test_a_chain_ends_where_the_head_has_no_legal_token() -> None:
    """The grammar wants c behind ab, and the head has none: b is drafted, one more forward finds
    nothing, and no row is verified for it (T18). It is no dead end (T7): the request goes on, the
    next chain is guided again, and the one beside it is as long as ever."""
    model = ["a", "b", "c", "d", "$"]
    for sampling in (Sampling(), WARM):
        jig = toy(model, model, "xgrammar", sampling=sampling)
        jig.drafter = pruned(ModelDrafter, [*spell("abd"), 12])
        watch = jig.run("trtllm", [ask(), ask(GrammarSpec.choice(["abd"]), "other")])
        assert not watch.errors
        assert letters(watch.outputs["r"]) == "abcd$"
        first = steps_of(watch)[0]  # behind a, from the prefill
        assert (letters(first.draft_ids), first.draft_forwards) == ("b", 2)
        assert first.rollback_draft_tokens == 2  # a and b (T9)
        assert [letters(step.draft_ids) for step in steps_of(watch)] == ["b", "d$$"]
        assert letters(steps_of(watch, "other")[0].draft_ids) == "bd$"


# --- whole laws -------------------------------------------------------------------------------


class PrunedCase(Case):
    """A case whose draft model has some tokens only."""

    def toy(self, problem: Problem) -> Toy:
        jig = super().toy(problem)
        kept = ids(EXACT_TABLE, "c", "a", "$")
        return replace(jig, drafter=pruned(jig.drafter, kept))


@pytest.mark.parametrize("sampling", ["temperature", "top-k"])
@pytest.mark.parametrize(
    "case",
    [
        PrunedCase("guided", "trtllm", "sampled"),
        PrunedCase("free", "vllm", "sampled", {"probabilistic": True, "asynchronous": True}),
    ],
    ids=lambda case: case.name,
)
def test_outputs_follow_the_targets_law_for_pruned_drafts(case: PrunedCase, sampling: str) -> None:
    """T18, V1.7: q is scattered into target ids, integrated over all draws."""
    finding = find(case, case.problem(SAMPLINGS[sampling], "xgrammar", 3))
    assert finding.verdict == LOSSLESS


def test_every_strategy_that_drafts_is_covered() -> None:
    found = {name for name, each in strategies.registry().items() if each.uses_draft}
    assert found - {"unguided"} == {name for name, _ in DRAFTING.values()}
