"""The judge that knows nothing of the grammar engines."""

from __future__ import annotations

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
        {"pattern": "\\p{Lu}+"},
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


def test_regex_of_another_dialect_gives_no_verdict() -> None:
    assert validate(item(GrammarSpec.regex("\\p{Lu}+")), "A") is None


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
