"""Workload files: our format line by line, what a selection keeps, and others' data sets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.errors import ConfigError
from harness.grammar.gate import Trigger
from harness.grammar.spec import GrammarSpec
from harness.workloads.item import Item, Thinking
from harness.workloads.loaders import BUILDERS, WorkloadConfig, load
from tests.workloads.test_item import ByteTokenizer

SHARED = Path(os.environ.get("HARNESS_SHARED", Path(__file__).parents[2] / "../shared"))
CONFIGS = Path(__file__).parents[2] / "configs" / "workload"

Load = Callable[..., list[Item]]


@pytest.fixture
def load_lines(tmp_path: Path) -> Load:
    """Writes lines (objects, or text as it stands) and loads them."""

    def write_and_load(*lines: Any, **config: Any) -> list[Item]:
        path = tmp_path / "own.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return load(WorkloadConfig(**{"name": "file", "path": str(path), **config}))

    return write_and_load


def line(item_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"id": item_id, "prompt": "Hi", **fields}


def test_line_becomes_an_item(load_lines: Load) -> None:
    record = line(kind="tags", choice=["bug", "feature"], max_new_tokens=8, valid_regex="b.*|f.*")
    record["trigger"] = {"kind": "tokens", "tokens": [7, 8], "bound": 5}
    assert load_lines(record) == [
        Item(
            id="a",
            kind="tags",
            messages=({"role": "user", "content": "Hi"},),
            grammar=GrammarSpec.choice(["bug", "feature"]),
            max_new_tokens=8,
            trigger=Trigger("tokens", tokens=(7, 8), bound=5),
            valid_regex="b.*|f.*",
        )
    ]


def test_a_line_may_name_all_of_a_reasoning_trigger(load_lines: Load) -> None:
    given = {"kind": "reasoning", "tokens": [7, 8], "implicit": [5], "budget": 32}
    (item,) = load_lines(line(regex="a", trigger=given))
    assert item.trigger == Trigger("reasoning", (7, 8), implicit=(5,), budget=32)


def test_items_that_think_do_so_as_the_config_says(load_lines: Load) -> None:
    lines = line("a", regex="a", thinking=True), line("b", regex="a", thinking=False)
    default = [item.thinking for item in load_lines(*lines)]
    assert default == [Thinking("</think>"), None]
    given = load_lines(*lines, thinking_end="Answer:", thinking_budget=8)
    assert [item.thinking for item in given] == [Thinking("Answer:", 8), None]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json_schema": {"type": "null"}}, "json_schema"),
        ({"json_schema": '{"type":"null"}'}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({}, "text"),
    ],
)
def test_kind_defaults_to_the_kind_of_the_grammar(
    load_lines: Load, fields: dict[str, Any], kind: str
) -> None:
    (item,) = load_lines(line(**fields))
    assert (item.kind, item.error) == (kind, "")


def test_messages_may_stand_in_place_of_a_prompt(load_lines: Load) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (item,) = load_lines({"id": "a", "messages": chat})
    assert item.messages == tuple(chat)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON (Expecting property name"),
        ("[1]", "give a JSON object"),
        pytest.param("[" * 100_000, "recursion", id="deep nesting"),
        ('{"id": "x", "prompt": "\\ud800"}', "surrogates not allowed"),
        ({"prompt": "Hi"}, "id: give a string"),
        ({"id": "x"}, "prompt, messages: give exactly one"),
        (line("x", messages=[]), "prompt, messages: give exactly one"),
        (line("x", prompt=" "), "prompt: blank"),
        ({"id": "x", "messages": []}, "messages: give a list"),
        ({"id": "x", "messages": [{"role": "user"}]}, "messages: give a list"),
        ({"id": "x", "messages": [{"role": "user", "content": 1}]}, "messages: give a list"),
        (line("x", schema={}), "schema: unknown field"),
        (line("x", regex="a", ebnf="b"), "regex, ebnf: give at most one grammar"),
        (line("x", regex=3), "regex: give a string"),
        (line("x", regex="a\x00"), "NUL"),
        (line("x", json_schema=None), "grammar.json_schema: a schema is"),
        (line("x", choice="yes"), "choice: give a list"),
        (line("x", choice=[]), "grammar.choice: the list is empty"),
        (line("x", max_new_tokens=0), "max_new_tokens: 0"),
        (line("x", max_new_tokens=True), "max_new_tokens: True"),
        (line("x", valid_regex="("), "valid_regex: not a regular expression"),
        (line("x", smoke=1), "smoke: give true or false"),
        (line("x", trigger={"kind": "word", "text": "<"}), "trigger: there is no grammar"),
        (line("x", regex="a", trigger={"kind": "word"}), "trigger.text"),
        (line("x", regex="a", trigger={"words": "<"}), "trigger.words: unknown field"),
        (line("x", regex="a", trigger={"kind": "tokens", "tokens": [True]}), "trigger.tokens"),
        (line("x", regex="a", trigger=["<"]), "trigger: give an object"),
        (line("x", regex="a", trigger={"kind": "reasoning"}), "trigger.tokens"),
        (line("x", thinking=True), "thinking: there is no grammar"),
        (line("x", regex="a", thinking="yes"), "thinking: give true or false"),
        (
            line("x", regex="a", thinking=True, trigger={"kind": "word", "text": "<"}),
            "trigger, thinking: give at most one",
        ),
    ],
)
def test_bad_line_fails_alone_with_its_number_and_reason(
    load_lines: Load, bad: Any, reason: str
) -> None:
    before, broken, after = load_lines(line("before"), bad, line("after"))
    assert (before.error, after.error) == ("", "")
    assert broken.error.startswith("line 2: ")
    assert reason in broken.error
    assert "\n" not in broken.error


def test_bad_line_without_an_id_is_named_by_its_number(load_lines: Load) -> None:
    assert [item.id for item in load_lines("", "{", line("a"))] == ["line-2", "a"]


def test_line_that_is_not_utf8_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "latin1.jsonl"
    path.write_bytes(
        '{"id": "a", "prompt": "é"}\n'.encode("latin-1") + json.dumps(line("b")).encode()
    )
    bad, good = load(WorkloadConfig(name="file", path=str(path)))
    assert (bad.id, good.id) == ("line-1", "b")
    assert "line 1: not UTF-8 ('utf-8' codec" in bad.error


def test_file_that_may_not_be_read_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "items.jsonl").write_text(json.dumps(line()))

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"workload\.path: .* cannot be read \(Permission"):
        load(WorkloadConfig(name="file", path=str(tmp_path / "items.jsonl")))


def test_byte_order_mark_is_skipped(load_lines: Load) -> None:
    (item,) = load_lines("\ufeff" + json.dumps(line()))
    assert (item.id, item.error) == ("a", "")


def test_line_separator_inside_a_string_does_not_end_the_line(load_lines: Load) -> None:
    (item,) = load_lines('{"id": "a", "prompt": "one\u2028two"}')
    assert item.messages[0]["content"] == "one\u2028two"


def test_ids_that_repeat_are_refused(load_lines: Load) -> None:
    with pytest.raises(ConfigError, match=r"workload\.path: id 'a' stands 2 times"):
        load_lines(line("a"), line("b"), line("a"))


def test_empty_file_is_refused(load_lines: Load) -> None:
    with pytest.raises(ConfigError, match=r"workload\.path: no items"):
        load_lines("")


def test_kinds_keep_their_items_and_the_bad_ones(load_lines: Load) -> None:
    items = load_lines(line("a", kind="x"), line("b", kind="y"), "{", kinds=["y"])
    assert [item.id for item in items] == ["b", "line-3"]


def test_kind_that_no_item_has_is_refused_with_those_there_are(load_lines: Load) -> None:
    with pytest.raises(ConfigError, match=r"workload\.kinds: 'z' is not in the file; it has x, y"):
        load_lines(line("a", kind="y"), line("b", kind="x"), kinds=["x", "z"])


def test_smoke_only_keeps_the_marked_items(load_lines: Load) -> None:
    items = load_lines(line("a"), line("b", smoke=True), smoke_only=True)
    assert [item.id for item in items] == ["b"]


def test_smoke_only_changes_nothing_where_nothing_is_marked(load_lines: Load) -> None:
    assert len(load_lines(line("a"), line("b"), smoke_only=True)) == 2


def test_limit_takes_a_sample_in_the_order_of_the_file(load_lines: Load) -> None:
    lines = [line(f"item-{i}") for i in range(40)]
    samples = [
        [int(item.id[5:]) for item in load_lines(*lines, limit=10, seed=seed)] for seed in (0, 0, 1)
    ]
    assert samples[0] == samples[1] != samples[2]
    assert all(sample == sorted(sample) and len(sample) == 10 for sample in samples)
    assert samples[0] != list(range(10))


def test_smaller_sample_is_part_of_the_larger_one(load_lines: Load) -> None:
    lines = [line(f"item-{i}") for i in range(40)]
    small, large = ({item.id for item in load_lines(*lines, limit=n)} for n in (5, 15))
    assert small < large


def test_limit_without_a_seed_takes_the_first_items(load_lines: Load) -> None:
    items = load_lines(*[line(str(i)) for i in range(9)], limit=3, seed=None)
    assert [item.id for item in items] == ["0", "1", "2"]


def test_long_prompts_make_room_for_shorter_ones(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    prompts = ["x" * 50, "y" * 10, "z" * 11, "w"]
    lines = [json.dumps({"id": prompt[0], "prompt": prompt}) for prompt in prompts]
    path.write_text("\n".join(lines))
    frame = len("<user><assistant>")
    config = WorkloadConfig(
        name="file", path=str(path), limit=2, seed=None, max_prompt_tokens=frame + 10
    )
    assert [item.id for item in load(config, ByteTokenizer())] == ["y", "w"]
    with pytest.raises(ConfigError, match=r"workload\.max_prompt_tokens: .*tokenizer"):
        load(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "maxi"}, r"workload\.name: 'maxi' is none of mini"),
        ({"split": "test"}, r"workload\.split: 'test' is none of train, eval"),
        ({"limit": 0}, r"workload\.limit: 0 is below 1"),
        ({"max_prompt_tokens": -1}, r"workload\.max_prompt_tokens: -1"),
        ({"max_new_tokens": 0}, r"workload\.max_new_tokens: 0"),
        ({"path": "x.jsonl"}, r"workload\.path: mini has its own data"),
        ({"name": "file"}, r"workload\.path: missing"),
        ({"thinking_end": ""}, r"workload\.thinking_end: empty"),
        ({"thinking_budget": -1}, r"workload\.thinking_budget: -1 is negative"),
    ],
)
def test_setting_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**fields)


@pytest.mark.parametrize(
    ("name", "source"), [("bfcl", "bfcl-eval"), ("jsonschemabench", "epfl-dlab/JSONSchemaBench")]
)
def test_missing_data_set_says_where_to_get_it(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_SHARED", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"workload\.path: no file .*{source}"):
        load(WorkloadConfig(name=name))


@pytest.mark.parametrize("name", BUILDERS)
def test_config_file_holds_values_of_the_dataclass(name: str) -> None:
    path = {"path": "own.jsonl"} if name == "file" else {}
    merged = OmegaConf.merge(
        OmegaConf.structured(WorkloadConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"), path
    )
    config = OmegaConf.to_object(merged)
    assert isinstance(config, WorkloadConfig)
    assert config.name == name


def bfcl_record(item_id: str, split: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "kind": "simple",
        "messages": [{"role": "user", "content": "Add 1 and 2."}],
        "functions": [{"name": "add", "parameters": {"type": "dict"}}],
        "schema": {"type": "object", "required": ["add"]},
        "instance": {"add": {}},
        "split": split,
    }


def test_bfcl_functions_go_into_the_system_message_of_their_split(load_lines: Load) -> None:
    records = [bfcl_record("a", "train"), bfcl_record("b", "eval")]
    (item,) = load_lines(*records, name="bfcl")
    assert (item.id, item.kind, item.error) == ("b", "simple", "")
    assert item.messages == (
        {
            "role": "system",
            "content": 'You call functions. Functions: [{"name": "add", "parameters": '
            '{"type": "dict"}}]\nAnswer with one JSON object that maps each function name to its '
            "arguments.",
        },
        {"role": "user", "content": "Add 1 and 2."},
    )
    assert item.grammar == GrammarSpec.json_schema({"type": "object", "required": ["add"]})


def test_jsonschemabench_prompt_is_the_schema(load_lines: Load) -> None:
    record = {"id": "a", "kind": "easy", "schema": {"type": "null"}, "valid": [None]}
    (item,) = load_lines(record, name="jsonschemabench")
    assert item.messages[0]["content"].endswith('\n{"type":"null"}')
    assert item.grammar == GrammarSpec.json_schema({"type": "null"})


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets of HARNESS_SHARED are not here")
@pytest.mark.parametrize(
    ("name", "split", "count"),
    [("bfcl", "train", 717), ("bfcl", "eval", 307), ("jsonschemabench", "eval", 717)],
)
def test_data_set_is_read_without_a_bad_line(
    name: str, split: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_SHARED", str(SHARED))
    items = load(WorkloadConfig(name=name, split=split))
    assert [item.error for item in items if item.error] == []
    assert len(items) == count


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets of HARNESS_SHARED are not here")
def test_first_items_of_bfcl_are_those_of_the_reference_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HARNESS_SHARED", str(SHARED))
    items = load(WorkloadConfig(name="bfcl", limit=3, seed=None))
    assert [item.id for item in items] == ["bfcl/java/0", "bfcl/java/10", "bfcl/java/11"]
