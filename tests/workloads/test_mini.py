"""Our own workload: both engines take it, and accept what we think is an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest
import xgrammar
from llguidance.gbnf_to_lark import any_to_lark

from harness.grammar.spec import GrammarSpec
from harness.workloads.item import Item
from harness.workloads.loaders import WorkloadConfig, load
from harness.workloads.validate import validate

ITEMS = {item.id: item for item in load(WorkloadConfig(name="mini"))}
CONSTRAINED = [item for item in ITEMS.values() if item.grammar is not None]

ANSWERS = {
    "contact": '{"name":"Ada Lovelace","email":"ada@calc.org","city":"London"}',
    "address": '{"customer":"Maria Rossi","address":{"street":"12 Oak Street",'
    '"city":"Springfield","zip":"62704"}}',
    "invoice": '{"lines":[{"item":"notebook","quantity":3,"price":4},'
    '{"item":"pen","quantity":12,"price":1}]}',
    "meeting": '{"title":"Budget review","date":"2025-03-14","time":"09:30","minutes":45}',
    "review": '{"stars":4,"topics":["camera","battery"],"recommended":true}',
    "employee": '{"first":"Grace","middle":null,"last":"Hopper","team":"engineering"}',
    "route": '{"start":{"city":"Lyon","country":"FR"},"end":{"city":"Geneva","country":"CH"},'
    '"km":150}',
    "server": '{"server":{"host":"localhost","port":8080},"tls":true,"debug":false}',
    "lottery": "[3,14,15,49]",
    "location": '{"city":"Nairobi","latitude":-1,"longitude":37}',
    "filter": '{"query":"running shoes","colour":"red","max_price":80,"in_stock":true}',
    "recipe": '{"dish":"Pancakes","ingredients":["flour","milk","eggs"],"minutes":20}',
    "profile-ja": '{"名前":"田中","都市":"東京","年齢":42}',
    "menu-fr": '{"plat":"crème brûlée","prix_€":7,"servi":"dîner"}',
    "tool-weather": '{"name":"get_weather","arguments":{"city":"Paris"}}',
    "tool-lights": '{"name":"set_heat","arguments":{"room":"bedroom","degrees":21}}',
    "tool-pair": '[{"name":"add","arguments":{"a":6,"b":7}},'
    '{"name":"multiply","arguments":{"a":6,"b":7}}]',
    "sentiment": "negative",
    "ticket": "billing: refund",
    "answer-zh": "不确定",
    "season-fr": "hiver",
    "date": "1969-07-20",
    "ip-address": "192.168.1.1",
    "phone": "+1 (555) 555-0100",
    "version": "2.5.0-rc.1",
    "colour": "#ffa500",
    "arithmetic": "(2 + 4) * 4 * 1",
    "sql": "SELECT id, name FROM products WHERE price > 100 ORDER BY name DESC;",
    "cron": "*/15 * * * MON-FRI",
}
"""What a good model would answer, by item."""

WRONG = {
    "contact": '{"name":"Ada Lovelace","email":"ada@calc.org"}',
    "address": '{"customer":"M","address":{"street":"S","city":"C","zip":"6270"}}',
    "invoice": '{"lines":[{"item":"pen","quantity":0,"price":1}]}',
    "meeting": '{"title":"B","date":"2025-13-14","time":"09:30","minutes":45}',
    "employee": '{"first":"G","middle":false,"last":"H","team":"sales"}',
    "lottery": "[3,14,15,50]",
    "filter": '{"colour":"red"}',
    "profile-ja": '{"名前":"田中","都市":"京都府","年齢":42}',
    "tool-weather": '{"name":"get_weather","arguments":{"to":"Paris"}}',
    "tool-lights": '{"name":"set_heat","arguments":{"room":"bedroom","on":true}}',
    "answer-zh": "不",
    "ip-address": "192.168.1.256",
    "version": "2.05.0",
    "arithmetic": "24",
    "sql": "SELECT id FROM products WHERE price >= 100;",
    "cron": "60 * * * *",
}
"""Near misses: a wrong answer that differs in the one thing that the grammar is there for."""

MISREAD = {"multipleOf", "uniqueItems", "contains", "format", "allOf", "patternProperties", "not"}
"""Keywords that an engine ignores or gets wrong without a word (or in some combinations)."""

STOP = 256


def xgrammar_accepts(spec: GrammarSpec, text: str) -> bool:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[STOP])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    match spec.kind:
        case "json_schema":
            compiled = compiler.compile_json_schema(
                spec.text, any_whitespace=False, separators=(",", ":")
            )
        case "regex":
            compiled = compiler.compile_regex(spec.text)
        case _:
            compiled = compiler.compile_grammar(gbnf(spec))
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.accept_token(STOP))


def llguidance_accepts(spec: GrammarSpec, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    match spec.kind:
        case "json_schema":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                spec.text, overrides={"whitespace_flexible": False}
            )
        case "regex":
            grammar = llguidance.LLMatcher.grammar_from_regex(spec.text)
        case _:
            grammar = llguidance.LLMatcher.grammar_from_lark(any_to_lark(gbnf(spec)))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return bool(matcher.validate_tokens(ids) == len(ids)) and (
        bool(matcher.consume_tokens(ids)) and bool(matcher.is_accepting())
    )


def gbnf(spec: GrammarSpec) -> str:
    if spec.kind == "choice":
        return "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in spec.value)
    return spec.text


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all objects inside it."""
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, (dict, list)):
        for inner in schema.values() if isinstance(schema, dict) else schema:
            yield from subschemas(inner)


def schemas() -> Iterator[dict[str, Any]]:
    for item in CONSTRAINED:
        if item.grammar is not None and item.grammar.kind == "json_schema":
            yield from subschemas(item.grammar.value)


def test_every_line_is_good() -> None:
    assert [item.error for item in ITEMS.values() if item.error] == []


def test_workload_is_diverse() -> None:
    assert len(ITEMS) >= 32
    kinds = [item.grammar.kind for item in CONSTRAINED if item.grammar is not None]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "json_schema": 17,
        "choice": 4,
        "regex": 5,
        "ebnf": 3,
    }
    assert len(ITEMS) - len(CONSTRAINED) == 4


def test_smoke_subset_is_small_and_touches_every_kind() -> None:
    smoke = load(WorkloadConfig(name="mini", smoke_only=True))
    assert len(smoke) == 8
    grammars = {item.grammar.kind if item.grammar else "none" for item in smoke}
    assert grammars == {"json_schema", "regex", "choice", "ebnf", "none"}


def test_free_text_is_bounded_by_the_item() -> None:
    free = [item for item in ITEMS.values() if item.grammar is None]
    assert all(item.max_new_tokens is not None and item.max_new_tokens <= 64 for item in free)


def test_no_schema_uses_a_keyword_that_an_engine_misreads() -> None:
    assert [schema for schema in schemas() if schema.keys() & MISREAD] == []


def test_every_string_and_array_is_bounded() -> None:
    for schema in schemas():
        if schema.get("type") == "string":
            assert len(schema.keys() & {"maxLength", "pattern"}) == 1, schema
        if schema.get("type") == "array":
            assert schema["maxItems"] <= 4
        if schema.get("type") == "object":
            assert schema["additionalProperties"] is False


def test_every_constrained_item_has_an_answer() -> None:
    assert ANSWERS.keys() == {item.id for item in CONSTRAINED}


@pytest.mark.parametrize("item", CONSTRAINED, ids=lambda item: item.id)
def test_answer_is_accepted_by_both_engines_and_the_judge(item: Item) -> None:
    assert item.grammar is not None
    answer = ANSWERS[item.id]
    assert xgrammar_accepts(item.grammar, answer)
    assert llguidance_accepts(item.grammar, answer)
    assert validate(item, answer) is True


@pytest.mark.parametrize("item_id", WRONG)
def test_near_miss_is_refused_by_both_engines_and_the_judge(item_id: str) -> None:
    item = ITEMS[item_id]
    assert item.grammar is not None
    assert not xgrammar_accepts(item.grammar, WRONG[item_id])
    assert not llguidance_accepts(item.grammar, WRONG[item_id])
    assert validate(item, WRONG[item_id]) is False
