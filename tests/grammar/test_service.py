"""Grammars are validated before they are compiled, and compiled once (V1.6)."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError, GrammarError
from harness.grammar.service import MAX_DEPTH, GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from tests.grammar.languages import TABLE, choice


@pytest.fixture
def compiled(engine, monkeypatch) -> list[GrammarSpec]:
    """The specs that reach the engine, as they do."""
    specs: list[GrammarSpec] = []
    inner = engine.compile

    def compile_and_note(spec):
        specs.append(spec)
        return inner(spec)

    monkeypatch.setattr(engine, "compile", compile_and_note)
    return specs


def nested(levels: int) -> dict:
    """A schema of ``levels`` nested objects."""
    schema: dict = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_equal_specs_share_one_compilation(engine, compiled):
    service = GrammarService(engine)
    first, first_ms = service.compile(GrammarSpec.json_schema({"type": "null"}))
    again, again_ms = service.compile(GrammarSpec.json_schema('{"type": "null"}'))
    assert again is first
    assert first_ms > 0.0
    assert again_ms == 0.0
    assert len(compiled) == 1


def test_other_specs_are_compiled_on_their_own(engine, compiled):
    service = GrammarService(engine)
    assert service.compile(choice("a"))[0] is not service.compile(choice("b"))[0]
    assert len(compiled) == 2


def test_a_failure_is_raised_each_time_and_not_cached_v1_6b(engine, compiled):
    service = GrammarService(engine)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"^grammar\.regex: "):
            service.compile(GrammarSpec.regex("("))
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "objekt"}, r"\$\.type.*'objekt'"),
        ({"properties": {"a": {"minimum": "1"}}}, r"\$\.properties\.a\.minimum"),
        ({"enum": "a"}, r"\$\.enum"),
    ],
)
def test_an_invalid_schema_never_reaches_the_engine(engine, compiled, schema, where):
    with pytest.raises(GrammarError, match=rf"^grammar\.json_schema: invalid at {where}"):
        GrammarService(engine).compile(GrammarSpec.json_schema(schema))
    assert compiled == []


def test_a_schema_nested_too_deep_never_reaches_the_engine_v1_6f(engine, compiled):
    service = GrammarService(engine)
    service.compile(GrammarSpec.json_schema(nested(MAX_DEPTH)))
    with pytest.raises(GrammarError, match="deeper than 64"):
        service.compile(GrammarSpec.json_schema(nested(MAX_DEPTH + 1)))
    assert len(compiled) == 1


def test_a_schema_of_no_named_dialect_never_reaches_the_engine(engine, compiled):
    with pytest.raises(GrammarError, match=r"\$schema is no string"):
        GrammarService(engine).compile(GrammarSpec.json_schema({"$schema": ["x"]}))
    assert compiled == []


def test_a_lone_surrogate_never_reaches_the_engine(engine, compiled):
    with pytest.raises(GrammarError, match="surrogate"):
        GrammarService(engine).compile(choice("\ud800"))
    assert compiled == []


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": ["null", "number"], "multipleOf": 3}, "multipleOf"),
        ({"multipleOf": 3}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "array", "minContains": 1}, "minContains"),
        ({"type": "array", "maxContains": 1}, "maxContains"),
        ({"type": "string", "format": "idn-email"}, "format 'idn-email'"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "length bounds beside pattern"),
        ({"type": "string", "format": "date", "minLength": 3}, "length bounds beside format"),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"b": {}}},
         "propertyNames beside properties"),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
         "propertyNames beside patternProperties"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames without type"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "one pattern"),
        ({"type": "object", "patternProperties": {"a": {}}, "properties": {"ab": {}}},
         "keys in properties"),
        ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": True},
         "additionalProperties override"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"$defs": {"n": {"type": "array", "uniqueItems": True}}, "$ref": "#/$defs/n"},
         "uniqueItems"),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "number", "multipleOf": 2}]}}},
         "multipleOf"),
    ],
)  # fmt: skip
def test_what_xgrammar_would_drop_in_silence_is_refused_v1_6g(schema, keyword):
    service = GrammarService(grammar_engine("xgrammar", TABLE))
    with pytest.raises(GrammarError, match=rf"^grammar\.json_schema: xgrammar .*{keyword}"):
        service.compile(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 3},
        {"type": "array", "uniqueItems": False},
        {"type": "string", "format": "date"},
        {"type": "string", "maxLength": 3},
        {"type": "object", "propertyNames": {"pattern": "a"}},
        {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False},
        {"allOf": [{"type": "integer"}]},
        {"type": "object", "properties": {"uniqueItems": {"type": "null"}}},
        {"enum": [{"multipleOf": 3, "uniqueItems": True}]},
        {"type": "null", "default": {"allOf": [1, 2]}},
    ],
)
def test_what_xgrammar_does_follow_is_not_refused(schema):
    GrammarService(grammar_engine("xgrammar", TABLE)).compile(GrammarSpec.json_schema(schema))


def test_the_limits_of_xgrammar_are_not_those_of_llguidance():
    service = GrammarService(grammar_engine("llguidance", TABLE))
    service.compile(GrammarSpec.json_schema({"type": "number", "multipleOf": 3}))


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'outline' is unknown; use one of xgrammar, llguidance"):
        grammar_engine("outline", TABLE)
