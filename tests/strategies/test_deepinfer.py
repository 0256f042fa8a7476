"""DeepInfer: lazy commit, preview, triggers, and masks addressed by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.core import Finish, Proposal
from harness.grammar.gate import TokenTriggerMatcher, Trigger
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from harness.step import Step
from strategies.base import NoOptions
from strategies.deepinfer import DeepInfer
from tests.strategies.letters import (
    TABLE,
    WORDS,
    ask,
    assert_a_broken_grammar_fails_alone,
    beside_plain,
    forbid_fills_behind_the_end,
    judge,
    letters,
    spell,
    steps_of,
    toy,
)
from tests.strategies.steps import LoggedMatcher, rows_of, step_of
from tests.toys import ENGINES, Toy, random_law

pytestmark = pytest.mark.parametrize("engine", ENGINES)

ALL = "ALL"


class Slot:
    """One request of the strategy, driven step by step without models."""

    def __init__(
        self, engine: str, grammar: GrammarSpec = WORDS, trigger: Trigger | None = None
    ) -> None:
        jig = toy("", "", engine)
        self.strategy = DeepInfer(NoOptions(), jig.setup)
        self.matcher = LoggedMatcher(jig, grammar)
        self.grammar = self.matcher.inner
        self.matcher.inner = TokenTriggerMatcher(
            self.grammar, trigger or Trigger("tokens"), jig.draft_tokens
        )
        self.uncommitted: list[int] = []

    def fill(self, drafts: str) -> Step:
        """The CPU's half of one step."""
        step = step_of(self.strategy, [self.matcher], [Proposal(spell(drafts))])
        step.sequences[0].state = self.uncommitted
        self.strategy.verify_rows(step)
        return step

    def step(self, drafts: str, emitted: str) -> tuple[list[str], list[list[int] | int]]:
        """A whole step: what each row allows, and how the matcher was moved."""
        self.matcher.log.clear()
        step = self.fill(drafts)
        assert step.sequences[0].error is None
        rows = rows_of(self.strategy, step)
        judge(step, spell(emitted))
        self.strategy.commit(step)
        self.uncommitted = step.sequences[0].state
        return rows, self.matcher.log


# -- One step (3.3) -----------------------------------------------------------------------------


def test_a_step_commits_the_last_one_then_previews_and_rolls_back(engine: str) -> None:
    """D11, D12, on the language {abcd, abce}: prefill, a partly accepted draft, the end."""
    a, b, c, d, e = ([token] for token in spell("abcde"))
    slot = Slot(engine)
    assert slot.step("", "a") == (["a"], [[]])  # so_status 1: nothing to feed
    assert slot.matcher.held == 0
    assert slot.step("bce", "bcd") == (["b", "c", "d e", "$"], [a, b, c, e, -3])
    assert slot.matcher.held == 1
    assert slot.step("", "$") == (["$"], [[*b, *c, *d]])
    assert slot.matcher.held == 4


def test_rows_behind_an_illegal_draft_stay_unmasked(engine: str) -> None:
    """D11.4, D13: the row before it has refused it already; stale bits do no harm."""
    a, b = ([token] for token in spell("ab"))
    slot = Slot(engine)
    slot.step("", "a")
    rows, moves = slot.step("bzc", "b")
    assert rows == ["b", "c", ALL, ALL]
    assert moves == [a, b, -1]


def test_rows_behind_the_stop_token_stay_unmasked(engine: str) -> None:
    """D7.3, Q10: junk behind it is accepted, counted, and rolled back with it."""
    slot = Slot(engine)
    slot.step("", "abc")
    rows, moves = slot.step("d$x", "d")
    assert rows == ["d e", "$", ALL, ALL]
    assert moves[-1] == -3
    assert slot.matcher.held == 3
    assert not slot.matcher.terminated


def test_padding_ends_the_preview(engine: str) -> None:
    """D17: draft id -1."""
    slot = Slot(engine)
    slot.step("", "a")
    step = step_of(slot.strategy, [slot.matcher], [Proposal([*spell("b"), -1, *spell("c")])])
    step.sequences[0].state = slot.uncommitted
    slot.strategy.verify_rows(step)
    assert step.sequences[0].error is None
    assert rows_of(slot.strategy, step) == ["b", "c", ALL, ALL]
    assert step.proposals[0].legal == [True, False, False]


@pytest.mark.parametrize("fills", [0, 1, 2, 3])
def test_a_preview_is_rolled_back_when_the_engine_breaks(
    engine: str, fills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11.5 and its exception: the request ends, the matcher holds what was committed."""
    slot = Slot(engine)
    slot.step("", "a")
    monkeypatch.setattr(slot.grammar, "fill", breaking(slot.grammar.fill, fills))
    step = slot.fill("bcd")
    assert "the engine broke" in str(step.sequences[0].error)
    assert slot.matcher.held == slot.matcher.ledger.held == 1
    assert slot.matcher.validate(spell("bcd$")) == 4


def breaking(fill: Any, fills_left: int) -> Any:
    """``fill``, until it has been called that often."""
    calls = iter(range(fills_left))

    def broken(mask: torch.Tensor, row: int) -> None:
        if next(calls, None) is None:
            raise RuntimeError("the engine broke")
        fill(mask, row)

    return broken


def test_a_refused_commit_is_the_requests_error(engine: str) -> None:
    """D11.2: upstream's invariant is broken; here, the tokens that were emitted are illegal."""
    slot = Slot(engine)
    slot.step("", "az")
    step = slot.fill("")
    assert "refuses emitted tokens" in str(step.sequences[0].error)
    assert slot.matcher.held == 0


# -- Triggers (3.2, 3.3) ------------------------------------------------------------------------

CALL = Trigger("tokens", tuple(spell("tu")))
BOUND = Trigger("tokens", tuple(spell("tu")), bound=spell("q")[0])


def test_a_trigger_completed_by_a_draft_masks_the_next_row(engine: str) -> None:
    """D13, Q14: rows before it are free."""
    slot = Slot(engine, trigger=CALL)
    assert slot.step("", "x")[0] == [ALL]
    assert slot.step("tua", "t")[0] == [ALL, ALL, "a", "b"]
    assert slot.step("uzx", "u")[0] == [ALL, "a", ALL, ALL]
    assert slot.step("ab", "ab")[0] == ["a", "b", "c"]


def test_behind_the_bound_token_only_the_trigger_may_follow(engine: str) -> None:
    """D7.1, D8: one bit per row; a draft that is not the trigger ends the preview."""
    slot = Slot(engine, trigger=BOUND)
    assert slot.step("xqt", "x")[0] == [ALL, ALL, "t", "u"]
    assert slot.step("qxt", "q")[0] == [ALL, "t", ALL, ALL]
    assert slot.step("tua", "t")[0] == ["t", "u", "a", "b"]
    assert slot.step("u", "u")[0] == ["u", "a"]


def test_free_text_then_the_trigger_inside_a_draft_then_the_grammar(engine: str) -> None:
    """D13, Q14, through the loop: drafts t, u, z, of which the grammar refuses z."""
    jig = toy(["x", "t", "u", "za", "zb", "zc", "ze", "z"], ["x", "t", "u", "z"], engine)
    watch = jig.run("deepinfer", [ask(trigger=CALL), ask(name="eager")])
    assert not watch.errors
    first = steps_of(watch)[0]
    assert (letters(first.draft_ids), letters(first.emitted_ids)) == ("tuz", "tua")
    assert (first.accepted, first.rejected_grammar, first.mask_rows) == (2, 1, 1)
    assert letters(watch.outputs["r"]) == "xtuabce$"
    assert letters(watch.outputs["eager"]) in ("abcd$", "abce$")


def test_the_bound_token_forces_the_trigger_through_the_loop(engine: str) -> None:
    """D7.1: both models go on with x behind the bound token q."""
    jig = toy(["y", "q", "x", "x", "x", "x", "x", "x", "x"], [*"yqxxxxxxxx"], engine)
    watch = jig.run("deepinfer", [ask(trigger=BOUND)])
    assert not watch.errors
    assert letters(watch.outputs["r"]) == "yqtuabcd$"
    assert watch.done["r"].finish is Finish.STOP


def test_free_text_that_ends_before_the_trigger_is_complete_by_itself(engine: str) -> None:
    model = ["x", "t", "y", "$"]
    watch = toy(model, model, engine).run("deepinfer", [ask(trigger=CALL)])
    assert not watch.errors
    assert letters(watch.outputs["r"]) == "xty$"
    assert not any(trace.mask_rows for trace in watch.steps)


def test_a_trigger_outside_the_vocabulary_is_refused(engine: str) -> None:
    """D2."""
    watch = toy("a", "a", engine).run("deepinfer", [ask(trigger=Trigger("tokens", (99,)))])
    assert "no token of this vocabulary" in watch.errors["r"]


# -- Masks by step (3.4), verification (3.5) ----------------------------------------------------


def test_ragged_requests_are_masked_in_their_own_rows(engine: str) -> None:
    """3.4: q-lens 3, 1, 2, so ftp = [0, 3, 4]; request 1 has no row at step 1 or 2."""
    slots = [Slot(engine) for _ in range(3)]
    for slot, text in zip(slots, ("a", "ab", "abc"), strict=True):
        slot.step("", text)
    strategy = slots[0].strategy
    step = step_of(
        strategy,
        [slot.matcher for slot in slots],
        [Proposal(spell(drafts)) for drafts in ("bc", "", "d")],
    )
    for sequence, slot in zip(step.sequences, slots, strict=True):
        sequence.state = slot.uncommitted
    strategy.verify_rows(step)
    # A row that the ragged window of request 1 does not have must not reach request 2's row 0.
    step.masks.fill(1, 1, slots[0].matcher)
    step.masks.fill(1, 2, slots[0].matcher)
    assert rows_of(strategy, step) == ["b", "c", "d e", "c", "d e", "$"]


def test_ragged_requests_decode_as_plain_does(engine: str) -> None:
    """3.4 through the loop: the limits leave 2, 0 and 1 drafts."""
    jig = Toy(TABLE, random_law(TABLE, 8), random_law(TABLE, 9), engine)
    limits = {"two": 4, "none": 2, "one": 3, "many": 24}
    requests = [
        ask(GrammarSpec.regex(f"{letter}[abcd]{{9}}"), name, max_new_tokens=limit)
        for letter, (name, limit) in zip("abcd", limits.items(), strict=True)
    ]
    watch = jig.run("deepinfer", requests)
    assert [steps_of(watch, name)[0].drafted for name in limits] == [2, 0, 1, 3]
    assert watch.outputs == jig.run("plain", requests).outputs


class Spy(DeepInfer):
    """Keeps the law of each step's drafts."""

    def __init__(self, jig: Toy) -> None:
        super().__init__(NoOptions(), jig.setup)
        self.q: list[torch.Tensor] = []

    def verify(self, step: Step, logits: torch.Tensor) -> Any:
        self.q += [proposal.q for proposal in step.proposals if proposal.q is not None]
        return super().verify(step, logits)


def test_the_drafter_is_not_masked(engine: str) -> None:
    """D17: illegal tokens have their share of q, and are drafted, and die of the grammar."""
    jig = Toy(
        TABLE, random_law(TABLE, 1), random_law(TABLE, 1), engine=engine, sampling=Sampling(1.0)
    )
    spy = Spy(jig)
    watch = jig.run(spy, [ask(GrammarSpec.regex("[ab]{20}"), max_new_tokens=16)])
    assert not watch.errors
    laws = torch.cat(spy.q)
    torch.testing.assert_close(laws.sum(-1), torch.ones(len(laws)))
    assert (laws[:, spell("xyz")] > 0).all()
    assert sum(trace.rejected_grammar for trace in watch.steps) > 0
    assert set(letters(watch.outputs["r"])) <= set("ab")


def test_tokens_behind_the_stop_in_one_step_are_dropped(engine: str) -> None:
    """D18: the target accepts junk behind ``$``, whose rows are unmasked."""
    model = ["a", "b", "c", "d", "$", "x", "x", "y"]
    watch = toy(model, [*"abce", *model[4:]], engine).run("deepinfer", [ask()])
    last = steps_of(watch)[-1]
    assert letters(watch.outputs["r"]) == "abcd$"
    assert (letters(last.draft_ids), last.accepted, last.past_stop) == ("$xx", 1, 2)


def test_drafts_behind_an_accepted_stop_are_past_it(engine: str) -> None:
    """D7.3 lets the preview accept them; the output has ended all the same."""
    watch = toy([*"abcd$q"], [*"abce$xx"], engine).run("deepinfer", [ask()])
    last = steps_of(watch)[-1]
    assert letters(last.draft_ids) == "$xx"
    assert (last.accepted, last.past_stop) == (1, 2)
    assert (last.rejected_grammar, last.rejected_model) == (0, 0)


# -- The running strategy -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_greedy_output_is_that_of_plain_decoding(engine: str, seed: int) -> None:
    watch, plain = beside_plain(engine, seed, "deepinfer")
    assert watch.outputs == plain.outputs


def test_the_matcher_lags_by_the_last_step(engine: str) -> None:
    """D12: and nothing is rolled back but previews, never more than K tokens."""
    watch, _ = beside_plain(engine, 3, "deepinfer")
    assert sum(trace.rollback_preview_tokens for trace in watch.steps) > 0
    for trace in watch.steps:
        assert trace.held == sum(
            each.emitted
            for each in watch.steps
            if each.request == trace.request and each.step < trace.step
        )
        assert trace.rollback_preview_tokens <= trace.drafted <= 3
        assert trace.rollback_draft_calls == trace.rollback_rejected_calls == 0


@pytest.mark.parametrize("word", ["k", "ak", "abk"])
def test_a_dead_end_fails_one_request_and_the_others_go_on(engine: str, word: str) -> None:
    model = ["a", "b", "c", "d", *"xxxxxxxx"]
    watch = toy(model, model, engine).run(
        "deepinfer", [ask(GrammarSpec.choice([word]), "dead"), ask(name="alive")]
    )
    assert list(watch.errors) == ["dead"]
    assert letters(watch.outputs["alive"]) == "abcd$"


def test_a_grammar_that_raises_ends_its_request_alone(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: any exception; others go on."""
    assert_a_broken_grammar_fails_alone("deepinfer", engine, monkeypatch)


def test_the_matcher_is_never_asked_behind_the_end(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q10."""
    forbid_fills_behind_the_end(monkeypatch)
    beside_plain(engine, 5, "deepinfer")
