"""A grammar means the same to every engine, whatever the engine's own dialect."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from harness.errors import GrammarError
from harness.grammar.matcher import TokenTable
from harness.grammar.service import grammar_engine
from harness.grammar.spec import GrammarSpec
from tests.grammar.languages import allowed, choice, quick, row, start

BYTES = TokenTable((*(bytes([byte]) for byte in range(256)), b""), frozenset({256}), 256)
PERSON = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", None]}},
        "required": ["b", "a"],
        "additionalProperties": False,
    }
)


def matches(engine, spec: GrammarSpec, text: str, whitespace="compact") -> bool:
    """True if ``text`` is a whole output of the grammar, read byte by byte."""
    matcher = grammar_engine(engine.name, BYTES, whitespace).compile(spec).matcher()
    return matcher.accept([*text.encode(), BYTES.eos_id])


def test_a_stop_token_with_bytes_of_its_own_is_no_text_r19(engine):
    table = TokenTable((b"a", b"b", b""), frozenset({1, 2}), 2)
    matcher = grammar_engine(engine.name, table).compile(choice("ab")).matcher()
    assert matcher.forced_text() == "ab"
    assert matcher.forced_tokens() == [0]
    assert matcher.accept([0])
    assert allowed(row(matcher)) == set()
    assert not matcher.accept([1])


STYLES = {
    "compact": '{"b": 1, "a": "x"}',
    "minimal": '{"b":1,"a":"x"}',
    "free": '{ "b" : 1,\n"a": "x" }',
}


@pytest.mark.parametrize("style", STYLES)
def test_json_has_the_whitespace_that_was_asked_for(engine, style):
    for other, text in STYLES.items():
        assert matches(engine, PERSON, text, style) == (style in (other, "free"))


def test_properties_come_in_the_order_of_the_schema(engine):
    assert not matches(engine, PERSON, '{"a": "x", "b": 1}')


def test_the_boolean_schema_true_allows_any_json(engine):
    anything = GrammarSpec.json_schema(True)
    assert matches(engine, anything, '{"a": [1, null]}')
    assert not matches(engine, anything, '{"a":[1,null]}')


@quick
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_a_choice_is_taken_literally(engine, words):
    words = [*words, 'a"b', "a", "\\n[x]{2}/|é😀\n"]
    matcher = grammar_engine(engine.name, BYTES).compile(choice(*words)).matcher()
    for word in words:
        tokens = [*word.encode(), BYTES.eos_id]
        assert matcher.accept(tokens)
        matcher.rollback(len(tokens))
    assert not matcher.accept(b"ab")


def test_longest_lexemes_do_not_hide_other_splits(engine):
    grammar = GrammarSpec.ebnf('root ::= word "b"\nword ::= [a-z]+')
    assert start(engine, grammar, "abxab$").terminated


def test_a_recursive_root_stays_recursive(engine):
    grammar = GrammarSpec.ebnf('root ::= "{" root "}" | "x"')
    assert start(engine, grammar, "{{x}}$").terminated


@pytest.mark.parametrize(
    "source",
    [r'root ::= "\x61" "\u00e9" "\U00000062"', r'root ::= [\x61] [\u00e9] [^\x5b\x00-\x1f"\\]'],
)
def test_ebnf_escapes_mean_the_same_to_every_engine(engine, source):
    assert start(engine, GrammarSpec.ebnf(source), "aéb$").terminated


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b"])
def test_a_slash_in_a_regex_is_a_slash(engine, pattern):
    assert matches(engine, GrammarSpec.regex(pattern), "a/b")


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.regex("("),
        GrammarSpec.ebnf('root ::= "'),
        GrammarSpec.ebnf('start ::= "a"'),
        GrammarSpec.json_schema({"$ref": "#/$defs/none"}),
        GrammarSpec.json_schema({"type": "string", "pattern": "("}),
        GrammarSpec.json_schema(False),
    ],
)
def test_a_refused_grammar_is_one_line_that_names_its_field(engine, spec):
    with pytest.raises(GrammarError, match=rf"^grammar\.{spec.kind}: [^\n]+$"):
        engine.compile(spec)


def test_xgrammar_forgets_what_a_string_is_where_its_length_is_bounded(engine):
    """xgrammar 0.2.9 counts raw characters then: control characters pass, which no JSON has, and
    escapes do not. vLLM passes such schemas on, and so does the adapter."""
    bounded = GrammarSpec.json_schema({"type": "string", "maxLength": 5})
    strict = engine.name != "xgrammar"
    assert matches(engine, bounded, '"\t"') != strict
    assert matches(engine, bounded, '"\\t"') == strict
    for spec in (bounded, GrammarSpec.json_schema({"type": "string"})):
        assert matches(engine, spec, '"ab"')
    assert not matches(engine, GrammarSpec.json_schema({"type": "string"}), '"\t"')
