"""Grammars are validated before they are compiled, and compiled once (V1.6)."""

from __future__ import annotations

import math
import subprocess
import sys
from threading import Event

import pytest

from harness.errors import ConfigError, GrammarError
from harness.grammar.canonical import canonical
from harness.grammar.service import GrammarConfig, GrammarService, grammar_engine
from harness.grammar.spec import MAX_DEPTH, GrammarSpec
from tests.grammar.languages import TABLE, choice

HANGING = """
from threading import Event
from harness.errors import GrammarError
from harness.grammar.service import GrammarConfig, GrammarService, grammar_engine
from tests.grammar.languages import TABLE, choice

engine = grammar_engine("xgrammar", TABLE)
engine.compile = lambda spec: Event().wait()
try:
    GrammarService(engine, GrammarConfig(timeout_s=0.05)).compile(choice("a"))
except GrammarError:
    print("timed out")
"""
"""A process that ends while a thread compiles for ever."""


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"type": "object", "properties": {"b": {"type": "null"}, "a": {"minimum": 1}}},
         {"properties": {"b": {"type": "null"}, "a": {"minimum": 1}}, "type": "object"}),
        ({"anyOf": [{"type": "null", "title": "a"}]}, {"anyOf": [{"title": "a", "type": "null"}]}),
        ({"$defs": {"x": {"type": "null", "title": "a"}}, "$ref": "#/$defs/x"},
         {"$ref": "#/$defs/x", "$defs": {"x": {"title": "a", "type": "null"}}}),
    ],
)  # fmt: skip
def test_the_order_of_keywords_is_no_other_grammar_s3a(engine, compiled, one, other):
    service = GrammarService(engine)
    service.compile(GrammarSpec.json_schema(one))
    service.compile(GrammarSpec.json_schema(other))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}}),
        ({"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}),
        ({"enum": [{"type": 1, "a": 2}]}, {"enum": [{"a": 2, "type": 1}]}),
        ({"enum": [1, 2]}, {"enum": [2, 1]}),
        ({"prefixItems": [{"type": "null"}, {}]}, {"prefixItems": [{}, {"type": "null"}]}),
        ({"properties": {"type": {}, "items": {}}}, {"properties": {"items": {}, "type": {}}}),
    ],
)
def test_the_order_of_properties_and_data_is_another_grammar(one, other):
    """Engines write properties and constants in the order of the schema."""
    assert canonical(GrammarSpec.json_schema(one)) != canonical(GrammarSpec.json_schema(other))


def test_the_same_choices_are_one_grammar_in_any_order(engine, compiled):
    service = GrammarService(engine)
    service.compile(choice("a", "ab", "b"))
    assert service.compile(choice("b", "a", "ab", "a"))[1] == 0.0
    assert compiled == [choice("a", "ab", "b")]


def test_a_grammar_asked_for_again_while_it_is_compiled_is_compiled_once_s3b(engine, compiled):
    service = GrammarService(engine)
    for _ in range(3):
        service.start(choice("a", "b"))
    service.compile(choice("b", "a"))
    assert len(compiled) == 1


def test_a_bad_schema_sent_ten_thousand_times_is_compiled_once_s3e(engine, compiled):
    service = GrammarService(engine)
    for _ in range(10_000):
        with pytest.raises(GrammarError, match=r"^grammar\.regex: "):
            service.compile(GrammarSpec.regex("("))
    assert len(compiled) == 1
    assert (service.counts.failed, service.counts.failed_hits) == (1, 9_999)


def test_a_failure_is_forgotten_after_its_time_s3e(engine, compiled):
    time = 0.0
    service = GrammarService(engine, GrammarConfig(retry_s=60.0), now=lambda: time)
    for time, compilations in ((0.0, 1), (59.9, 1), (60.0, 2), (119.0, 2)):  # noqa: B007
        with pytest.raises(GrammarError):
            service.compile(GrammarSpec.regex("("))
        assert len(compiled) == compilations


def test_failures_are_not_kept_at_all_if_so_asked_v1_6b(engine, compiled):
    service = GrammarService(engine, GrammarConfig(retry_s=0.0))
    for _ in range(2):
        with pytest.raises(GrammarError):
            service.compile(GrammarSpec.regex("("))
    assert len(compiled) == 2


@pytest.mark.parametrize("error", [ValueError, MemoryError, SystemExit, KeyboardInterrupt])
def test_whatever_an_engine_raises_is_the_failure_of_one_grammar_s3e(engine, monkeypatch, error):
    service = GrammarService(engine)

    def fail(spec):
        raise error("within")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "compile", fail)
        with pytest.raises(GrammarError, match=rf"{engine.name} failed .{error.__name__}: within"):
            service.compile(choice("a"))
    service.compile(choice("b"))


def hang_on(engine, monkeypatch, spec) -> Event:
    """Compiling ``spec`` lasts until the event is set."""
    inner, go_on = engine.compile, Event()

    def compile_or_hang(asked):
        if asked == spec:
            go_on.wait()
        return inner(asked)

    monkeypatch.setattr(engine, "compile", compile_or_hang)
    return go_on


def test_a_compilation_that_hangs_fails_alone_and_late_results_are_dropped_s3f_d4(
    engine, monkeypatch
):
    go_on = hang_on(engine, monkeypatch, choice("a"))
    service = GrammarService(engine, GrammarConfig(threads=1, timeout_s=0.05))
    for spec in (choice("a"), choice("b"), choice("x")):
        service.start(spec)
    with pytest.raises(
        GrammarError, match=r"^grammar\.choice: not compiled within 0\.05 s; .*raise"
    ):
        service.compile(choice("a"))
    service.compile(choice("b"))
    go_on.set()
    service.compile(choice("x"))
    with pytest.raises(GrammarError, match="not compiled within"):
        service.compile(choice("a"))
    assert (service.counts.timed_out, service.counts.failed, service.counts.compiled) == (1, 1, 2)


def test_the_thread_of_a_hanging_compilation_ends_with_it(engine, monkeypatch):
    go_on = hang_on(engine, monkeypatch, choice("a"))
    service = GrammarService(engine, GrammarConfig(threads=1, timeout_s=0.05))
    service.finish([choice("a")])
    hung, other = service._pool.workers
    go_on.set()
    hung.join(5.0)
    assert not hung.is_alive()
    service.compile(choice("b"))
    assert other.is_alive()


def test_a_compilation_that_hangs_does_not_keep_the_process_alive():
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "timed out\n", "")


def test_waiting_for_the_first_of_several_grammars_does_not_wait_for_the_slow_one(
    engine, monkeypatch
):
    go_on = hang_on(engine, monkeypatch, choice("a"))
    service = GrammarService(engine, GrammarConfig(threads=2, timeout_s=30.0))
    service.wait([choice("a"), choice("b")])
    assert not service.ready(choice("a"))
    assert service.ready(choice("b"))
    go_on.set()
    service.compile(choice("a"))


def test_the_least_recently_used_grammar_goes_first(engine, compiled):
    service = GrammarService(engine, GrammarConfig(cache_grammars=2))
    for word in ("a", "b", "a", "x", "a", "b"):
        service.compile(choice(word))
    assert compiled == [choice("a"), choice("b"), choice("x"), choice("b")]
    assert service.cache.evicted == 2
    assert len(service.cache) == 2


def test_grammars_are_bounded_by_the_memory_that_their_engine_says_v1_6c(monkeypatch):
    engine = grammar_engine("xgrammar", TABLE)
    size = engine.compile(choice("a")).memory_bytes
    assert size > 0
    service = GrammarService(engine, GrammarConfig(cache_mb=0))
    for word in ("a", "b", "a"):
        service.compile(choice(word))
        assert len(service.cache) == 1  # the newest stays, however large it is
    assert service.cache.memory_bytes == size
    assert service.counts.compiled == 3


def test_who_asks_first_is_told_the_time_even_if_it_was_compiled_ahead(engine):
    service = GrammarService(engine)
    service.finish([choice("a"), GrammarSpec.regex("("), choice("a")])
    assert [service.compile(choice("a"))[1] > 0.0 for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_s", 0.0),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("timeout_s", 1e300),
        ("retry_s", -1.0),
        ("retry_s", math.nan),
        ("threads", -1),
        ("cache_mb", -1),
        ("cache_grammars", 0),
    ],
)
def test_a_limit_out_of_range_is_refused_with_its_name(field, value):
    with pytest.raises(ConfigError, match=rf"^grammar\.{field}: .* (above|below) "):
        GrammarConfig(**{field: value})


def test_auto_falls_back_to_llguidance_and_says_who_compiled_v1_6e():
    service = GrammarService(grammar_engine("auto", TABLE))
    engine_of = {
        keyword: service.compile(GrammarSpec.json_schema(schema))[0].engine
        for keyword, schema in {
            "type": {"type": "integer"},
            "multipleOf": {"type": "number", "multipleOf": 3},
            "patternProperties": {"type": "object", "patternProperties": {"^a": {}, "^b": {}}},
        }.items()
    }
    assert engine_of == {
        "type": "xgrammar",
        "multipleOf": "llguidance",
        "patternProperties": "llguidance",
    }


def test_auto_fails_with_the_reasons_of_all_engines_v1_6e():
    with pytest.raises(GrammarError, match=r"xgrammar refuses it: .*; grammar\.regex: llguidance"):
        GrammarService(grammar_engine("auto", TABLE)).compile(GrammarSpec.regex("("))


def test_a_named_engine_never_falls_back_v1_6e():
    with pytest.raises(GrammarError, match="multipleOf"):
        GrammarService(grammar_engine("xgrammar", TABLE)).compile(
            GrammarSpec.json_schema({"type": "number", "multipleOf": 3})
        )


def test_an_empty_regex_is_legal_v1_6f(engine):
    assert GrammarService(engine).compile(GrammarSpec.regex(""))[0].matcher().completed


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


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 500, 10_000])
def test_a_schema_nested_too_deep_never_reaches_the_engine_v1_6f(engine, compiled, levels):
    service = GrammarService(engine)
    service.compile(GrammarSpec.json_schema(nested(MAX_DEPTH)))
    with pytest.raises(GrammarError, match="deeper than 64"):
        GrammarSpec.json_schema(nested(levels))
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
    with pytest.raises(
        ConfigError, match="'outline' is unknown; use one of xgrammar, llguidance, outlines, auto"
    ):
        grammar_engine("outline", TABLE)
