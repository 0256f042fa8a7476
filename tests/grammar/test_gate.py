"""Grammars that start late: token triggers and their ledgers, lazy grammars and their replay."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import GrammarError, MatcherError
from harness.grammar.gate import LazyMatcher, ReasoningMatcher, TokenTriggerMatcher, Trigger, gate
from harness.grammar.matcher import ALL
from tests.grammar.gates import AnyOf, row_of
from tests.toys import ids, toy_table

# -- Trigger ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"kind": "tool"}, "trigger.kind"),
        ({"kind": "tokens", "tokens": (True,)}, "trigger.tokens"),
        ({"kind": "tokens", "tokens": (-1,)}, "trigger.tokens"),
        ({"kind": "tokens", "tokens": (1.0,)}, "trigger.tokens"),
        ({"kind": "tokens", "tokens": [1]}, "trigger.tokens"),
        ({"kind": "tokens", "bound": 5}, "trigger.bound"),
        ({"kind": "tokens", "tokens": (1,), "bound": -1}, "trigger.bound"),
        ({"kind": "tokens", "tokens": (1,), "bound": False}, "trigger.bound"),
        ({"kind": "tokens", "tokens": (1,), "text": "x"}, "trigger.text"),
        ({"kind": "token"}, "trigger.tokens"),
        ({"kind": "token", "tokens": (1,), "bound": 2}, "trigger.bound"),
        ({"kind": "word"}, "trigger.text"),
        ({"kind": "word", "text": 5}, "trigger.text"),
        ({"kind": "word", "text": "x", "tokens": (1,)}, "trigger.tokens"),
        ({"kind": "pattern", "text": "("}, "trigger.text"),
        ({"kind": "pattern_full", "text": "x", "bound": 1}, "trigger.bound"),
        ({"kind": "reasoning"}, "trigger.tokens"),
        ({"kind": "reasoning", "tokens": (1,), "bound": 2}, "trigger.bound"),
        ({"kind": "reasoning", "tokens": (1,), "text": "x"}, "trigger.text"),
        ({"kind": "reasoning", "tokens": (1,), "implicit": [2]}, "trigger.implicit"),
        ({"kind": "reasoning", "tokens": (1,), "implicit": (-2,)}, "trigger.implicit"),
        ({"kind": "reasoning", "tokens": (1,), "budget": -1}, "trigger.budget"),
        ({"kind": "reasoning", "tokens": (1,), "budget": True}, "trigger.budget"),
        ({"kind": "tokens", "tokens": (1,), "implicit": (2,)}, "trigger.implicit"),
        ({"kind": "word", "text": "x", "budget": 5}, "trigger.budget"),
    ],
)
def test_a_malformed_trigger_is_refused_and_the_field_named(
    fields: dict[str, Any], names: str
) -> None:
    """D2, and the like for text."""
    with pytest.raises(GrammarError, match=names):
        Trigger(**fields)


@pytest.mark.parametrize(
    ("kind", "text", "output", "start"),
    [
        ("word", "a.c", b"abc", None),  # escaped
        ("word", "a.c", b"xa.c", 1),
        ("pattern", "a.c", b"xabc", 1),
        ("pattern", "x(y?)(z)", b"..xz", 3),  # the first group that is not empty
        ("pattern", "x(y?)", b"..x", 2),  # none: the match
        ("pattern", "^a|a(b)$", b"ab", 1),  # a full match comes before a search
        ("pattern", "^b$", b"ab", None),
        ("pattern_full", "a+(b)", b"aab", 2),
        ("pattern_full", "^a+(b)$", b"aab", 2),
        ("pattern_full", "a+(b)", b"xaab", None),  # anchored
        ("pattern_full", "a|b", b"ab", None),  # the whole alternation is
    ],
)
def test_the_grammar_starts_at_the_first_group_or_the_match(
    kind: Any, text: str, output: bytes, start: int | None
) -> None:
    """L20, L21."""
    assert Trigger(kind, text=text).find(output) == start


@pytest.mark.parametrize(
    ("trigger", "kind"),
    [
        (Trigger("reasoning", (1,)), ReasoningMatcher),
        (Trigger("tokens", (1,)), TokenTriggerMatcher),
        (Trigger("token", (1,)), LazyMatcher),
        (Trigger("word", text="b"), LazyMatcher),
        (Trigger("pattern", text="b"), LazyMatcher),
        (Trigger("pattern_full", text="b"), LazyMatcher),
    ],
)
def test_each_trigger_gets_its_own_kind_of_matcher(trigger: Trigger, kind: type) -> None:
    table = toy_table("ab")
    inner = AnyOf([[0]], table.eos_id)
    assert isinstance(gate(inner, trigger, table), kind)
    for other in {ReasoningMatcher, LazyMatcher} - {kind}:
        with pytest.raises(GrammarError, match="is not for a"):
            other(inner, trigger, table)
    if kind is not TokenTriggerMatcher:
        with pytest.raises(GrammarError, match="is not for a TokenTriggerMatcher"):
            TokenTriggerMatcher(inner, trigger)


@pytest.mark.parametrize(
    "trigger",
    [
        Trigger("token", (1, 3)),
        Trigger("tokens", (1,), bound=3),
        Trigger("reasoning", (1, 3)),
        Trigger("reasoning", (1,), implicit=(3,)),
    ],
)
def test_a_trigger_outside_the_vocabulary_is_refused(trigger: Trigger) -> None:
    table = toy_table("ab")
    with pytest.raises(GrammarError, match="3 is no token of this vocabulary"):
        gate(AnyOf([[0]], table.eos_id), trigger, table)


# -- TokenTriggerMatcher ------------------------------------------------------------------------

EOS = 99


def token_trigger(*tokens: int, bound: int | None = None) -> TokenTriggerMatcher:
    """DeepInfer's cap of 7: five drafts and two."""
    inner = AnyOf([[20, 21], [20]], EOS)
    return TokenTriggerMatcher(inner, Trigger("tokens", tokens, bound), drafts=5)


def ledgers(matcher: TokenTriggerMatcher) -> tuple[Any, ...]:
    return (
        matcher.trigger_progress,
        [*matcher.progress_history],
        matcher.tokens_in_matcher,
        matcher.tokens_after_eos,
        matcher.tokens_after_bound,
        matcher.constrained,
    )


def test_executed_vector_a_trigger_with_a_repeated_prefix() -> None:
    """D7, D9: KMP falls back to 1, then 2; the history comes back with a rollback."""
    matcher = token_trigger(7, 7, 8)
    table: list[tuple[list[int], tuple[Any, ...]]] = [
        ([7], (1, [0], 0, -1, -1, False)),
        ([7], (2, [0, 1], 0, -1, -1, False)),
        ([7], (2, [0, 1, 2], 0, -1, -1, False)),
        ([8], (3, [0, 1, 2, 2], 0, -1, -1, True)),
        ([20, 21], (3, [0, 1, 2, 2, 3, 3], 2, -1, -1, True)),
    ]
    for tokens, expected in table:
        assert matcher.accept(tokens)
        assert ledgers(matcher) == expected
    matcher.rollback(4)
    assert ledgers(matcher) == (2, [0, 1], 0, -1, -1, False)
    assert matcher.accept([5])
    assert ledgers(matcher) == (0, [0, 1, 2], 0, -1, -1, False)
    assert matcher.held == 3


def test_executed_vector_tokens_after_the_end_go_first() -> None:
    """D7.3, D9: junk behind EOS is counted, and rolled back before EOS is."""
    matcher = token_trigger()
    steps: list[tuple[list[int], int, int]] = [([20], 1, -1), ([EOS], 2, 0), ([50, 51], 2, 2)]
    for tokens, in_matcher, after_eos in steps:
        assert matcher.accept(tokens)
        assert (matcher.tokens_in_matcher, matcher.tokens_after_eos) == (in_matcher, after_eos)
    assert matcher.terminated
    assert matcher.held == 4
    matcher.rollback(1)
    assert (matcher.tokens_in_matcher, matcher.tokens_after_eos) == (2, 1)
    assert matcher.terminated
    matcher.rollback(2)
    assert (matcher.tokens_in_matcher, matcher.tokens_after_eos) == (1, -1)
    assert not matcher.terminated
    assert matcher.held == 1


def test_executed_vector_a_bound_token_makes_the_trigger_due() -> None:
    """D7.1, D7.2, D9."""
    matcher = token_trigger(7, 8, bound=5)

    def state() -> tuple[Any, ...]:
        progress, _, in_matcher, _, bound, constrained = ledgers(matcher)
        return progress, in_matcher, bound, constrained

    assert matcher.accept([1, 7])
    assert state() == (1, 0, -1, False)
    assert matcher.accept([5])
    assert state() == (0, 0, 0, True)
    assert not matcher.accept([9])
    assert state() == (0, 0, 0, True)
    assert matcher.accept([7, 8])
    assert state() == (2, 0, 2, True)
    assert matcher.accept([20])
    assert state() == (2, 1, 3, True)
    matcher.rollback(3)
    assert state() == (0, 0, 0, True)
    matcher.rollback(1)
    assert state() == (1, 0, -1, False)


def test_the_row_follows_free_text_trigger_grammar_and_end() -> None:
    """D8."""
    matcher = token_trigger(31, 8, bound=5)
    everything = [ALL] * 4
    assert row_of(matcher, 4) == everything
    matcher.accept([5])
    assert row_of(matcher, 4) == [-(1 << 31), 0, 0, 0]  # token 31 is the sign bit
    matcher.accept([31])
    assert row_of(matcher, 4) == [1 << 8, 0, 0, 0]
    matcher.accept([8])
    assert row_of(matcher, 4) == [1 << 20, 0, 0, 0]
    matcher.accept([20, EOS])
    assert row_of(matcher, 4) == everything


def test_the_row_behind_a_draft_that_completes_the_trigger_is_masked() -> None:
    """D13, Q14: the very next draft is checked."""
    matcher = token_trigger(7)
    assert matcher.validate([3, 7, 21, 20]) == 2
    assert matcher.validate([3, 7, 20, 21]) == 4
    assert ledgers(matcher) == ledgers(token_trigger(7))


def test_a_refused_list_leaves_every_ledger_as_it_was() -> None:
    """Even one that is longer than the history."""
    matcher = token_trigger(7, 7, 8, bound=5)
    matcher.accept([7])
    before = ledgers(matcher), matcher.held
    assert not matcher.accept([7, 1, 2, 3, 4, 5, 7, 7, 8, 20, 21, EOS, 50, -1])
    assert (ledgers(matcher), matcher.held) == before
    assert matcher.inner.held == 0


def test_a_stop_token_ends_a_validation() -> None:
    matcher = token_trigger()
    assert matcher.validate([20, EOS, 50]) == 2
    matcher.accept([20, EOS])
    assert matcher.validate([50]) == 0


def test_the_history_is_as_long_as_a_step_needs() -> None:
    """Cap = drafts + 2; more than it remembers cannot be rolled back, less than that can."""
    matcher = token_trigger(7)
    matcher.accept([1, 2, 3, 4, 5, 6, 7, 20, 21])
    assert len(matcher.progress_history) == 7
    before = ledgers(matcher)
    with pytest.raises(MatcherError, match="remembers 7"):
        matcher.rollback(8)
    assert ledgers(matcher) == before
    matcher.rollback(7)
    assert (matcher.trigger_progress, matcher.held, matcher.inner.held) == (0, 2, 0)


def test_without_a_draft_length_all_of_the_history_is_kept() -> None:
    """A jump may take back more than drafts (S1h)."""
    matcher = gate(AnyOf([[20, 21]], EOS), Trigger("tokens", (7,)), toy_table(["t"] * EOS))
    assert matcher.accept([1] * 30 + [7, 20])
    matcher.rollback(32)
    assert (matcher.held, matcher.started) == (0, False)


@pytest.mark.parametrize("n", [-1, 3])
def test_more_than_is_held_cannot_be_rolled_back(n: int) -> None:
    matcher = token_trigger()
    matcher.accept([20, EOS])
    with pytest.raises(MatcherError, match="holds 2"):
        matcher.rollback(n)
    assert matcher.terminated


def test_nothing_is_forced_or_completed_before_the_trigger_or_behind_the_end() -> None:
    matcher = token_trigger(7)
    assert (matcher.forced_text(), matcher.forced_tokens(), matcher.completed) == ("", [], False)
    matcher.accept([7, 20])
    assert (matcher.forced_text(), matcher.forced_tokens()) == ("forced", [0])
    matcher.accept([21])
    assert matcher.completed
    matcher.accept([EOS])
    assert (matcher.forced_text(), matcher.forced_tokens(), matcher.completed) == ("", [], False)


def test_a_fork_goes_its_own_way() -> None:
    matcher = token_trigger(7)
    matcher.accept([7, 20])
    before = ledgers(matcher.fork())
    matcher.fork().accept([21])
    matcher.fork().rollback(2)
    assert ledgers(matcher) == before
    assert matcher.inner.held == 1


# -- LazyMatcher --------------------------------------------------------------------------------

TABLE = toy_table(["a", "b", "c", "x", "<t>", "<t>a", "x<t>", "t>a", "<", "\n"])
STOP = TABLE.eos_id


def lazy(kind: Any = "word", text: str = "<t>", tokens: tuple[int, ...] = ()) -> LazyMatcher:
    """The grammar ``<t>ab`` or ``ab``, in single characters where it can be."""
    language = [ids(TABLE, "<t>", "a", "b"), ids(TABLE, "<t>a", "b"), ids(TABLE, "a", "b")]
    return LazyMatcher(AnyOf(language, STOP), Trigger(kind, tokens, text=text), TABLE)


def fed(matcher: LazyMatcher) -> list[bytes]:
    """What the grammar was given."""
    assert isinstance(matcher.inner, AnyOf)
    return [TABLE.tokens[token] for token in matcher.inner.seen]


def test_asleep_anything_is_taken_and_nothing_masked() -> None:
    """L20."""
    matcher = lazy()
    assert row_of(matcher) == [ALL]
    assert matcher.accept(ids(TABLE, "x", "c", "\n", "b"))
    assert row_of(matcher) == [ALL]
    assert (matcher.constrained, matcher.held, fed(matcher)) == (False, 4, [])
    assert (matcher.forced_text(), matcher.forced_tokens(), matcher.completed) == ("", [], False)


@pytest.mark.parametrize("token", [-1, len(TABLE)])
def test_asleep_only_tokens_are_taken(token: int) -> None:
    assert not lazy().accept([token])


def test_a_trigger_word_is_replayed_from_its_first_character() -> None:
    """L21: the token in front of it stays outside."""
    matcher = lazy()
    assert matcher.accept(ids(TABLE, "x", "<t>"))
    assert (matcher.constrained, fed(matcher)) == (True, [b"<t>"])
    assert row_of(matcher) == [1 << TABLE.ids_by_bytes[b"a"]]
    assert matcher.accept(ids(TABLE, "a", "b", "$"))
    assert (matcher.terminated, matcher.held) == (True, 5)


def test_a_token_across_the_start_is_cut_there() -> None:
    """L21: ``x<t>`` gives ``<t>``, re-encoded."""
    matcher = lazy()
    assert matcher.accept(ids(TABLE, "c", "x<t>"))
    assert (fed(matcher), matcher.held) == ([b"<t>"], 2)


def test_a_trigger_spread_over_tokens_is_replayed_whole() -> None:
    matcher = lazy("pattern", "<t>(a)")
    assert matcher.accept(ids(TABLE, "x", "<", "t>a"))
    assert fed(matcher) == [b"a"]
    assert matcher.accept(ids(TABLE, "b"))
    assert matcher.completed


def test_only_the_captured_text_is_replayed() -> None:
    """Q12: the marker of the end of thinking is not fed to a grammar that does not have it."""
    matcher = lazy("pattern", r"<t>\s*([a-z])")
    assert matcher.accept(ids(TABLE, "x", "<t>", "\n"))
    assert not matcher.constrained
    assert matcher.accept(ids(TABLE, "a"))
    assert fed(matcher) == [b"a"]


def test_a_trigger_token_is_fed_itself() -> None:
    """L21 (i): whatever text stands before it."""
    matcher = lazy("token", "", tuple(ids(TABLE, "<t>", "a")))
    assert matcher.accept(ids(TABLE, "x<t>"))
    assert not matcher.constrained
    assert matcher.accept(ids(TABLE, "a"))
    assert fed(matcher) == [b"a"]


def test_a_full_pattern_wakes_on_all_of_the_output_or_not_at_all() -> None:
    matcher = lazy("pattern_full", "x(<t>)")
    assert matcher.accept(ids(TABLE, "c", "x", "<t>"))
    assert not matcher.constrained
    other = lazy("pattern_full", "x(<t>)")
    assert other.accept(ids(TABLE, "x", "<t>"))
    assert fed(other) == [b"<t>"]


def test_an_illegal_replay_is_refused_and_changes_nothing() -> None:
    """L22: the trigger token was sampled unmasked and carries text that the grammar forbids."""
    grammar = AnyOf([ids(TABLE, "<t>", "b")], STOP)
    matcher = LazyMatcher(grammar, Trigger("word", text="<t>"), TABLE)
    assert matcher.accept(ids(TABLE, "x"))
    assert not matcher.accept(ids(TABLE, "c", "<t>a"))
    assert (matcher.held, matcher.constrained, row_of(matcher)) == (1, False, [ALL])
    assert matcher.accept(ids(TABLE, "<t>", "b"))


def test_a_cut_token_that_no_token_can_spell_is_refused() -> None:
    """L22 again: ``>a`` of ``t>a`` begins no token."""
    matcher = lazy("word", ">a")
    assert not matcher.accept(ids(TABLE, "t>a"))
    assert matcher.held == 0


def test_the_row_behind_a_trigger_inside_a_draft_is_masked() -> None:
    """L23: draft = [.., trigger, illegal]."""
    matcher = lazy()
    assert matcher.validate(ids(TABLE, "x", "<t>", "c", "a")) == 2
    assert matcher.validate(ids(TABLE, "x", "<t>", "a", "b", "$", "x")) == 5
    assert (matcher.held, matcher.constrained) == (0, False)


def test_a_rollback_over_the_trigger_puts_the_grammar_to_sleep_again() -> None:
    matcher = lazy()
    matcher.accept(ids(TABLE, "x", "<t>", "a", "b"))
    matcher.rollback(2)
    assert (matcher.constrained, fed(matcher)) == (True, [b"<t>"])
    matcher.accept(ids(TABLE, "a"))
    matcher.rollback(2)
    assert (matcher.constrained, matcher.held, row_of(matcher)) == (False, 1, [ALL])
    assert matcher.accept(ids(TABLE, "<t>a", "b", "$"))
    assert matcher.terminated


def test_a_stop_token_before_the_trigger_ends_the_output() -> None:
    matcher = lazy()
    assert matcher.accept(ids(TABLE, "x", "$"))
    assert matcher.terminated
    assert not matcher.accept(ids(TABLE, "x"))
    matcher.rollback(1)
    assert not matcher.terminated
    assert matcher.accept(ids(TABLE, "<t>"))
    assert fed(matcher) == [b"<t>"]


def test_a_lazy_fork_goes_its_own_way() -> None:
    matcher = lazy()
    matcher.accept(ids(TABLE, "x"))
    twin = matcher.fork()
    assert twin.accept(ids(TABLE, "<t>", "a"))
    assert (matcher.held, matcher.constrained, twin.held) == (1, False, 3)
    twin.fork().rollback(1)
    assert fed(twin) == [b"<t>", b"a"]
    assert matcher.accept(ids(TABLE, "x<t>", "a"))
    assert fed(matcher) == [b"<t>", b"a"]
