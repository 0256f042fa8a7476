"""Prompt look-up: the longest match, the most recent one, and what stands behind it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from harness.core import PAD
from harness.drafters.ngram import NgramDrafter, last_match
from tests.drafters.makers import running
from tests.toys import Toy, ids, random_law, toy_table

TABLE = toy_table("abcdexyz")


def spell(text: str) -> list[int]:
    return ids(TABLE, *text)


@pytest.mark.parametrize(
    ("text", "min_n", "max_n", "behind"),
    [
        ("abcxab", 1, 3, "cxab"),  # the longest match
        ("abxbyaab", 1, 3, "xbyaab"),  # also where a shorter one is more recent
        ("abxabyab", 1, 3, "yab"),  # of equally long ones the most recent
        ("abcxbcybc", 2, 2, "ybc"),  # more agreement than max_n counts no more
        ("cabxbab", 3, 3, None),  # fewer than min_n
        ("aaa", 1, 4, "a"),  # a match may overlap what it is for
        ("a", 1, 4, None),
        ("", 1, 4, None),
    ],
)
def test_the_longest_then_the_most_recent_match_wins(
    text: str, min_n: int, max_n: int, behind: str | None
) -> None:
    start = last_match(spell(text), min_n, max_n)
    assert (None if start is None else text[start:]) == behind


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 3), st.integers(0, 2))
def test_a_match_agrees_with_a_slow_search(tokens: list[int], min_n: int, more: int) -> None:
    def agreeing(start: int) -> int:
        lengths = (n for n in range(min_n + more, 0, -1) if n <= start)
        return next((n for n in lengths if tokens[start - n : start] == tokens[-n:]), 0)

    starts = [start for start in range(1, len(tokens)) if agreeing(start) >= min_n]
    best = max(starts, key=lambda start: (agreeing(start), start), default=None)
    assert last_match(tokens, min_n, min_n + more) == best


def test_prompt_and_output_are_one_text() -> None:
    sequence = running(TABLE, spell("xab"), prompt=spell("abcde"))
    (proposal,) = NgramDrafter(3, 2, 4).free([sequence])
    assert proposal.tokens == spell("cde")
    assert proposal.q is None
    assert proposal.draft_forwards == 0


def test_a_window_with_less_to_say_is_padded() -> None:
    """V1.7d; padding is no draft, neither before nor behind a cut."""
    (proposal,) = NgramDrafter(4, 2, 4).free([running(TABLE, spell("bab"), prompt=spell("a"))])
    assert proposal.tokens == [*spell("ab"), PAD, PAD]
    assert (proposal.drafted_raw, proposal.drafted, proposal.trimmed) == (2, 2, 0)
    assert proposal.trimmed_ids == []


def test_nothing_found_is_an_ordinary_decode_step() -> None:
    """V1.1d."""
    drafter = NgramDrafter(4, 2, 4)
    proposals = drafter.free([running(TABLE, spell("bcd")), running(TABLE, [], max_new_tokens=1)])
    assert [proposal.tokens for proposal in proposals] == [[], []]


def test_no_draft_stands_past_the_length_limit() -> None:
    sequence = running(TABLE, spell("xab"), prompt=spell("abcde"), max_new_tokens=5)
    (proposal,) = NgramDrafter(4, 2, 4).free([sequence])  # L11: one of the two is the target's
    assert proposal.tokens == spell("c")


def test_it_runs_no_draft_model() -> None:
    toy = Toy(TABLE, random_law(TABLE, 1), random_law(TABLE, 2))
    watch, loop = toy.loop(toy.strategy("unguided"))
    assert loop.drafter is not None
    loop.drafter = NgramDrafter(3, 1, 2)
    loop.run([running(TABLE, []).request])
    assert sum(step.draft_forwards for step in watch.steps) == 0
    assert sum(step.drafted for step in watch.steps) > 0
