"""Thinking: the multi-token reasoner wrapper (S4) and the reasoning bounds (V1.5)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import MatcherError
from harness.grammar.gate import ReasoningMatcher, Trigger
from harness.grammar.matcher import ALL
from harness.grammar.reasoning import answer_ids
from tests.grammar.gates import AnyOf, row_of
from tests.toys import ids, toy_table

# -- The wrapper (S4) ---------------------------------------------------------------------------

NUMBERS = toy_table(map(str, range(10)))
STOP = NUMBERS.eos_id


def thinking(*end: int, **fields: Any) -> ReasoningMatcher:
    """The grammar is 5 6."""
    return ReasoningMatcher(AnyOf([[5, 6]], STOP), Trigger("reasoning", end, **fields), NUMBERS)


def wrapper(matcher: ReasoningMatcher) -> tuple[int, int, int, list[int]]:
    """in_think, after, m and what the grammar was fed, as the executed trace shows them."""
    assert isinstance(matcher.inner, AnyOf)
    return (
        matcher.tokens_in_think,
        matcher.tokens_after_end,
        matcher.progress,
        matcher.inner.seen,
    )


def test_executed_trace_of_the_wrapper() -> None:
    """S4b, S4c: end sequence (7, 8); it is never fed, and a rollback crosses it token by token."""
    matcher = thinking(7, 8)
    assert wrapper(matcher) == (0, -1, 0, [])  # S4a
    accepted: list[tuple[int, tuple[int, int, int, list[int]]]] = [
        (1, (1, -1, 0, [])),
        (7, (1, -1, 1, [])),
        (7, (2, -1, 1, [])),
        (8, (2, 0, 0, [])),
        (5, (2, 1, 0, [5])),
        (6, (2, 2, 0, [5, 6])),
    ]
    for token, expected in accepted:
        assert matcher.accept([token])
        assert wrapper(matcher) == expected
    undone: list[tuple[int, tuple[int, int, int, list[int]]]] = [
        (1, (2, 1, 0, [5])),
        (1, (2, 0, 0, [])),
        (1, (2, -1, 1, [])),
        (1, (1, -1, 1, [])),
        (2, (0, -1, 0, [])),
    ]
    for n, expected in undone:
        matcher.rollback(n)
        assert wrapper(matcher) == expected
    assert matcher.held == 0


def test_a_stop_token_ends_the_grammar_but_not_the_thinking() -> None:
    """S4d, R9: the wrapper says so itself, so a search never fills behind the end."""
    matcher = thinking(7)
    assert matcher.accept([STOP])
    assert not matcher.terminated
    assert matcher.accept([7, 5, 6])
    assert matcher.completed
    assert matcher.accept([STOP])
    assert (matcher.terminated, matcher.completed) == (True, False)
    assert not matcher.accept([1])


def test_nothing_is_forced_while_the_model_thinks() -> None:
    """S4f."""
    matcher = thinking(7)
    assert (matcher.forced_text(), matcher.forced_tokens(), matcher.completed) == ("", [], False)
    matcher.accept([7])
    assert (matcher.forced_text(), matcher.forced_tokens()) == ("forced", [0])


@pytest.mark.parametrize("token", [-1, len(NUMBERS)])
def test_thinking_is_made_of_tokens(token: int) -> None:
    """R3."""
    matcher = thinking(7)
    assert not matcher.accept([1, token])
    assert matcher.held == 0


def test_more_than_is_held_cannot_be_rolled_back() -> None:
    """S4c stops silently at the start; the contract does not."""
    matcher = thinking(7)
    matcher.accept([1, 7, 5])
    with pytest.raises(MatcherError, match="holds 3"):
        matcher.rollback(4)
    assert wrapper(matcher) == (1, 1, 0, [5])


def test_a_spent_budget_leaves_only_the_next_token_of_the_end() -> None:
    """S4e: also in the middle of the end, which counts as no thinking; a rollback gives it back."""
    matcher = thinking(7, 8, budget=2)
    assert matcher.accept([1, 7])
    assert (matcher.constrained, row_of(matcher)) == (False, [ALL])
    assert matcher.accept([2])  # 7 was thinking after all: three tokens
    assert (matcher.started, matcher.constrained, row_of(matcher)) == (False, True, [1 << 7])
    assert matcher.validate([7, 8, 5, 6, STOP]) == 5
    assert not matcher.accept([1])
    assert matcher.accept([7])
    assert row_of(matcher) == [1 << 8]
    matcher.rollback(2)
    assert row_of(matcher) == [ALL]


def test_a_budget_of_nothing_forces_the_end_at_once() -> None:
    """S4e."""
    matcher = thinking(7, budget=0)
    assert row_of(matcher) == [1 << 7]
    assert matcher.accept([7, 5, 6, STOP])


def test_an_implicit_end_is_not_the_forced_one() -> None:
    matcher = thinking(7, implicit=(5,), budget=1)
    assert matcher.fork().accept([5, 6])
    assert matcher.accept([1])
    assert not matcher.accept([5])


def test_a_fork_goes_its_own_way() -> None:
    matcher = thinking(7, 8)
    matcher.accept([1, 7])
    twin = matcher.fork()
    assert twin.accept([8, 5])
    twin.fork().rollback(4)
    assert (wrapper(matcher), wrapper(twin)) == ((1, -1, 1, []), (1, 1, 0, [5]))


# -- The bounds (V1.5) --------------------------------------------------------------------------

TABLE = toy_table(["x", "T", "K", "{", '"a"', ":", "}"])
ALL_BUT_K = ALL & ~(1 << TABLE.ids_by_bytes[b"K"])


def reasoner(*language: str) -> ReasoningMatcher:
    """``T`` is ``</think>``, ``K`` an implicit end; each string is one text of the grammar."""
    grammar = AnyOf([ids(TABLE, *text.split()) for text in language], TABLE.eos_id)
    trigger = Trigger("reasoning", tuple(ids(TABLE, "T")), implicit=tuple(ids(TABLE, "K")))
    return ReasoningMatcher(grammar, trigger, TABLE)


def rows(matcher: ReasoningMatcher, drafts: str) -> list[int]:
    """The row before each draft that is accepted, and the one behind the last."""
    found = [row_of(matcher)[0]]
    for token in ids(TABLE, *drafts.split()):
        if not matcher.accept([token]):
            break
        found += row_of(matcher)
    return found


def only(*tokens: str) -> int:
    return sum(1 << token for token in ids(TABLE, *tokens))


K_FIRST = "K { }"
"""A grammar that may start with the implicit end."""


@pytest.mark.parametrize(
    ("drafts", "grammar", "expected"),
    [
        ("x T {", K_FIRST, [ALL, ALL, only("K")]),
        ("x T K {", K_FIRST, [ALL, ALL, only("K"), only("{"), only("}")]),
        ("x x", K_FIRST, [ALL, ALL, ALL]),
        ("x x x T", K_FIRST, [ALL, ALL, ALL, ALL, only("K")]),
        ("T x {", K_FIRST, [ALL, only("K")]),
        ("", K_FIRST, [ALL]),
        ("x K {", K_FIRST, [ALL, ALL, only("{"), only("}")]),
        ("x K {", '{ "a"', [ALL_BUT_K, ALL_BUT_K]),
        ("x T { }", '{ "a"', [ALL_BUT_K, ALL_BUT_K, only("{"), only('"a"')]),
    ],
)
def test_worked_rows_of_the_reasoning_bounds(
    drafts: str, grammar: str, expected: list[int]
) -> None:
    """V1.5c-g: the table of worked rows, up to the one that refuses a draft."""
    matcher = reasoner(grammar)
    assert matcher.validate(ids(TABLE, *drafts.split())) == len(expected) - 1
    assert rows(matcher, drafts) == expected


@pytest.mark.parametrize(
    ("tokens", "fed", "latched"),
    [("x T {", "{", True), ("x K {", "K {", True), ("x x", "", False), ("x T", "", True)],
)
def test_executed_accepts_feed_what_stands_behind_the_boundary(
    tokens: str, fed: str, latched: bool
) -> None:
    """V1.4b, R2: in the same step."""
    matcher = reasoner("{", K_FIRST)
    assert matcher.accept(ids(TABLE, *tokens.split()))
    assert isinstance(matcher.inner, AnyOf)
    assert matcher.inner.seen == ids(TABLE, *fed.split())
    assert matcher.started is latched


def test_an_implicit_end_that_the_grammar_refuses_changes_nothing() -> None:
    """V1.5g: its bit is cleared, and it is refused."""
    matcher = reasoner("{")
    assert matcher.masked == ids(TABLE, "K")
    assert not matcher.accept(ids(TABLE, "x", "K"))
    assert (matcher.held, matcher.started, matcher.constrained) == (0, False, True)


def test_a_rollback_takes_an_implicit_end_out_of_the_grammar_too() -> None:
    """V1.5d: K was fed, so it is undone in both."""
    matcher = reasoner(K_FIRST)
    matcher.accept(ids(TABLE, "x", "K", "{"))
    matcher.rollback(2)
    assert (matcher.held, matcher.started, matcher.inner.held) == (1, False, 0)
    assert matcher.accept(ids(TABLE, "T", "K", "{", "}"))


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("x T { }", "{ }"),
        ("x K { }", "K { }"),
        ("T T", "T"),
        ("x T", ""),
        ("x x", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_stands_behind_the_thinking(output: str, answer: str) -> None:
    """V1.5d: an implicit end is a part of it."""
    trigger = Trigger("reasoning", tuple(ids(TABLE, "T")), implicit=tuple(ids(TABLE, "K")))
    assert answer_ids(trigger, ids(TABLE, *output.split())) == ids(TABLE, *answer.split())


@pytest.mark.parametrize("trigger", [None, Trigger("word", text="T")])
def test_without_thinking_all_of_the_output_is_the_answer(trigger: Trigger | None) -> None:
    assert answer_ids(trigger, [0, 1, 2]) == [0, 1, 2]
