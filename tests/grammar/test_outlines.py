"""outlines-core keeps the matcher contract within its limits, and is refused beyond them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from hypothesis import given, strategies as st

from harness.errors import ConfigError, GrammarError, MatcherError
from harness.grammar.matcher import ALL, TokenTable
from harness.grammar.outlines import MAX_ROLLBACK
from harness.grammar.service import GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from tests.grammar.languages import (
    EOS,
    SPECIAL,
    STOP,
    TABLE,
    TOKENS,
    allowed,
    choice,
    encode,
    legal,
    quick,
    row,
    start,
)
from tests.toys import Toy, random_law, request, toy_table

pytest.importorskip("outlines_core", reason="outlines-core is not installed")

OUTLINES = grammar_engine("outlines", TABLE)
OBJECT = GrammarSpec.regex(r'\{"a":1\}')
WORDS = st.lists(st.text('abx{é:"\\è', max_size=5), min_size=1, max_size=4)
TOKEN_LISTS = st.lists(st.integers(-2, len(TABLE) + 1), max_size=6)
ASCII = [bytes([byte]) for byte in range(32, 127)]
BYTES = TokenTable((*ASCII, b"\n", b"\xc3", b"\xa9", b""), frozenset({98}), 98)


def legal_here(words: list[str], prefix: list[int]) -> set[int]:
    """``legal``, without what outlines-core loses: tokens whose last byte leads from a whole
    output to one that is not."""
    text = b"".join(TABLE.tokens[token] for token in prefix)
    whole = {word.encode() for word in words}
    return {
        token
        for token in legal(words, prefix)
        for after in [text + TABLE.tokens[token]]
        if token in TABLE.stop_ids or after in whole or after[:-1] not in whole
    }


@quick
@given(words=WORDS, tokens=TOKEN_LISTS, keep=st.integers(0, 6))
def test_masks_counts_and_rollbacks_are_those_of_the_language(words, tokens, keep):
    """Choices are exact, though alternatives are leftmost-first."""
    matcher, prefix = OUTLINES.compile(choice(*words)).matcher(), []
    for token in tokens:
        may = legal_here(words, prefix)
        assert allowed(row(matcher)) == may
        assert {t for t in range(-2, len(TABLE) + 2) if matcher.validate([t])} == may
        assert matcher.completed == (may == TABLE.stop_ids)
        if matcher.accept([token]):
            prefix.append(token)
        assert matcher.held == len(prefix)
        if matcher.terminated:
            break
    matcher.rollback(len(prefix[keep:]))
    ended = prefix[:keep] == prefix and matcher.terminated
    assert allowed(row(matcher)) == (set(range(32)) if ended else legal_here(words, prefix[:keep]))
    assert allowed(row(matcher.fork())) == allowed(row(matcher))


def test_no_byte_leads_out_of_a_whole_output_into_one_that_is_not():
    """A fault of its own, stated in the adapter; a longer token does lead there."""
    matcher = start(OUTLINES, GrammarSpec.regex("a(xx)?"), "a")
    assert allowed(row(matcher)) == {*encode("xx"), EOS, STOP}


def test_a_refused_list_or_token_leaves_nothing_behind_v1_4e():
    matcher = start(OUTLINES, OBJECT, "{")
    before = row(matcher)
    for tokens in (encode('"a"x'), [-1], [2**40], [TOKENS.index(SPECIAL)], [EOS]):
        assert not matcher.accept(tokens)
        assert torch.equal(row(matcher), before)
    assert matcher.accept(encode('"a":1}$'))


@pytest.mark.parametrize("stop", [EOS, STOP])
def test_the_stop_token_is_one_step_and_allows_all_behind_it_t11_r9(stop):
    matcher = start(OUTLINES, OBJECT, '{"a":1}')
    before = row(matcher)
    assert allowed(before) == {EOS, STOP}
    assert matcher.accept([stop])
    assert bool((row(matcher, words=3) == ALL).all())
    matcher.rollback(1)
    assert torch.equal(row(matcher), before)


def test_forks_share_the_past_and_nothing_else_q8():
    matcher = start(OUTLINES, OBJECT, '{"a"')
    fork = matcher.fork()
    before = row(matcher)
    assert fork.accept(encode(":1}$"))
    assert torch.equal(row(matcher), before)
    fork.rollback(4)
    assert torch.equal(row(fork), before)


def test_more_than_is_held_cannot_be_rolled_back_v1_2i():
    with pytest.raises(MatcherError, match="holds 1"):
        start(OUTLINES, OBJECT, "{").rollback(2)


def test_nothing_is_forced():
    assert start(OUTLINES, OBJECT).forced_text() == ""
    assert start(OUTLINES, OBJECT).forced_tokens() == []


def test_as_many_tokens_can_be_taken_back_as_it_says():
    assert OUTLINES.max_rollback == MAX_ROLLBACK
    matcher = start(OUTLINES, GrammarSpec.regex("a*b"), "a" * (MAX_ROLLBACK + 8))
    matcher.rollback(MAX_ROLLBACK)
    assert matcher.accept(encode("b"))


def schema_outputs(schema: object, whitespace: str, *texts: str) -> list[bool]:
    """Which of the texts the grammar of a schema accepts."""
    compiled = grammar_engine("outlines", BYTES, whitespace).compile(
        GrammarSpec.json_schema(schema)
    )
    return [compiled.matcher().accept([*BYTES.encode_greedily(t.encode()), 98]) for t in texts]


@pytest.mark.parametrize(
    ("whitespace", "expected"),
    [
        ("compact", [True, False, False]),
        ("minimal", [False, True, False]),
        ("free", [True, True, True]),
    ],
)
def test_white_space_is_what_it_is_for_the_other_engines(whitespace, expected):
    schema = {
        "type": "object",
        "properties": {"a:": {"type": "array", "items": {"type": "null"}}, "b": {"const": ", :"}},
        "required": ["a:", "b"],
    }
    value = {"a:": [None, None], "b": ", :"}
    texts = [
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, indent=1),
    ]
    assert schema_outputs(schema, whitespace, *texts) == expected


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "minimum": 3}, "does not know minimum"),
        ({"type": "number", "multipleOf": 3}, "does not know multipleOf"),
        ({"type": "array", "uniqueItems": True}, "does not know uniqueItems"),
        ({"type": "object", "patternProperties": {"a": {}}}, "does not know patternProperties"),
        ({"allOf": [{"type": "null"}, {}]}, "does not know allOf"),
        ({"type": "string", "format": "ipv4"}, "format 'ipv4'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "ignores pattern beside maxLength"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
         "ignores additionalProperties beside properties"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b' is required"),
        ({"type": "object", "properties": {'a"': {}}}, "does not escape"),
        ({"enum": [1], "anyOf": [{"type": "null"}]}, "ignores enum beside anyOf"),
        ({"type": "array", "items": {"type": "array", "contains": {}}}, "does not know contains"),
    ],
)  # fmt: skip
def test_what_outlines_would_drop_in_silence_is_refused_v1_6g(schema, problem):
    with pytest.raises(GrammarError, match=rf"^grammar\.json_schema: outlines .*{problem}"):
        GrammarService(OUTLINES).compile(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec.ebnf('root ::= "a"'), "regular grammars only"),
        (GrammarSpec.regex("^a$"), "outlines refuses it"),
        (GrammarSpec.regex("x(Q|a)Q"), "outlines refuses it: .*incompatible"),
        (GrammarSpec.regex("("), "outlines refuses it"),
        (GrammarSpec.json_schema({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                                  "$ref": "#/$defs/n"}), "outlines refuses it: Ref"),
    ],
)  # fmt: skip
def test_what_outlines_cannot_follow_is_refused_with_the_reason(spec, reason):
    with pytest.raises(GrammarError, match=rf"^grammar\.{spec.kind}: .*{reason}"):
        GrammarService(OUTLINES).compile(spec)


def test_alternatives_of_an_expression_are_leftmost_first():
    """Its own semantics, stated in the adapter: ``ab|abx`` never accepts ``abx``."""
    assert OUTLINES.compile(GrammarSpec.regex("ab|abx")).matcher().validate(encode("abx")) == 1
    assert OUTLINES.compile(GrammarSpec.regex("abx|ab")).matcher().validate(encode("abx")) == 2


@pytest.mark.parametrize("strategy", ["plain", "vllm", "trtllm", "llamacpp", "deepinfer"])
def test_every_strategy_that_it_serves_writes_what_xgrammar_would(strategy):
    table = toy_table("pabc")
    laws = random_law(table, 1), random_law(table, 2)
    requests = [request(table, GrammarSpec.regex("(a|bc){2,9}"), f"{i}", seed=i) for i in range(4)]
    outputs = [
        Toy(table, *laws, engine=engine).run(strategy, requests).outputs
        for engine in ("outlines", "xgrammar")
    ]
    assert outputs[0] == outputs[1]


def test_jump_forward_is_refused_by_name_and_goes_without():
    toy = Toy(toy_table("pabc"), random_law(TABLE, 1), random_law(TABLE, 2), engine="outlines")
    with pytest.raises(ConfigError, match="outlines can take back 32 tokens, strategy sglang"):
        toy.loop(toy.strategy("sglang"))
    toy.loop(toy.strategy("sglang", jump_forward=False))


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ConfigError, match="pip install outlines-core"):
        grammar_engine("outlines", TABLE)
