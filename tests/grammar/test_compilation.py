"""Threads that are stuck inside an engine are bounded; what would crash one never gets there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from harness.errors import GrammarError
from harness.grammar.compilation import MAX_STUCK
from harness.grammar.matcher import GrammarEngine
from harness.grammar.service import GrammarConfig, GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.validation import MAX_GROUPS, MAX_LEVELS, validate
from tests.grammar.languages import TABLE, choice

TIMEOUT_S = 0.15
"""Long for a sound compilation, which takes a millisecond; each stuck one is waited for."""

STUCK = f"{MAX_STUCK} compilations before it were given up on"


def slow(number: int) -> GrammarSpec:
    return GrammarSpec.regex(f"a{{{number + 1}}}")


class Slow:
    """Makes services over an engine that compiles regexes once ``go_on`` is set."""

    def __init__(self, engine: GrammarEngine) -> None:
        self.go_on, self._engine = Event(), engine
        self._services: list[GrammarService] = []  # their ends would wait for the stuck threads

    def service(self, threads: int) -> GrammarService:
        self._services.append(
            GrammarService(self._engine, GrammarConfig(threads=threads, timeout_s=TIMEOUT_S))
        )
        return self._services[-1]


@pytest.fixture
def slowly(monkeypatch) -> Iterator[Slow]:
    engine = grammar_engine("xgrammar", TABLE)
    inner, made = engine.compile, Slow(engine)

    def compile_or_hang(spec):
        if spec.kind == "regex":
            made.go_on.wait()
        return inner(spec)

    monkeypatch.setattr(engine, "compile", compile_or_hang)
    yield made
    made.go_on.set()


def reasons(service: GrammarService, *specs: GrammarSpec) -> list[str]:
    """Why each of them failed; empty = it did not."""
    found = []
    for spec in specs:
        try:
            service.compile(spec)
            found.append("")
        except GrammarError as error:
            found.append(str(error))
    return found


def stuck(service: GrammarService) -> int:
    return sum(worker.is_alive() for worker in service._pool._given_up)


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_threads_may_be_stuck_and_no_more(slowly, threads):
    service = slowly.service(threads)
    found = reasons(service, *map(slow, range(2 * MAX_STUCK)))
    assert all("not compiled within" in reason for reason in found[:MAX_STUCK])
    assert all(STUCK in reason for reason in found[MAX_STUCK:])
    assert stuck(service) == MAX_STUCK
    assert sum(worker.is_alive() for worker in service._pool.workers) <= MAX_STUCK + threads


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_queued_behind_the_last_one_is_refused_and_does_not_wait_for_ever(slowly, threads):
    service = slowly.service(threads)
    specs = [*map(slow, range(MAX_STUCK + threads)), choice("a")]
    service.finish(specs)
    *hung, queued = reasons(service, *specs)
    assert sum("not compiled within" in reason for reason in hung) >= MAX_STUCK
    assert queued == "" or STUCK in queued


def test_below_the_bound_a_stuck_thread_is_replaced(slowly):
    service = slowly.service(1)
    service.finish(map(slow, range(MAX_STUCK - 1)))
    assert reasons(service, choice("a")) == [""]


def test_a_refused_grammar_is_no_failure_that_is_remembered(slowly):
    service = slowly.service(1)
    service.finish(map(slow, range(MAX_STUCK)))
    assert STUCK in reasons(service, choice("a"))[0]
    slowly.go_on.set()
    deadline = time.monotonic() + 5
    while stuck(service) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert reasons(service, choice("a")) == [""]


def chain(keyword: str, length: int) -> dict:
    """Definitions that refer to each other, from the last to the first in the text."""
    links = {f"n{i}": {keyword: link(keyword, i + 1)} for i in reversed(range(length))}
    return {"$defs": {**links, f"n{length}": {"type": "null"}}, "$ref": "#/$defs/n0"}


def link(keyword: str, to: int) -> Any:
    ref = {"$ref": f"#/$defs/n{to}"}
    return {"$ref": ref["$ref"], "items": ref, "properties": {"a": ref}}.get(keyword, [ref])


@pytest.mark.parametrize("keyword", ["$ref", "items", "properties", "anyOf", "allOf"])
def test_references_too_deep_for_a_stack_never_reach_the_engine_v1_6f(engine, keyword):
    with pytest.raises(GrammarError, match=f"more than {MAX_LEVELS} schemas inside each other"):
        validate(GrammarSpec.json_schema(chain(keyword, 20_000)))
    assert reasons(GrammarService(engine), GrammarSpec.json_schema(chain(keyword, 150))) == [""]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}},
        {
            "$defs": {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{(i + 1) % 9}"}]} for i in range(9)},
            "properties": {f"p{i}": {"$ref": f"#/$defs/n{i % 9}"} for i in range(900)},
        },
    ],
)
def test_a_recursive_schema_is_as_deep_as_it_is_long(schema):
    validate(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(
    "pattern",
    ["(" * 20_000 + "a" + ")" * 20_000, "(a|b" * 9_000 + ")" * 9_000, "a" + "{0,2}" * 20_000],
)
@pytest.mark.parametrize("keyword", ["pattern", "patternProperties", "regex"])
def test_a_pattern_too_deep_for_a_stack_never_reaches_the_engine_v1_6f(keyword, pattern):
    value = {pattern: True} if keyword == "patternProperties" else pattern
    regex = keyword == "regex"
    spec = GrammarSpec.regex(pattern) if regex else GrammarSpec.json_schema({keyword: value})
    with pytest.raises(GrammarError, match=f"more than {MAX_GROUPS} groups"):
        validate(spec)


@pytest.mark.parametrize(
    "pattern", [r"\(" * 900, "[(*]" * 900, "(a*)+" * 900, "[(" + "(" * 900, "a?b" * 900]
)
def test_brackets_that_open_no_group_and_groups_in_a_row_are_not_deep(pattern):
    validate(GrammarSpec.regex(pattern))


def test_a_pattern_need_not_be_one_of_pythons():
    validate(GrammarSpec.json_schema({"type": "string", "pattern": r"^\p{Lu}$"}))


def test_a_reference_that_leads_nowhere_is_up_to_the_engine():
    for ref in ("#/no/where", "#anchor", "http://[", "other.json#/a", "#/%zz"):
        validate(GrammarSpec.json_schema({"$ref": ref}))


SELF = {"$ref": "#"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema({"type": "object", "properties": {"a": SELF}, "required": ["a"]}),
        GrammarSpec.json_schema({"type": "array", "items": SELF, "minItems": 1}),
        GrammarSpec.ebnf('root ::= "a" root'),
        GrammarSpec.ebnf('root ::= "a" | "b" x\nx ::= y{2,3}\ny ::= "a" y | "b" x'),
        GrammarSpec.ebnf('root ::= "a" | x{0,2}\nx ::= "b" x'),
    ],
)
def test_xgrammar_is_not_asked_for_a_forced_text_that_has_no_end(spec):
    """It would never return (found by the fault campaign)."""
    engine = grammar_engine("xgrammar", TABLE)
    with pytest.raises(GrammarError, match=r"no finite text fits its rule .*give it a way out"):
        engine.compile(spec)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema({"type": "object", "properties": {"a": SELF}}),
        GrammarSpec.json_schema({"type": "array", "items": SELF}),
        GrammarSpec.json_schema({"anyOf": [{"type": "null"}, {"type": "array", "items": SELF}]}),
        GrammarSpec.ebnf('root ::= "a" root | "b"'),
        GrammarSpec.ebnf('root ::= x{2,3}\nx ::= y "a"\ny ::= "" | x'),
        GrammarSpec.ebnf('root ::= "b" root{0,2}'),
    ],
)
def test_a_recursive_grammar_with_a_way_out_is_compiled(engine, spec):
    engine.compile(spec).matcher().forced_text()


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "multipleOf": 1024}, None),
        ({"type": "integer", "multipleOf": 1025}, "multipleOf above 1024"),
        ({"type": "integer", "multipleOf": 12, "minimum": 0}, "multipleOf beside minimum"),
        ({"type": "string", "pattern": "^(?!ab)"}, "lookahead"),
        ({"type": "string", "pattern": r"^a(?=b)"}, "lookahead"),
        ({"type": "string", "pattern": "^(?:ab)$"}, None),
    ],
)
def test_what_xgrammar_would_drop_with_a_warning_is_refused_v1_6g(schema, problem):
    """Its warnings go to the standard error of the process, where no request sees them."""
    engine = grammar_engine("xgrammar", TABLE)
    if problem is None:
        engine.compile(GrammarSpec.json_schema(schema))
    else:
        with pytest.raises(GrammarError, match=f"xgrammar ignores {problem}"):
            engine.compile(GrammarSpec.json_schema(schema))
