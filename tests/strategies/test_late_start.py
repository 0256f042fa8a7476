"""Grammars that start late, in every strategy: thinking, lazy grammars, token triggers.

The boundary lies anywhere in a window of drafts, on its edges too, and is rolled back across.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from harness.core import Finish, Proposal, Request
from harness.grammar.gate import Trigger
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from strategies.vllm import Vllm
from tests.strategies.letters import TABLE, ask, letters, spell, steps_of, toy
from tests.strategies.steps import LoggedMatcher, drafts, rows_of, says, step_of
from tests.strategies.test_properties import CASES
from tests.toys import ENGINES, Law, Toy, ids, request, toy_table

T, U, Q = spell("tuq")
PATTERN = "(ab|ac|u)*d?"
BEHIND = GrammarSpec.regex(PATTERN)
WITH_T = GrammarSpec.regex(f"t{PATTERN}")

STARTS: dict[str, tuple[Trigger, GrammarSpec, str]] = {
    "reasoning": (Trigger("reasoning", (T, U)), BEHIND, f".*?tu({PATTERN})"),
    "implicit": (Trigger("reasoning", (Q,), implicit=(T,)), WITH_T, f".*?(q?t{PATTERN})"),
    "masked": (Trigger("reasoning", (T,), implicit=(U, Q)), WITH_T, f"[^uq]*?t(t{PATTERN})"),
    "budget": (Trigger("reasoning", (T, U), budget=2), BEHIND, f".{{,3}}?tu({PATTERN})"),
    "tokens": (Trigger("tokens", (T, U)), BEHIND, f".*?tu({PATTERN})"),
    "bound": (Trigger("tokens", (T, U), bound=Q), BEHIND, f"[^q]*?q?tu({PATTERN})"),
    "token": (Trigger("token", (T,)), WITH_T, f"[^t]*(t{PATTERN})"),
    "word": (Trigger("word", text="t"), WITH_T, f"[^t]*(t{PATTERN})"),
    "pattern": (Trigger("pattern", text="t(a|u)"), BEHIND, f".*?t((?=[au]){PATTERN})"),
    "pattern_full": (Trigger("pattern_full", text="[a-z]*(t)"), WITH_T, f"[^t]*(t{PATTERN})"),
}
"""By name: what starts the grammar, the grammar, and what the whole output then looks like."""

cases = pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
engines = pytest.mark.parametrize("engine", ENGINES)


def late(start: str, name: str = "r", **fields: Any) -> Request:
    trigger, grammar, _ = STARTS[start]
    return ask(grammar, name, trigger=trigger, **fields)


def ranked(seed_text: str) -> Law:
    """A model that wants these letters in turn, and where they are illegal a, b, c, d, ``$``."""

    def law(tokens: tuple[int, ...]) -> list[float]:
        at = len(tokens) - 1
        wanted = spell(seed_text[at : at + 1] + "dcbatu$")
        scores = [-50.0 - token for token in range(len(TABLE))]
        for rank, token in reversed(list(enumerate(wanted))):
            scores[token] = -float(rank)
        return scores

    return law


# -- Every strategy, every late start ------------------------------------------------------------


@cases
@settings(max_examples=30, deadline=None)
@given(
    start=st.sampled_from(sorted(STARTS)),
    engine=st.sampled_from(ENGINES),
    target=st.text("abtuqxz", max_size=9),
    wrong=st.dictionaries(st.integers(0, 9), st.sampled_from("tuqxa"), max_size=3),
    slots=st.integers(1, 2),
    drafts=st.integers(1, 4),
)
def test_greedy_output_is_plains_wherever_the_boundary_lies(
    case: str,
    start: str,
    engine: str,
    target: str,
    wrong: dict[int, str],
    slots: int,
    drafts: int,
) -> None:
    """Property 2, Q14: the draft model agrees but for a few letters, so windows are accepted whole
    or in part, with the boundary in either; some of the wrong letters are boundaries themselves.
    """
    name, options = CASES[case]
    draft = "".join(wrong.get(i, letter) for i, letter in enumerate(target.ljust(10, "d")))
    jig = Toy(TABLE, ranked(target), ranked(draft), engine, drafts, slots, paranoid=True)
    requests = [late(start), late(start, "other", max_new_tokens=7), ask(name="eager")]
    watch = jig.run(jig.strategy(name, **options), requests)
    plain = jig.run("plain", requests)
    assert watch.errors == plain.errors
    assert watch.outputs == plain.outputs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", range(6))
def test_text_before_the_boundary_is_free_and_text_behind_it_obeys(case: str, at: int) -> None:
    """Property 3: both models end their thinking at ``at``, and then want x."""
    name, options = CASES[case]
    text = "xzyxzy"[:at] + "tutax"
    jig = Toy(TABLE, ranked(text), ranked(text))
    watch = jig.run(jig.strategy(name, **options), [late(start, start) for start in STARTS])
    assert not watch.errors
    for start, (_, _, whole) in STARTS.items():
        output = letters(watch.outputs[start]).removesuffix("$")
        assert re.fullmatch(whole, output), start
        free = min(at, 2) if start == "budget" else at
        assert output[:free] == text[:free]


@cases
@engines
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_boundary_that_is_drafted_and_refused_leaves_the_text_free(
    case: str, engine: str, temperature: float
) -> None:
    """S4c, D9: the draft ends the thinking in each window, the target never does."""
    name, options = CASES[case]
    law, draft = ranked("x" * 20), ranked("xtuab" * 4)

    def sure(tokens: tuple[int, ...]) -> list[float]:
        return [50 * score for score in law(tokens)]

    jig = Toy(TABLE, sure, draft, engine, sampling=Sampling(temperature))
    requests = [late(start, start, max_new_tokens=9) for start in STARTS if start != "budget"]
    watch = jig.run(jig.strategy(name, **options), requests)
    assert not watch.errors
    assert set(map(letters, watch.outputs.values())) == {"x" * 9}


@cases
@engines
def test_output_that_ends_before_the_boundary_is_complete(case: str, engine: str) -> None:
    """L20, D7.2, S4d: nothing holds a stop token back, but a spent budget."""
    name, options = CASES[case]
    jig = toy([*"xz$"], [*"xz$"], engine)
    watch = jig.run(jig.strategy(name, **options), [late(start, start) for start in STARTS])
    assert not watch.errors
    assert {each.finish for each in watch.done.values()} == {Finish.STOP}
    outputs = {start: letters(output) for start, output in watch.outputs.items()}
    assert outputs.pop("budget").startswith("xztu")
    assert set(outputs.values()) == {"xz$"}


@cases
@engines
def test_rows_before_the_boundary_are_not_masked(case: str, engine: str) -> None:
    """D13: a late start costs nothing while it sleeps."""
    name, options = CASES[case]
    jig = toy([*"xzxzxz$"], [*"xzxzxz$"], engine)
    watch = jig.run(jig.strategy(name, **options), [late("reasoning"), late("word", "lazy")])
    assert not any(trace.mask_rows for trace in watch.steps)


@cases
@engines
def test_a_trigger_that_carries_illegal_text_fails_only_when_the_target_says_it(
    case: str, engine: str
) -> None:
    """L22: a draft of it merely dies; the target's own fails the request, and no other."""
    name, options = CASES[case]
    table = toy_table([*"pabcdexyztu", "tz"])
    tz, x, a = ids(table, "tz", "x", "a")

    def says_at(position: int, token: int) -> Law:
        def law(tokens: tuple[int, ...]) -> list[float]:
            wanted = token if len(tokens) - 1 == position else x
            return [50.0 * (each == wanted) + (each == a) for each in range(len(table))]

        return law

    lazy = request(table, WITH_T, "lazy", trigger=Trigger("word", text="t"), max_new_tokens=8)
    eager = request(table, GrammarSpec.regex("x{6}"), "eager", max_new_tokens=8)
    drafted = Toy(table, says_at(2, x), says_at(2, tz), engine)
    watch = drafted.run(drafted.strategy(name, **options), [lazy, eager])
    assert not watch.errors
    assert watch.outputs["lazy"] == [x] * 8
    sampled = Toy(table, says_at(2, tz), says_at(2, tz), engine)
    watch = sampled.run(sampled.strategy(name, **options), [lazy, eager])
    assert list(watch.errors) == ["lazy"]


# -- vLLM's bounds (V1.5) ------------------------------------------------------------------------

WORDS_OF_V1_5 = toy_table(["x", "T", "K", "{", '"a"', ":", "}"])
K_FIRST, OPEN_FIRST = (
    GrammarSpec.ebnf(r'root ::= "K" "{" ("\"a\"" | ":")'),
    GrammarSpec.ebnf(r'root ::= "{" ("\"a\"" | ":")'),
)
NOT_K = 'x T { "a" : } $'


@engines
@pytest.mark.parametrize(
    ("window", "grammar", "rows", "kept"),
    [
        ('x T { "a"', OPEN_FIRST, [NOT_K, NOT_K, "{", '"a" :', "$"], 4),
        ("x x", OPEN_FIRST, [NOT_K] * 3, 2),
        ("x x x T", OPEN_FIRST, [*[NOT_K] * 4, "{"], 4),
        ('T x { "a"', OPEN_FIRST, [NOT_K, "{", "{", "{", "{"], 1),
        ("", OPEN_FIRST, [NOT_K], 0),
        ("x K {", OPEN_FIRST, [NOT_K] * 4, 1),
        ("x K {", K_FIRST, ["ALL", "ALL", "{", '"a" :'], 3),
        ("x T -1 -1", K_FIRST, ["ALL", "ALL", "K", "ALL", "ALL"], 2),  # R1
    ],
)
def test_vllms_rows_follow_the_reasoning_bounds(
    engine: str, window: str, grammar: GrammarSpec, rows: SequenceOf[str], kept: int
) -> None:
    """V1.5c-g, V1.1a: what validation keeps of a window, and its rows if all of it reached them."""
    jig = Toy(
        WORDS_OF_V1_5, says(WORDS_OF_V1_5, ""), says(WORDS_OF_V1_5, ""), engine, draft_tokens=4
    )
    strategy = Vllm(Vllm.Options(), jig.setup)
    trigger = Trigger(
        "reasoning",
        tuple(drafts(WORDS_OF_V1_5, "T")),
        implicit=tuple(drafts(WORDS_OF_V1_5, "K")),
    )
    matcher = LoggedMatcher(jig, grammar)
    matcher.inner = strategy.matcher(jig.grammar_engine().compile(grammar), trigger)
    proposal = Proposal(drafts(WORDS_OF_V1_5, window))
    strategy.trim(proposal, matcher)
    assert proposal.tokens == drafts(WORDS_OF_V1_5, window)[:kept]
    step = step_of(strategy, [matcher], [Proposal(drafts(WORDS_OF_V1_5, window))])
    strategy.verify_rows(step)
    assert rows_of(strategy, step) == rows
    assert matcher.held == 0


# -- SGLang's jumps (S4f) ------------------------------------------------------------------------


@engines
def test_a_jump_waits_for_the_end_of_the_thinking(engine: str) -> None:
    """S4f: all of the grammar's text is forced, but not yet."""
    thoughts = [*"xyxyxyxytu"]
    jig = toy(thoughts, thoughts, engine)
    grammar = GrammarSpec.regex("abcde")
    watch = jig.run("sglang", [ask(grammar, trigger=Trigger("reasoning", (T, U)))])
    assert letters(watch.outputs["r"]) == "xyxyxyxytuabcde$"
    *thinking, jumped, ended = (trace.jump_tokens for trace in steps_of(watch))
    assert (set(thinking), jumped + ended) == ({0}, 4)


@engines
def test_a_jump_never_rewrites_what_woke_the_grammar(engine: str) -> None:
    """S1h meets S4f: re-encoded, t and u are one token, and the end of thinking is gone."""
    table = toy_table([*"pabcdexytu", "tu"])

    def law(tokens: tuple[int, ...]) -> list[float]:
        wanted = ids(table, *"xtu$")[min(len(tokens) - 1, 3)]
        return [float(token == wanted) for token in range(len(table))]

    jig = Toy(table, law, law, engine)
    trigger = Trigger("reasoning", tuple(ids(table, "t", "u")))
    watch = jig.run("sglang", [request(table, GrammarSpec.regex("abc"), trigger=trigger)])
    assert not watch.errors
    assert watch.outputs["r"][:3] == ids(table, *"xtu")
    assert b"".join(table.tokens[token] for token in watch.outputs["r"]) == b"xtuabc"
