"""The judge that knows nothing of the grammar engines."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from harness.grammar.gate import Trigger
from harness.grammar.spec import GrammarSpec
from harness.workloads.item import Item, Thinking
from harness.workloads.validate import validate

INTEGER = {"type": "integer", "minimum": 1}


def item(grammar: GrammarSpec | None, **fields: Any) -> Item:
    return Item("a", "test", (), grammar, **fields)


def schema(schema: Any) -> Item:
    return item(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(("text", "valid"), [("3", True), (" 3\n", True), ("0", False)])
def test_json_must_fit_the_schema(text: str, valid: bool) -> None:
    assert validate(schema(INTEGER), text) is valid


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "-Infinity", "1 2", '{"a":1} ok', "{'a':1}", "[1,]", "01"]
)
def test_text_that_is_no_strict_json_is_invalid(text: str) -> None:
    assert validate(schema(True), text) is False


def test_schema_is_read_in_its_own_draft() -> None:
    exclusive = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}
    draft_4 = {"$schema": "http://json-schema.org/draft-04/schema#", **exclusive}
    assert validate(schema(draft_4), "3") is False
    assert validate(schema(draft_4), "4") is True


def test_schema_without_a_draft_is_read_as_2020_12() -> None:
    pair = {"prefixItems": [INTEGER, {"type": "boolean"}], "items": False}
    assert validate(schema(pair), "[1,true]") is True
    assert validate(schema(pair), "[1,true,2]") is False


def test_known_format_is_checked_and_an_unknown_one_is_not() -> None:
    assert validate(schema({"format": "date"}), '"2025-02-30"') is False
    assert validate(schema({"format": "date"}), '"2025-02-28"') is True
    assert validate(schema({"format": "sprocket"}), '"anything"') is True


@pytest.mark.parametrize(
    "unknown",
    [
        {"type": "no-such-type"},
        {"$ref": "https://example.com/schema.json"},
        {"pattern": "(?=x)x"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
    ids=["no schema", "remote schema", "pattern of another dialect", "endless reference"],
)
def test_schema_that_the_judge_cannot_read_gives_no_verdict(unknown: dict[str, Any]) -> None:
    assert validate(schema(unknown), '"x"') is None


def test_remote_schema_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", fetched.append)
    assert validate(schema({"$ref": "https://example.com/other.json"}), "1") is None
    assert fetched == []


def test_regex_must_match_the_whole_text() -> None:
    date = item(GrammarSpec.regex("[0-9]{4}|x"))
    assert validate(date, "2025") is True
    assert validate(date, "2025-") is False
    assert validate(date, "2025\n") is False


def test_choice_must_be_one_of_the_list() -> None:
    answer = item(GrammarSpec.choice(["是", "否"]))
    assert validate(answer, "否") is True
    assert validate(answer, "否是") is False


def test_ebnf_is_judged_by_its_valid_regex_alone() -> None:
    grammar = GrammarSpec.ebnf('root ::= "a"+')
    assert validate(item(grammar), "aa") is None
    assert validate(item(grammar, valid_regex="a+"), "aa") is True
    assert validate(item(grammar, valid_regex="a+"), "ab") is False


def test_valid_regex_is_checked_beside_the_grammar() -> None:
    even = item(GrammarSpec.json_schema(INTEGER), valid_regex="[0-9]*[02468]")
    assert [validate(even, text) for text in ("12", "13", "-2")] == [True, False, False]


def test_free_text_gives_no_verdict() -> None:
    assert validate(item(None), "anything") is None


def test_text_before_a_trigger_is_not_held_against_the_grammar() -> None:
    late = item(GrammarSpec.json_schema(INTEGER), trigger=Trigger("word", text="<json>"))
    assert validate(late, "Let me think.<json>3") is None


@pytest.mark.parametrize(("answer", "valid"), [("3", True), ("x", False), ("", False)])
def test_what_was_thought_is_not_held_against_the_grammar_but_the_answer_is(
    answer: str, valid: bool
) -> None:
    """Without an answer, because the thinking did not end, the output is not valid."""
    thinking = item(GrammarSpec.json_schema(INTEGER), thinking=Thinking())
    assert validate(thinking, f"Let me think.</think>{answer}", answer) is valid


def test_the_pattern_of_an_item_is_for_all_that_it_wrote() -> None:
    thinking = item(GrammarSpec.regex("[0-9]"), thinking=Thinking(), valid_regex="Hm.*")
    assert validate(thinking, "Hm</think>3", "3") is True
    assert validate(thinking, "Er</think>3", "3") is False


def test_a_number_too_large_for_the_validator_gives_no_verdict() -> None:
    assert validate(schema({"multipleOf": 0.1}), "1" + "0" * 400) is None


EXPLODING = "^(([a-z])+.)+[A-Z]([a-z])+$"
"""Python's ``re`` takes years to see that it does not match ``MANY``."""
MANY = "a" * 60


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (item(GrammarSpec.regex("(a+)+b")), MANY),
        (item(None, valid_regex="(a|aa)+b"), MANY),
        (schema({"pattern": EXPLODING}), json.dumps(MANY)),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"pattern": EXPLODING}}}), json.dumps(MANY)),
        (schema({"propertyNames": {"pattern": EXPLODING}}), json.dumps({MANY: 1})),
        (
            schema({"patternProperties": {EXPLODING: True}, "minProperties": 2}),
            json.dumps({MANY: 1}),
        ),
        (
            schema({"patternProperties": {EXPLODING: True}, "additionalProperties": False}),
            json.dumps({MANY: 1}),
        ),
    ],
)
def test_a_pattern_that_explodes_is_judged_within_a_second(given: Item, text: str) -> None:
    before = time.monotonic()
    assert validate(given, text) is False
    assert time.monotonic() - before < 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("dialect", ["draft-04/schema#", "draft-07/schema#"])
def test_a_schema_that_names_its_draft_has_no_way_back_to_backtracking(dialect: str) -> None:
    named = {"$schema": f"http://json-schema.org/{dialect}"}
    inner = {**named, "properties": {"a": {"$ref": "#"}, "b": {"pattern": EXPLODING}}}
    assert validate(schema(inner), json.dumps({"a": {"b": MANY}})) is False


@pytest.mark.timeout(60)
@pytest.mark.parametrize("keyword", ["allOf", "oneOf"])
def test_references_that_fan_out_without_end_give_no_verdict(keyword: str) -> None:
    levels = {f"n{i}": {keyword: [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(40)}
    fan = {"$defs": {**levels, "n40": {"type": "integer"}}, "$ref": "#/$defs/n0"}
    assert validate(schema(fan), "1") is None


@pytest.mark.parametrize("pattern", ["(?=a)a", r"(a)\1", "a{2000}", "a)(a", "("])
def test_a_pattern_that_re2_does_not_know_gives_no_verdict(pattern: str) -> None:
    assert validate(item(GrammarSpec.regex(pattern)), "aa") is None
    assert validate(schema({"pattern": pattern}), '"aa"') is None


def test_patterns_of_a_schema_are_those_of_ecma_262() -> None:
    assert validate(schema({"pattern": r"^\u00e9\/\p{Lu}$"}), '"é/É"') is True
    assert validate(schema({"pattern": r"^\\u00e9$"}), r'"\\u00e9"') is True
    assert validate(schema({"pattern": r"^\d$"}), '"٣"') is False  # ASCII digits only
    assert validate(schema({"pattern": "a$"}), r'"a\n"') is False


def test_half_a_surrogate_pair_fits_no_pattern_and_gives_no_verdict() -> None:
    assert validate(schema({"pattern": "a"}), r'"\ud800"') is None


def test_a_property_belongs_to_names_patterns_or_the_rest() -> None:
    named = {
        "properties": {"a": {"type": "null"}},
        "patternProperties": {"^b": {"type": "boolean"}},
        "additionalProperties": {"type": "integer"},
    }
    values = ('{"a":null,"b1":true,"c":3}', '{"a":3}', '{"b1":3}', '{"c":null}')
    assert [validate(schema(named), value) for value in values] == [True, False, False, False]


def test_unevaluated_properties_beside_patterns_give_no_verdict() -> None:
    beside = {"patternProperties": {"^a": {}}, "unevaluatedProperties": False}
    assert validate(schema(beside), '{"a":1}') is None
    assert validate(schema({"unevaluatedProperties": False}), '{"a":1}') is False
