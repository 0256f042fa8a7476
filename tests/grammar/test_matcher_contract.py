"""The matcher contract (spec/comparison.md), held by every grammar engine alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from harness.errors import MatcherError
from harness.grammar.matcher import ALL
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
    forced,
    legal,
    quick,
    row,
    start,
)

OBJECT = GrammarSpec.ebnf(r'root ::= "{" "\"a\"" ":" "1" "}"')
WORDS = st.lists(st.text('abx{é:"\\è', max_size=5), min_size=1, max_size=4)
TOKEN_LISTS = st.lists(st.integers(-2, len(TABLE) + 1), max_size=6)


@quick
@given(words=WORDS, tokens=TOKEN_LISTS)
def test_masks_and_counts_are_those_of_the_language(engine, words, tokens):
    matcher, prefix, text = engine.compile(choice(*words)).matcher(), [], True
    for token in tokens:
        may = legal(words, prefix)
        assert allowed(row(matcher)) == may
        assert {t for t in range(-2, len(TABLE) + 2) if matcher.validate([t])} == may
        assert matcher.completed == (may == TABLE.stop_ids)
        assert matcher.forced_text() == forced(words, prefix)
        text = matcher.accept([token])
        assert text == (token in may)
        prefix += [token] if text else []
        assert matcher.held == len(prefix)
        assert matcher.terminated == (text and token in TABLE.stop_ids)
        if matcher.terminated:
            break


@quick
@given(words=WORDS, tokens=TOKEN_LISTS)
def test_validate_is_the_longest_prefix_that_accept_takes(engine, words, tokens):
    matcher = engine.compile(choice(*words)).matcher()
    before, count = row(matcher), matcher.validate(tokens)
    assert torch.equal(row(matcher), before)
    assert matcher.held == 0
    assert matcher.accept(tokens) == (count == len(tokens))
    assert matcher.held == (count if count == len(tokens) else 0)
    matcher.rollback(matcher.held)
    assert torch.equal(row(matcher), before)
    assert matcher.accept(tokens[:count])


@quick
@given(words=WORDS, tokens=TOKEN_LISTS, more=TOKEN_LISTS, keep=st.integers(0, 6))
def test_a_rolled_back_preview_leaves_no_trace(engine, words, tokens, more, keep):
    matcher = engine.compile(choice(*words)).matcher()
    tokens = tokens[: matcher.validate(tokens)]
    kept = tokens[:keep]
    fresh = matcher.fork()
    assert fresh.accept(kept)
    assert matcher.accept(tokens)
    matcher.rollback(len(tokens) - len(kept))
    assert torch.equal(row(matcher), row(fresh))
    assert matcher.validate(more) == fresh.validate(more)
    assert (matcher.held, matcher.terminated, matcher.completed) == (
        fresh.held, fresh.terminated, fresh.completed,
    )  # fmt: skip


def test_each_row_of_the_object_allows_what_v1_2_says(engine):
    matcher, prefix = start(engine, OBJECT), []
    for token in encode('{"a":1}$'):
        assert allowed(row(matcher)) == legal(['{"a":1}'], prefix)
        assert matcher.accept([token])
        prefix.append(token)


def test_a_refused_list_leaves_nothing_behind_v1_4e(engine):
    matcher = start(engine, OBJECT, "{")
    before = row(matcher)
    assert not matcher.accept(encode('"a":x'))
    assert torch.equal(row(matcher), before)
    assert matcher.accept(encode('"a":1}$'))


def test_a_refused_token_does_not_poison_the_matcher_v1_4e_r17(engine):
    matcher = start(engine, choice("é", "è"))
    before = row(matcher)
    for token in (*encode("éa"), *encode("x"), EOS):
        assert not matcher.accept([token])
        assert torch.equal(row(matcher), before)
    assert matcher.accept(encode("é$"))
    matcher.rollback(2)
    assert torch.equal(row(matcher), before)


@pytest.mark.parametrize("token", [-1, -(2**40), len(TABLE), 2**31, 2**40, TOKENS.index(SPECIAL)])
def test_ids_that_are_no_text_are_refused_without_an_error_r3(engine, token, capfd):
    matcher = start(engine, OBJECT, "{")
    assert matcher.validate([token]) == 0
    assert not matcher.accept([token])
    assert matcher.validate([*encode('"a"'), token, token]) == 1
    assert matcher.accept(encode('"a"'))
    assert capfd.readouterr() == ("", "")


def test_expected_refusals_are_not_logged_r21(engine, capfd):
    matcher = start(engine, OBJECT, '{"a":1}$')
    assert matcher.validate(encode("x")) == 0
    matcher.rollback(1)
    assert matcher.validate(encode("x")) == 0
    assert capfd.readouterr() == ("", "")


def test_nothing_is_accepted_behind_a_stop_token_r8(engine):
    matcher = start(engine, OBJECT, '{"a":1}')
    assert matcher.validate([EOS, *encode("x")]) == 1
    assert not matcher.accept([EOS, EOS])
    assert not matcher.terminated
    assert matcher.accept([EOS])
    assert not matcher.accept([EOS])
    assert matcher.validate([EOS]) == 0
    assert matcher.accept([])


def test_a_terminated_matcher_allows_all_v1_2g_r9_q10(engine):
    matcher = start(engine, OBJECT, '{"a":1}$')
    assert bool((row(matcher, words=3) == ALL).all())
    assert matcher.forced_text() == ""
    assert matcher.forced_tokens() == []


def test_terminated_is_not_completed_v1_2h(engine):
    matcher = start(engine, OBJECT, '{"a":1}')
    assert (matcher.completed, matcher.terminated) == (True, False)
    assert matcher.accept([EOS])
    assert (matcher.completed, matcher.terminated) == (False, True)


def test_an_output_that_may_go_on_is_not_completed(engine):
    matcher = start(engine, GrammarSpec.regex("x+"), "x")
    assert matcher.validate([EOS]) == 1
    assert not matcher.completed


@pytest.mark.parametrize("stop", [EOS, STOP])
@pytest.mark.parametrize(("grammar", "text"), [(OBJECT, '{"a":1}'), (GrammarSpec.regex("x*"), "x")])
def test_the_stop_token_is_one_step_whether_or_not_text_could_follow_t11_v1_4f_r7_q7(
    engine, grammar, text, stop
):
    matcher = start(engine, grammar, text)
    assert matcher.accept([stop])
    matcher.rollback(1)
    assert torch.equal(row(matcher), row(start(engine, grammar, text)))


@pytest.mark.parametrize(("grammar", "text"), [(OBJECT, '{"a":1}'), (GrammarSpec.regex("x*"), "x")])
def test_a_last_token_and_the_stop_accepted_at_once_are_two_steps_v1_4f_r17(engine, grammar, text):
    matcher = start(engine, grammar, text[:-1])
    assert matcher.accept(encode(text[-1] + "$"))
    matcher.rollback(2)
    assert not matcher.terminated
    assert torch.equal(row(matcher), row(start(engine, grammar, text[:-1])))


def test_a_whole_output_can_be_undone_in_one_rollback(engine):
    matcher = start(engine, OBJECT)
    before = row(matcher)
    assert matcher.accept(encode('{"a":1}$'))
    assert matcher.held == 6
    matcher.rollback(6)
    assert torch.equal(row(matcher), before)


def test_rollback_of_nothing_keeps_the_stop_t11(engine):
    matcher = start(engine, OBJECT, '{"a":1}$')
    matcher.rollback(0)
    assert matcher.terminated


@pytest.mark.parametrize("n", [-1, 3])
def test_rollback_of_more_than_is_held_raises_and_undoes_nothing_v1_2i(engine, n):
    matcher = start(engine, OBJECT, '{"a"')
    before = row(matcher)
    with pytest.raises(MatcherError, match="holds 2"):
        matcher.rollback(n)
    assert matcher.held == 2
    assert torch.equal(row(matcher), before)


def test_every_stop_id_ends_the_output_and_only_where_eos_does_r19(engine):
    matcher = start(engine, choice("a", "ab"))
    assert allowed(row(matcher)) == {*encode("a"), *encode("ab")}
    assert matcher.accept(encode("a"))
    assert allowed(row(matcher)) == {*encode("b"), EOS, STOP}
    assert matcher.accept([STOP])
    assert matcher.terminated


def test_a_wider_mask_stays_forbidden_behind_the_vocabulary(engine):
    mask = torch.full((3, 4), ALL, dtype=torch.int32)
    start(engine, GrammarSpec.regex("[^z]*")).fill(mask, 1)
    assert max(allowed(mask, 1)) < len(TABLE)
    assert bool((mask[[0, 2]] == ALL).all())


def test_no_legal_token_is_an_empty_row_and_no_end_t7(engine):
    matcher = start(engine, GrammarSpec.regex("x(Q|a)?Q"), "x")
    before = row(matcher)
    assert matcher.accept(encode("a"))
    assert allowed(row(matcher)) == set()
    assert allowed(row(matcher)) == set()
    assert not matcher.accept([EOS])
    assert not matcher.completed
    assert matcher.forced_tokens() == []
    matcher.rollback(1)
    assert torch.equal(row(matcher), before)


def test_a_dead_end_behind_a_rollback_keeps_the_right_past_t7(engine):
    matcher = start(engine, GrammarSpec.regex("x(aQ|bb?Q)"), "xa")
    matcher.rollback(1)
    assert matcher.accept(encode("b"))
    before = row(matcher)
    assert matcher.accept(encode("b"))
    assert allowed(row(matcher)) == set()
    matcher.rollback(1)
    assert torch.equal(row(matcher), before)


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (OBJECT, "{", '"a":1}'),
        (OBJECT, '{"a":1}', ""),
        (GrammarSpec.ebnf('root ::= "x" "x"*'), "x", ""),
        (GrammarSpec.regex("x{2,}"), "", "xx"),
        (choice("é", "è"), "", ""),
        (choice("aé", "aè"), "", "a"),
        (choice("aéb", "aéa"), "a", "é"),
        (choice("中a", "中b"), "", "中"),
        (choice("ab", "abx"), "", "ab"),
        (GrammarSpec.json_schema({"enum": ["ab", "ax"]}), "", '"a'),
    ],
)
def test_forced_text_stops_at_choices_ends_and_split_characters_s1d_r16(
    engine, grammar, text, expected
):
    matcher = start(engine, grammar, text)
    before = row(matcher)
    assert matcher.forced_text() == expected
    assert torch.equal(row(matcher), before)


def test_no_text_is_forced_inside_a_character_s1d_r16(engine):
    matcher = engine.compile(choice("é")).matcher()
    assert matcher.accept([TOKENS.index(b"\xc3")])
    assert matcher.forced_text() == ""
    assert allowed(row(matcher)) == {TOKENS.index(b"\xa9")}


def test_forced_tokens_spell_the_forced_text_and_are_legal_s1p(engine):
    matcher = start(engine, OBJECT)
    assert matcher.forced_tokens() == encode('{"a":1}')
    assert matcher.held == 0
    assert matcher.accept(matcher.forced_tokens())
    assert matcher.completed


def test_a_forced_text_allows_every_tokenisation_of_it(engine):
    assert allowed(row(start(engine, choice("ab")))) == {*encode("a"), *encode("ab")}


def test_forks_share_the_past_and_nothing_else_q8(engine):
    matcher = start(engine, OBJECT, '{"a"')
    fork = matcher.fork()
    before = row(matcher)
    assert fork.accept(encode(":1}$"))
    assert torch.equal(row(matcher), before)
    assert (matcher.held, fork.held) == (2, 6)
    assert fork.fork().terminated
    fork.rollback(4)
    assert torch.equal(row(fork), before)


def test_matchers_of_one_compilation_are_independent(engine):
    compiled = engine.compile(OBJECT)
    assert compiled.matcher().accept(encode('{"a"'))
    assert compiled.matcher().accept(encode('{"a"'))
