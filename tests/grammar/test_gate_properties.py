"""Every late start, moved to and fro at random, beside a reference that forgets nothing.

The reference looks for the boundary in the tokens that are left, with a scan or a regular
expression, and asks a fresh grammar for the rest; so it has no state that a rollback could break.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import example, given, settings, strategies as st

from harness.grammar.gate import Trigger, gate
from harness.grammar.matcher import ALL, Matcher
from tests.grammar.gates import AnyOf, row_of
from tests.toys import ids, toy_table

TABLE = toy_table(["a", "b", "x", "<", "t>", "<t>", "x<t>"])
A, B, X, OPEN, CLOSE, MARK, ACROSS = range(len(TABLE) - 1)
STOP = TABLE.eos_id
LANGUAGE = [[A, B, A], [B, B], [OPEN, CLOSE, A], [MARK, B], [OPEN, B, A, B]]

TRIGGERS = {
    "reasoning": Trigger("reasoning", (OPEN, OPEN, CLOSE)),
    "implicit": Trigger("reasoning", (CLOSE,), implicit=(OPEN, MARK)),
    "masked": Trigger("reasoning", (CLOSE,), implicit=(X, MARK)),
    "budget": Trigger("reasoning", (X, CLOSE), budget=3),
    "tokens": Trigger("tokens", (OPEN, OPEN, CLOSE)),
    "bound": Trigger("tokens", (OPEN, CLOSE), bound=X),
    "word": Trigger("word", text="<t>"),
    "pattern": Trigger("pattern", text="<t>(a|b)"),
    "token": Trigger("token", (A, MARK)),
}

Move = tuple[Literal["accept", "validate", "rollback"], list[int], int]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["accept", "validate", "rollback"]),
        st.lists(st.integers(0, STOP), min_size=1, max_size=5),
        st.integers(0, 6),
    ),
    max_size=12,
)


class Reference:
    """What is true of a gate that holds ``tokens``, worked out from these alone."""

    def __init__(self, trigger: Trigger, tokens: Sequence[int]) -> None:
        self.trigger, self.tokens = trigger, list(tokens)
        self.fed = self._fed()
        self.grammar = AnyOf(LANGUAGE, STOP)

    @property
    def legal(self) -> bool:
        """Every token was allowed where it stands; only then may the rest be asked."""
        before = len(self.tokens) - 1
        if before >= 0 and not Reference(self.trigger, self.tokens[:-1]).allows(self.tokens[-1]):
            return False
        return self.fed is None or self.grammar.fork().accept(self._within(self.fed))

    def allows(self, token: int) -> bool:
        """Of a legal state: whether the row lets ``token`` pass."""
        return self.legal and (self.ended or bool(self.row >> token & 1))

    @property
    def ended(self) -> bool:
        if self.trigger.kind in ("reasoning", "tokens"):
            return self.fed is not None and STOP in self.fed
        return STOP in self.tokens

    @property
    def row(self) -> int:
        everything = (1 << 32) - 1
        if self.fed is not None:
            if self.ended:
                return everything
            grammar = self.grammar.fork()
            assert grammar.accept(self.fed)
            return row_of(grammar)[0] & everything
        if self.trigger.kind == "reasoning":
            return self._row_of_thinking(everything)
        if self.trigger.kind == "tokens" and self.trigger.bound in self.tokens:
            return 1 << self.trigger.tokens[self._matched(0)]
        return everything

    def _row_of_thinking(self, everything: int) -> int:
        matched = self._matched(0)
        budget = self.trigger.budget
        if budget is not None and len(self.tokens) - matched >= budget:
            return 1 << self.trigger.tokens[matched]
        firsts = {words[0] for words in LANGUAGE}
        return everything - sum(1 << t for t in self.trigger.implicit if t not in firsts)

    def _matched(self, start: int) -> int:
        """Length of the longest prefix of the trigger that the tokens end with."""
        tail, wanted = self.tokens[start:], list(self.trigger.tokens)
        return max(
            n for n in range(len(wanted)) if n <= len(tail) and tail[len(tail) - n :] == wanted[:n]
        )

    def _within(self, fed: list[int]) -> list[int]:
        """What the grammar was fed; DeepInfer's gate takes anything behind the end (D7.3)."""
        behind = self.trigger.kind == "tokens" and STOP in fed
        return fed[: fed.index(STOP) + 1] if behind else fed

    def _fed(self) -> list[int] | None:
        """The grammar's part of the tokens; None = it has not started."""
        match self.trigger.kind:
            case "reasoning" | "tokens":
                return self._behind_the_tokens()
            case "token":
                starts = (i for i, token in enumerate(self.tokens) if token in self.trigger.tokens)
                start = next(starts, None)
                return None if start is None else self.tokens[start:]
            case _:
                return self._behind_the_text()

    def _behind_the_tokens(self) -> list[int] | None:
        wanted = list(self.trigger.tokens)
        for end in range(1, len(self.tokens) + 1):
            if self.tokens[max(0, end - len(wanted)) : end] == wanted:
                return self.tokens[end:]
            if self.tokens[end - 1] in self.trigger.implicit:
                return self.tokens[end - 1 :]
        return None

    def _behind_the_text(self) -> list[int] | None:
        """The first prefix in which the text appears decides; a token across the start is cut."""
        pattern = re.escape(self.trigger.text) if self.trigger.kind == "word" else self.trigger.text
        for end in range(1, len(self.tokens) + 1):
            text = b"".join(TABLE.tokens[token] for token in self.tokens[:end]).decode()
            if found := re.search(pattern, text):
                start = found.start(found.lastindex or 0)
                return [*self._from(start, end), *self.tokens[end:]]
        return None

    def _from(self, start: int, end: int) -> list[int]:
        fed, at = [], 0
        for token in self.tokens[:end]:
            piece = TABLE.tokens[token].decode()
            if at >= start:
                fed.append(token)
            elif at + len(piece) > start:
                fed += TABLE.encode_greedily(piece[start - at :].encode())
            at += len(piece)
        return fed


def start_of(name: str) -> Matcher:
    return gate(AnyOf(LANGUAGE, STOP), TRIGGERS[name], TABLE)


def state(matcher: Matcher) -> tuple[object, ...]:
    """All that can be asked of a matcher."""
    return (
        matcher.held,
        matcher.started,
        matcher.constrained,
        matcher.terminated,
        matcher.completed,
        row_of(matcher),
        matcher.forced_text(),
    )


def legal_prefix(trigger: Trigger, held: list[int], tokens: Sequence[int]) -> int:
    """How many of ``tokens`` may follow ``held``; nothing may follow the end (contract)."""
    for count in range(len(tokens)):
        now = Reference(trigger, [*held, *tokens[:count]])
        if now.ended or not Reference(trigger, [*held, *tokens[: count + 1]]).legal:
            return count
    return len(tokens)


@pytest.mark.parametrize("name", TRIGGERS)
@settings(max_examples=120, deadline=None)
@given(moves=MOVES)
@example(moves=[("accept", [X, OPEN, OPEN, OPEN, CLOSE], 0), ("rollback", [X], 2)])
@example(moves=[("accept", [X, OPEN, CLOSE, B], 0), ("rollback", [X], 1), ("rollback", [X], 2)])
@example(moves=[("accept", [X, ACROSS, B, STOP], 0), ("rollback", [X], 3), ("accept", [MARK], 0)])
def test_the_state_is_that_of_a_fresh_gate_fed_what_is_left(name: str, moves: list[Move]) -> None:
    """Property 1: across the boundary and back, over refusals, previews and the end."""
    trigger, matcher, held = TRIGGERS[name], start_of(name), list[int]()
    for move, tokens, most in moves:
        if move == "rollback":
            left = max(0, len(held) - most)
            matcher.rollback(len(held) - left)
            held = held[:left]
        elif move == "validate":
            assert matcher.validate(tokens) == legal_prefix(trigger, held, tokens)
        else:
            legal = legal_prefix(trigger, held, tokens) == len(tokens)
            if Reference(trigger, held).ended or (STOP in tokens[:-1] and trigger.kind == "tokens"):
                continue  # behind the end the kinds differ on purpose (D7.3)
            assert matcher.accept(tokens) is legal
            held += tokens if legal else []
        fresh = start_of(name)
        assert all(fresh.accept([token]) for token in held)
        assert state(matcher) == state(fresh) == state(matcher.fork())
        reference = Reference(trigger, held)
        assert (matcher.held, matcher.started) == (len(held), reference.fed is not None)
        assert matcher.terminated is reference.ended
        if not matcher.terminated:
            assert row_of(matcher)[0] & (1 << 32) - 1 == reference.row
            assert matcher.constrained or row_of(matcher) == [ALL]


def test_the_examples_cross_every_boundary() -> None:
    """The property is empty unless grammars start, refuse and end in it."""
    marks = {
        "reasoning": [X, OPEN, OPEN, CLOSE, A, B, A],
        "implicit": [X, OPEN, B, A, B],
        "masked": [A, MARK, B],
        "budget": [A, A, A, X, CLOSE, B, B],
        "tokens": [OPEN, OPEN, OPEN, CLOSE, B, B],
        "bound": [A, X, OPEN, CLOSE, B, B],
        "word": [X, ACROSS, B],
        "pattern": [*ids(TABLE, "x", "<", "t>"), B, B],
        "token": [X, A, B, A],
    }
    for name, tokens in marks.items():
        matcher = start_of(name)
        assert matcher.accept([*tokens, STOP]), name
        assert matcher.terminated
