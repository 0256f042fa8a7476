"""What a request may ask for, before any engine sees it (V1.6f, S3g)."""

from __future__ import annotations

import pytest

from harness.errors import GrammarError
from harness.grammar.spec import GrammarSpec


def test_equal_schemas_are_equal_specs():
    assert GrammarSpec.json_schema('{ "type" : "null" }') == GrammarSpec.json_schema(
        {"type": "null"}
    )


def test_the_order_of_properties_tells_schemas_apart():
    left = GrammarSpec.json_schema({"properties": {"a": True, "b": True}})
    assert left != GrammarSpec.json_schema({"properties": {"b": True, "a": True}})


def test_a_spec_gives_back_what_it_was_built_from():
    assert GrammarSpec.choice(["a", "é"]).value == ["a", "é"]
    assert GrammarSpec.json_schema(True).value is True
    assert GrammarSpec.regex("[0-9]+").value == "[0-9]+"


def test_an_empty_regex_is_legal_v1_6f():
    assert GrammarSpec.regex("").text == ""


@pytest.mark.parametrize("schema", ["", "  ", "{", "[]", "1", [1]])
def test_what_is_no_schema_is_refused_v1_6f(schema):
    with pytest.raises(GrammarError, match=r"^grammar\.json_schema: "):
        GrammarSpec.json_schema(schema)


@pytest.mark.parametrize("choices", [[], "ab", [1]])
def test_what_is_no_list_of_choices_is_refused_v1_6f(choices):
    with pytest.raises(GrammarError, match=r"^grammar\.choice: "):
        GrammarSpec.choice(choices)


def test_a_blank_grammar_is_refused_v1_6f():
    with pytest.raises(GrammarError, match="blank"):
        GrammarSpec.ebnf(" \n")


@pytest.mark.parametrize(
    "build",
    [
        lambda: GrammarSpec.regex("a\x00"),
        lambda: GrammarSpec.ebnf('root ::= "\x00"'),
        lambda: GrammarSpec.choice(["a", "\x00"]),
        lambda: GrammarSpec.json_schema({"properties": {"a\x00": True}}),
        lambda: GrammarSpec.json_schema('{"enum": [["\\u0000"]]}'),
    ],
)
def test_a_nul_is_refused_wherever_it_hides_s3g(build):
    with pytest.raises(GrammarError, match="NUL"):
        build()


def test_an_unknown_kind_is_refused():
    with pytest.raises(GrammarError, match="none of json_schema, regex, choice, ebnf"):
        GrammarSpec("lark", "start: x")  # type: ignore[arg-type]
