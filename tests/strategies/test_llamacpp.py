"""llama.cpp: the worked example, draft limits, lazy grammars, and what it must never do."""

from __future__ import annotations

from typing import Any

import pytest

from harness.core import Finish
from harness.errors import ConfigError
from harness.grammar.gate import Trigger
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from harness.step import Step
from strategies.llamacpp import DraftStats, LlamaCpp, LlamaCppOptions
from tests.strategies.letters import (
    ask,
    assert_a_broken_grammar_fails_alone,
    beside_plain,
    forbid_fills_behind_the_end,
    letters,
    spell,
    steps_of,
    toy,
)
from tests.toys import ENGINES, Law, Toy, ids, request, toy_table

pytestmark = pytest.mark.parametrize("engine", ENGINES)


class Spy(LlamaCpp):
    """Notes after each step what the caches and the counters say."""

    def __init__(self, jig: Toy, **options: Any) -> None:
        super().__init__(LlamaCppOptions(**options), jig.setup)
        self.cached: list[str] = []
        self.counts: list[tuple[int, int, int]] = []

    def commit(self, step: Step) -> None:
        super().commit(step)
        (sequence,), stats = step.sequences, self.stats
        self.cached.append(letters(sequence.output_ids[: sequence.target_length - 1]))
        self.counts.append((stats.n_draft, stats.n_accepted, stats.n_verify_steps))


# -- Check, then resample (2.2, 2.4, 2.9) -------------------------------------------------------


def test_the_worked_example_is_reproduced(engine: str) -> None:
    """2.9: golden a, drafts b z q; the target wants b, then the illegal z."""
    jig = toy(["a", "b", "zc", "d", "$"], ["a", "b", "z", "q"], engine)
    spy = Spy(jig)
    watch = jig.run(spy, [ask()])
    step = steps_of(watch)[0]
    assert letters(step.draft_ids) == "bzq"
    assert letters(step.emitted_ids) == "bc"
    assert (step.accepted, step.rows, step.wasted_rows) == (1, 4, 2)
    assert (step.rejected_grammar, step.rejected_model) == (2, 0)
    assert step.mask_rows == 1  # row 1 alone is masked
    assert step.held == 3  # abc
    assert spy.cached[1] == "ab"  # c is sampled, not yet in the cache
    assert spy.counts[1] == (3, 1, 1)


def test_only_the_token_that_is_emitted_advances_the_grammar(engine: str) -> None:
    """2.2 step 3: a refused choice is never accepted first; L14b: nothing to roll back."""
    watch = toy(["za", "zb", "zc", "ze", "z"], ["a", "z", "z", "z"], engine).run(
        "llamacpp", [ask()]
    )
    assert letters(watch.outputs["r"]) == "abce$"
    assert [trace.held for trace in watch.steps] == [1, 2, 3, 4, 5]
    assert [trace.advanced for trace in watch.steps] == [1, 1, 1, 1, 1]
    assert [trace.mask_rows for trace in watch.steps] == [1, 1, 1, 1, 1]


def test_a_draft_equal_to_the_targets_own_illegal_choice_is_not_accepted(engine: str) -> None:
    """2.9: equality is tested with the token after resampling."""
    watch = toy(["a", "zb", "c", "d", "$"], [*"azzzzz"], engine).run("llamacpp", [ask()])
    assert letters(watch.outputs["r"]) == "abcd$"
    assert not any(trace.accepted for trace in watch.steps)


def test_a_legal_choice_costs_no_mask(engine: str) -> None:
    """L4: one check per token."""
    model = ["a", "b", "c", "d", "$"]
    watch = toy(model, model, engine).run("llamacpp", [ask()])
    assert letters(watch.outputs["r"]) == "abcd$"
    assert not any(trace.mask_rows for trace in watch.steps)


def test_a_drafted_stop_token_ends_the_walk(engine: str) -> None:
    """L14e: it is accepted if the target samples it; drafts behind it are no model's fault."""
    target = ["a", "b", "c", "d", "$", "x", "x"]
    watch = toy(target, ["a", "b", "c", "e", "$", "x", "x"], engine).run("llamacpp", [ask()])
    last = steps_of(watch)[-1]
    assert letters(watch.outputs["r"]) == "abcd$"
    assert (letters(last.draft_ids), letters(last.emitted_ids)) == ("$xx", "$")
    assert (last.accepted, last.past_stop) == (1, 2)
    assert (last.rejected_grammar, last.rejected_model) == (0, 0)


def test_a_dead_end_fails_one_request_and_the_others_go_on(engine: str) -> None:
    """L6: where upstream picks anything, and throws."""
    model = ["a", "b", "c", "d", "$"]
    requests = [
        ask(GrammarSpec.choice(["k"]), "at_once"),
        ask(GrammarSpec.choice(["abk"]), "in_the_draft"),
        ask(name="alive"),
    ]
    watch = toy(model, model, engine).run("llamacpp", requests)
    assert set(watch.errors) == {"at_once", "in_the_draft"}
    assert all("dead end" in error for error in watch.errors.values())
    assert letters(watch.outputs["alive"]) == "abcd$"


def test_a_grammar_that_raises_ends_its_request_alone(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_a_broken_grammar_fails_alone("llamacpp", engine, monkeypatch)


# -- The draft loop (2.3) -----------------------------------------------------------------------

WIDE = toy_table("pabcdefghijklmnoqrstuvwxyz")
ANYTHING = GrammarSpec.regex("[a-z]+")


def flat(tokens: tuple[int, ...]) -> list[float]:
    """One token leads by 1: e / (e + 9) = 0.23 among ten, e / (e + 26) = 0.09 among all."""
    return [float(token == 5) for token in range(len(WIDE))]


def drafted(engine: str, law: Law, **options: Any) -> list[tuple[int, int]]:
    """Drafts and draft forwards of each step that had room for three."""
    jig = Toy(WIDE, flat, law, engine=engine)
    watch = jig.run(jig.strategy("llamacpp", **options), [request(WIDE, ANYTHING)])
    assert not watch.errors
    return [
        (trace.drafted, trace.draft_forwards)
        for trace in steps_of(watch)
        if sum(each.emitted for each in watch.steps if each.step < trace.step) < 20
    ]


@pytest.mark.parametrize(("p_min", "found"), [(0.0, (3, 3)), (0.22, (3, 3)), (0.24, (0, 1))])
def test_p_min_is_measured_among_the_top_ten(
    engine: str, p_min: float, found: tuple[int, int]
) -> None:
    """L8, L9: the unsure token is not added; its forward was made."""
    assert set(drafted(engine, flat, p_min=p_min)) == {found}


def unsure_from_the_second(tokens: tuple[int, ...]) -> list[float]:
    """Sure of f behind e, which is the target's token; then flat."""
    lead = 9.0 if tokens[-1] == 5 else 1.0
    return [lead * (token == 6) for token in range(len(WIDE))]


@pytest.mark.parametrize(("n_min", "found"), [(0, (1, 2)), (1, (1, 2)), (2, (0, 2)), (3, (0, 2))])
def test_a_draft_below_n_min_is_dropped(engine: str, n_min: int, found: tuple[int, int]) -> None:
    """L10: the draft is a single f."""
    assert set(drafted(engine, unsure_from_the_second, p_min=0.5, n_min=n_min)) == {found}


def test_a_dropped_draft_may_be_what_the_target_emits(engine: str) -> None:
    """L10, L16: the draft model's cache forgets the dropped draft, and is fed it again."""

    def alternating(tokens: tuple[int, ...]) -> list[float]:
        return [float(token == (6 if tokens[-1] == 5 else 5)) for token in range(len(WIDE))]

    jig = Toy(WIDE, alternating, unsure_from_the_second, engine=engine)
    watch = jig.run(jig.strategy("llamacpp", p_min=0.5, n_min=2), [request(WIDE, ANYTHING)])
    assert watch.outputs["r"] == [5, 6] * 12


def test_a_dropped_draft_is_named_in_the_trace(engine: str) -> None:
    jig = Toy(WIDE, flat, unsure_from_the_second, engine=engine)
    watch = jig.run(jig.strategy("llamacpp", p_min=0.5, n_min=2), [request(WIDE, ANYTHING)])
    dropped = [trace for trace in watch.steps if trace.trimmed]
    assert dropped
    assert {tuple(trace.trimmed_ids) for trace in dropped} == {(6,)}


def test_a_dropped_draft_is_no_verification(engine: str) -> None:
    """L26: n_min-cleared and p_min-empty drafts are not counted anywhere."""
    jig = Toy(WIDE, flat, unsure_from_the_second, engine=engine)
    strategy = jig.strategy("llamacpp", p_min=0.5, n_min=2)
    jig.run(strategy, [request(WIDE, ANYTHING)])
    assert strategy.statistics() == {
        "draft_acceptance": None,
        "mean_len": None,
        "acc_per_pos": [],
    }


def test_the_draft_is_the_argmax_also_when_sampling(engine: str) -> None:
    """L8: the random pick of the draft's sampler is ignored."""
    jig = Toy(WIDE, flat, flat, engine=engine, sampling=Sampling(1.0))
    watch = jig.run("llamacpp", [request(WIDE, ANYTHING)])
    assert {token for trace in watch.steps for token in trace.draft_ids} == {5}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"p_min": -0.1}, "p_min"),
        ({"p_min": 1.5}, "p_min"),
        ({"n_min": -1}, "n_min"),
        ({"n_min": 4}, "n_min"),
    ],
)
def test_an_option_outside_its_range_is_refused(
    engine: str, options: dict[str, Any], field: str
) -> None:
    """L9, L10; with engine.draft_tokens = 3."""
    with pytest.raises(ConfigError, match=rf"options\.llamacpp\.{field}"):
        toy("", "", engine).strategy("llamacpp", **options)


# -- Lazy grammars (2.7) ------------------------------------------------------------------------

FROM_T = GrammarSpec.choice(["tab", "tac"])
FROM_A = GrammarSpec.choice(["ab", "ac"])
T = spell("t")[0]
STARTS = [
    (Trigger("token", (T,)), FROM_T),
    (Trigger("word", text="t"), FROM_T),
    (Trigger("pattern", text="t"), FROM_T),
    (Trigger("pattern_full", text="[xy]*(t)"), FROM_T),
]


@pytest.mark.parametrize(("trigger", "grammar"), STARTS)
def test_a_trigger_inside_the_draft_constrains_the_very_next_row(
    engine: str, trigger: Trigger, grammar: GrammarSpec
) -> None:
    """L23, Q14: drafts x, t, z; the row behind t resamples."""
    jig = toy(["y", "x", "t", "za", "zc", "z$"], ["y", "x", "t", "z"], engine)
    watch = jig.run("llamacpp", [ask(grammar, trigger=trigger)])
    step = steps_of(watch)[0]
    assert letters(step.draft_ids) == "xtz"
    assert letters(step.emitted_ids) == "xta"
    assert (step.accepted, step.mask_rows) == (2, 1)
    assert (step.rejected_grammar, step.rejected_model) == (1, 0)
    assert letters(watch.outputs["r"]) == "yxtac$"
    assert watch.done["r"].finish is Finish.STOP


def test_what_stands_before_the_capture_group_is_not_replayed(engine: str) -> None:
    """L21, Q12: the grammar begins with a; its t is the mark, no text of the grammar."""
    jig = toy(["y", "t", "a", "zb", "z$"], ["y", "t", "a", "z"], engine)
    watch = jig.run("llamacpp", [ask(FROM_A, trigger=Trigger("pattern", text="t(a)"))])
    assert not watch.errors
    assert letters(watch.outputs["r"]) == "ytab$"
    assert letters(steps_of(watch)[0].emitted_ids) == "tab"


def test_before_the_trigger_everything_goes(engine: str) -> None:
    """L20: asleep, it masks nothing, and free text may end."""
    model = ["y", "x", "z", "$"]
    watch = toy(model, model, engine).run(
        "llamacpp", [ask(FROM_T, trigger=Trigger("word", text="t"))]
    )
    assert not watch.errors
    assert letters(watch.outputs["r"]) == "yxz$"
    assert not any(trace.mask_rows for trace in watch.steps)


MERGED = toy_table([*"pabcdexyzqtu", "tz"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_trigger_token_with_illegal_text_behind_it_fails_its_request_alone(
    engine: str, at: int, temperature: float
) -> None:
    """L22: ``tz`` was sampled unmasked; in the first row, in the draft, or in the bonus row."""
    tz = MERGED.ids_by_bytes[b"tz"]

    def law(tokens: tuple[int, ...]) -> list[float]:
        wanted = tz if len(tokens) - 1 == at else MERGED.ids_by_bytes[b"x"]
        return [50.0 * (token == wanted) for token in range(len(MERGED))]

    jig = Toy(MERGED, law, law, engine=engine, sampling=Sampling(temperature))
    lazy = request(MERGED, FROM_T, "lazy", trigger=Trigger("word", text="t"))
    eager = request(MERGED, GrammarSpec.regex("x{6}"), "eager")
    watch = jig.run("llamacpp", [lazy, eager])
    assert list(watch.errors) == ["lazy"]
    assert "which its mask allows" in watch.errors["lazy"]
    assert watch.outputs["eager"] == [*ids(MERGED, *"xxxxxx"), MERGED.eos_id]


def test_a_refused_trigger_token_is_not_drawn_again(engine: str) -> None:
    """L22: it fails the request whenever the target samples it; no second draw hides it."""
    tz, x = MERGED.ids_by_bytes[b"tz"], MERGED.ids_by_bytes[b"x"]

    def law(tokens: tuple[int, ...]) -> list[float]:
        return [50.0 * (token in (tz, x)) for token in range(len(MERGED))]

    jig = Toy(MERGED, law, law, engine=engine, sampling=Sampling(1.0))
    requests = [
        request(
            MERGED, FROM_T, f"r{i}", seed=i, max_new_tokens=2, trigger=Trigger("word", text="t")
        )
        for i in range(12)
    ]
    free = jig.run("unguided", requests).outputs
    sampled = {name for name, output in free.items() if tz in output}
    assert 0 < len(sampled) < len(requests)
    assert set(jig.run("llamacpp", requests).errors) == sampled


def test_a_trigger_token_that_the_grammar_does_not_begin_with_fails_its_request(
    engine: str,
) -> None:
    """L22 for a token trigger, which is fed to the grammar itself (L21)."""
    model = ["y", "t", "a", "b", "$"]
    watch = toy(model, model, engine).run(
        "llamacpp", [ask(FROM_A, trigger=Trigger("token", (T,))), ask(name="fine")]
    )
    assert list(watch.errors) == ["r"]
    assert letters(watch.outputs["fine"]) == "abcd$"


def test_a_trigger_outside_the_vocabulary_is_refused(engine: str) -> None:
    watch = toy("a", "a", engine).run("llamacpp", [ask(trigger=Trigger("token", (99,)))])
    assert "no token of this vocabulary" in watch.errors["r"]


# -- Numbers (2.8) ------------------------------------------------------------------------------


def test_the_counters_are_those_of_the_log_line(engine: str) -> None:
    """L25: two steps of three drafts, of which one and three lived."""
    stats = DraftStats()
    stats.observe(3, 1)
    stats.observe(3, 3)
    assert stats.summary() == {
        "draft_acceptance": 4 / 6,
        "mean_len": 1 + 4 / 2,
        "acc_per_pos": [2 / 2, 1 / 2, 1 / 2],
    }


def test_free_text_counts_as_well(engine: str) -> None:
    """L25: the counters do not ask for a grammar."""
    model = ["a", "b", "c", "d", "$"]
    jig = toy(model, model, engine)
    strategy = jig.strategy("llamacpp")
    jig.run(strategy, [ask(None)])
    assert strategy.statistics()["draft_acceptance"] == 1.0


# -- The running strategy -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"p_min": 0.4}, {"n_min": 3}, {"p_min": 0.3, "n_min": 2}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_that_of_plain_decoding(
    engine: str, seed: int, options: dict[str, Any]
) -> None:
    watch, plain = beside_plain(engine, seed, "llamacpp", **options)
    assert watch.outputs == plain.outputs


def test_nothing_is_ever_rolled_back(engine: str) -> None:
    """L14b: and the matcher holds exactly the emitted tokens."""
    watch, _ = beside_plain(engine, 7, "llamacpp")
    for trace in watch.steps:
        assert trace.held == sum(
            each.emitted
            for each in watch.steps
            if each.request == trace.request and each.step <= trace.step
        )
        for kind in ("preview", "draft", "rejected", "retokenize"):
            assert getattr(trace, f"rollback_{kind}_tokens") == 0


def test_the_matcher_is_never_asked_behind_the_end(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q10."""
    forbid_fills_behind_the_end(monkeypatch)
    beside_plain(engine, 5, "llamacpp")
