"""What the trace viewer embeds: the recorded steps, compactly, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.core import PAD, Fate
from harness.grammar.matcher import TokenTable
from harness.results.record import Recorder, RunFolder
from harness.results.viewer import fragment
from harness.results.viewer.data import pack, strategy_columns, unpack
from harness.results.viewer.tokens import token_texts, used_ids
from tests.results import tiny_run, traced
from tests.results.traced import GRAMMARS, STRATEGIES, large_run, toy_run
from tests.strategies.letters import TABLE, ask, spell, toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return toy_run(tmp_path_factory.mktemp("runs") / "toys")


def embedded(html: str) -> tuple[dict[str, Any], list[Any]]:
    """The index of a fragment and its blobs, decoded as the page does it."""
    index = re.search(r'id="trace-index">(.*?)</script>', html, re.DOTALL)
    assert index is not None
    blobs = re.findall(r'type="application/gzip" id="trace-\d+">(.*?)</script>', html)
    return json.loads(index[1]), [unpack(blob) for blob in blobs]


def columns_of(recorder: Recorder) -> dict[str, Any]:
    """The embedded columns of the one strategy that was recorded."""
    steps, requests = recorder.frames()
    return strategy_columns(steps, requests, {name: i for i, name in enumerate(requests.request)})


def recorded(
    target: list[str], draft: list[str], strategy: str, limit: int = 24, **options: Any
) -> Recorder:
    """The worked example of the strategies' tests, as a recorder holds it."""
    jig = toy(target, draft, "xgrammar", detail=True)
    watch = jig.run(jig.strategy(strategy, **options), [ask(max_new_tokens=limit)])
    recorder = Recorder()
    recorder.steps, recorder.requests = watch.steps, watch.request_traces(strategy)
    return recorder


def test_a_draft_is_accepted_and_its_illegal_tail_trimmed() -> None:
    """V1.1d: of ``bxy`` only ``b`` is verified; ``c`` is the target's own."""
    columns = columns_of(recorded(["a", "b", "c", "d"], ["a", "b", "x", "y"], "vllm"))
    assert columns["own_id"][:2] == spell("ac")
    assert columns["draft_ids"][:1] == spell("b")
    assert columns["fates"][0] == Fate.ACCEPTED
    assert columns["trimmed"][:2] == [0, 2]
    assert columns["trimmed_ids"][:2] == spell("xy")


def test_the_grammar_and_the_model_reject_each_its_own() -> None:
    """D13: ``bxy`` is illegal from ``x`` on. L14: the target wants ``e`` where ``d`` is legal."""
    columns = columns_of(recorded(["a", "b", "c", "d"], ["a", "b", "x", "y"], "deepinfer"))
    assert columns["fates"][:3] == "agg"
    columns = columns_of(recorded(["a", "b", "c", "e"], ["a", "b", "c", "d"], "llamacpp"))
    assert columns["fates"][:3] == "aam"
    assert columns["own_id"][:2] == spell("ae")


def test_drafts_behind_an_accepted_stop_are_past_it() -> None:
    """V1.4a: the step ends with a draft, so nothing in it is the target's own."""
    columns = columns_of(recorded(["a", "b", "c", "e"], ["a", "b", "c", "d"], "llamacpp"))
    assert columns["fates"][3:] == "ass"
    assert columns["draft_ids"][3] == TABLE.eos_id
    assert columns["own_id"][2] == PAD


def test_dropped_drafts_are_named() -> None:
    """L10, L11: where four tokens are the limit, two are drafted, which ``n_min`` drops."""
    columns = columns_of(recorded([*"abcd"], [*"abcd"], "llamacpp", limit=4, n_min=3))
    assert columns["trimmed"][:2] == [0, 2]
    assert columns["trimmed_ids"][:2] == [2, 3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_embedded_steps_add_up_to_the_recorded_outputs(folder: RunFolder, strategy: str) -> None:
    """As ``steps.js`` replays them: jumps replace a tail, accepted drafts and the own id follow."""
    index, blobs = embedded(fragment([folder]))
    columns = blobs[index["runs"][0]["strategies"][strategy]]
    rows = iter(range(len(columns["own_id"])))
    drafts, jumps = iter(columns["draft_ids"]), iter(columns["jump_ids"])
    fates = iter(columns["fates"])
    expected = folder.requests().query("strategy == @strategy").set_index("request")["output_ids"]
    for number, steps in zip(columns["request"], columns["steps"], strict=True):
        output: list[int] = []
        for row in [next(rows) for _ in range(steps)]:
            del output[len(output) - columns["retokenized"][row] :]
            output += [next(jumps) for _ in range(columns["jumps"][row])]
            for _ in range(columns["drafts"][row]):
                draft = next(drafts)
                if next(fates) == Fate.ACCEPTED:
                    output.append(draft)
            if columns["own_id"][row] >= 0:
                output.append(columns["own_id"][row])
        assert output == expected[list(GRAMMARS)[number]].tolist()


def test_a_tree_brings_its_parents_and_a_row_more_than_nodes(folder: RunFolder) -> None:
    index, blobs = embedded(fragment([folder]))
    columns = blobs[index["runs"][0]["strategies"]["sglang"]]
    assert len(columns["parents"]) == len(columns["draft_ids"]) == len(columns["p"])
    assert columns["parents"][:6] == [-1, -1, 0, 0, 2, 2]
    assert len(columns["legal"]) == len(columns["draft_ids"]) + len(columns["own_id"])


def test_numbers_have_three_digits_and_nan_is_null() -> None:
    recorder = recorded(["a", "b", "c", "d"], ["a", "b", "x", "y"], "vllm", asynchronous=True)
    recorder.steps[0].verify_us = 12345.678
    recorder.steps[0].emitted_p = [0.000123456]
    columns = columns_of(recorder)
    assert columns["verify_us"][0] == 12300
    assert columns["own_p"][0] == 0.000123
    assert columns["p"][1:3] == [None, None]
    assert columns["q"] == []


def test_without_detail_nothing_of_it_is_embedded(tmp_path: Path) -> None:
    index, blobs = embedded(fragment([toy_run(tmp_path / "run", detail=False)]))
    assert index["runs"][0]["detail"] is False
    assert not {"p", "q", "own_p", "legal"} & set(blobs[index["runs"][0]["strategies"]["vllm"]])


def test_a_run_without_fates_is_named_and_not_shown(tmp_path: Path) -> None:
    folder = toy_run(tmp_path / "old")
    folder.steps().drop(columns="fates").to_parquet(tmp_path / "old" / "steps.parquet")
    index, blobs = embedded(fragment([folder]))
    assert index["runs"] == [{"name": "old", "viewable": False}]
    assert blobs == []


def test_a_request_that_never_ran_says_why(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_frames(*tiny_run())
    index, blobs = embedded(fragment([folder]))
    (run,) = index["runs"]
    columns = blobs[run["strategies"]["vllm"]]
    number = [name for name, _ in run["requests"]].index("c")
    assert number not in columns["request"]
    assert columns["error"] == {str(number): "no token is legal"}


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    steps, requests = tiny_run()
    for frame in (steps, requests):
        frame["request"] = frame["request"].replace("a", "</script><b>")
    folder = RunFolder.create(tmp_path)
    folder.write_frames(steps, requests)
    html = fragment([folder])
    assert "</script><b>" not in html
    assert ["</script><b>", "json"] in embedded(html)[0]["runs"][0]["requests"]


def test_texts_add_up_to_bytes_and_special_tokens_have_names(folder: RunFolder) -> None:
    tokens = folder.tokens()
    assert tokens["special"] == {str(traced.TABLE.eos_id): "<|end|>"}
    assert set(map(int, tokens["texts"] | tokens["special"])) == set(used_ids(folder.steps()))
    table = TokenTable((b"\xc3", b"\xa9", b""), frozenset({2}), 2)
    texts = token_texts(table, None, [0, 1])["texts"]  # type: ignore[arg-type]
    assert "".join(texts.values()).encode("utf-8", "surrogateescape").decode() == "é"
    assert unpack(pack(texts)) == texts


def test_a_run_that_recorded_no_texts_has_none(tmp_path: Path) -> None:
    folder = toy_run(tmp_path / "run")
    (folder.path / "tokens.json").unlink()
    assert folder.tokens() == {"texts": {}, "special": {}}


def test_three_hundred_requests_of_seven_strategies_stay_below_8_mb(tmp_path: Path) -> None:
    """A tenth of that, of noise: the data grows with the requests, and compresses no worse."""
    folder = large_run(tmp_path, strategies=7, requests=30, tokens=100)
    assert 10 * len(fragment([folder])) < 8e6


def test_the_fragment_names_no_address(folder: RunFolder) -> None:
    assert not re.findall(r"https?:|@import|url\(|\bsrc=|\bhref=", fragment([folder]))
