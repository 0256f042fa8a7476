"""TensorRT-LLM: the executed ledger tables of the specification, then the running strategy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from harness.clock import Clock
from harness.core import Finish, Proposal
from harness.errors import MatcherError
from harness.grammar.masks import MaskBuffer
from harness.grammar.service import grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.models.sampling import Sampling
from harness.models.verifiers import MatchOwnSample, RejectionSampling
from harness.step import Step
from strategies.trtllm import Ledgers, Trtllm, TrtllmOptions, fill_row
from tests.strategies.letters import (
    TABLE,
    WORDS,
    allowed,
    ask,
    assert_a_broken_grammar_fails_alone,
    beside_plain,
    flags,
    forbid_fills_behind_the_end,
    judge,
    letters,
    spell,
    steps_of,
    toy,
    tracked,
)
from tests.strategies.steps import step_of
from tests.toys import ENGINES, Toy, ids, random_law, toy_table

pytestmark = pytest.mark.parametrize("engine", ENGINES)

K = 3


class Slot:
    """One slot driven by hand, in the order of an iteration (1.4)."""

    def __init__(self, engine: str, grammar: GrammarSpec = WORDS) -> None:
        self.engine, self.grammar = engine, grammar
        self.matcher = tracked(engine, grammar)
        self.books = Ledgers()
        self.masks = MaskBuffer(1, K + 1, len(TABLE), torch.device("cpu"))

    def build(self, new_token: str | None, drafts: str = "", draft_pass: bool = False) -> str:
        """One build; returns the row flags."""
        self.masks.clear()
        fill = partial(fill_row, self.masks, 0, self.matcher)
        new = None if new_token is None else spell(new_token)[0]
        self.books.build(self.matcher, fill, new, spell(drafts), draft_pass)
        return flags(self.masks, 1 if draft_pass or new_token is None else K + 1)

    def draft(self, new_token: str) -> str:
        return self.build(new_token, draft_pass=True)

    def accept(self, n_acc: int) -> None:
        """A verification that emits ``n_acc`` tokens, clamped as the strategy does (T13)."""
        strategy = Trtllm(TrtllmOptions(), toy("", "", self.engine).setup)
        step = step_of(strategy, [self.matcher], [Proposal(spell("xxx"))])
        step.sequences[0].state = self.books
        judge(step, spell("x" * n_acc))
        strategy.advance(step, 0, step.sequences[0], self.matcher)

    def roll_back_rejected(self) -> None:
        self.books.roll_back_rejected(self.matcher)

    def roll_back_drafts(self) -> None:
        self.books.roll_back_drafts(self.matcher)

    def expect(self, adv: int, gui: int, advd: int, dt: bool, inside: str) -> None:
        """A line of the tables: the ledgers, and the tokens inside the matcher."""
        books = self.books
        assert (books.advanced, books.guided) == (adv, gui)
        assert (books.advanced_drafts, books.draft_terminated) == (advd, dt)
        self.holds(inside)

    def holds(self, inside: str) -> None:
        fresh = tracked(self.engine, self.grammar, inside)
        assert self.matcher.held == self.matcher.ledger.held == len(inside)
        assert self.matcher.terminated == fresh.terminated
        assert allowed(self.matcher) == allowed(fresh)


# -- The executed tables (1.8) ------------------------------------------------------------------


def test_the_two_model_table_is_reproduced(engine: str) -> None:
    """1.8, first table, line by line."""
    slot = Slot(engine)
    assert slot.build(None) == "1"
    slot.expect(1, 1, 0, False, "")
    slot.accept(1)
    slot.roll_back_rejected()
    slot.expect(1, 1, 0, False, "")

    assert slot.draft("a") == "1"
    slot.expect(1, 1, 1, False, "a")
    assert slot.draft("b") == "1"
    slot.expect(1, 1, 2, False, "ab")
    assert slot.draft("c") == "1"
    slot.expect(1, 1, 3, False, "abc")
    slot.roll_back_drafts()
    slot.expect(1, 1, 0, False, "")

    assert slot.build("a", "bce") == "1111"
    slot.expect(4, 4, 0, False, "abce")
    slot.accept(3)  # b, c, and d in place of e
    slot.roll_back_rejected()
    slot.expect(4, 4, 0, False, "abc")

    assert slot.draft("d") == "1"
    slot.expect(1, 1, 1, False, "abcd")
    assert slot.draft("$") == "0"
    slot.expect(1, 0, 2, False, "abcd$")
    assert slot.draft("x") == "0"  # behind the end: skipped
    slot.expect(0, 0, 2, False, "abcd$")
    slot.roll_back_drafts()
    slot.expect(0, 0, 0, False, "abc")

    assert slot.build("d", "$xx") == "1000"
    slot.expect(2, 1, 0, False, "abcd$")
    assert slot.matcher.ledger.rollback_tokens == {
        "preview": 0,
        "draft": 3 + 2,
        "rejected": 1,
        "retokenize": 0,
    }


def test_the_one_model_table_is_reproduced(engine: str) -> None:
    """1.8, second table: an illegal draft, then garbage behind the stop token."""
    slot = Slot(engine)
    assert slot.build(None) == "1"
    slot.accept(1)
    slot.roll_back_rejected()
    slot.expect(1, 1, 0, False, "")

    assert slot.draft("a") == "1"
    slot.expect(1, 1, 1, False, "a")
    assert slot.draft("b") == "1"
    slot.expect(1, 1, 2, False, "ab")
    assert slot.draft("z") == "0"
    slot.expect(0, 0, 2, True, "ab")
    slot.roll_back_drafts()
    slot.expect(0, 0, 0, False, "")

    assert slot.build("a", "bzc") == "1100"
    slot.expect(2, 2, 0, False, "ab")
    slot.accept(2)  # b accepted, z rejected, c emitted
    slot.roll_back_rejected()
    slot.expect(2, 2, 0, False, "ab")

    assert [slot.draft(token) for token in "cd$"] == ["1", "1", "0"]
    slot.expect(1, 0, 3, False, "abcd$")
    slot.roll_back_drafts()
    slot.expect(1, 0, 0, False, "ab")

    assert slot.build("c", "d$q") == "1100"
    slot.expect(3, 2, 0, False, "abcd$")
    slot.accept(4)  # the garbage q counts as accepted on the device
    assert slot.books.accepted == 2
    slot.roll_back_rejected()
    slot.expect(3, 2, 0, False, "abcd$")


JSON = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
JSON_TABLE = toy_table('p{}":a1')
JSON_TEXT = '{"a":1111'


class JsonSlot:
    """The upstream test of drafters without a step loop: K = 3, characters for tokens."""

    def __init__(self, engine: str) -> None:
        jig = Toy(JSON_TABLE, random_law(JSON_TABLE, 0), random_law(JSON_TABLE, 0), engine=engine)
        compiled = grammar_engine(jig.engine, jig.table, "minimal").compile(JSON)
        self.matcher = TrackedMatcher(compiled.matcher(), Clock())
        self.books = Ledgers()
        self.masks = MaskBuffer(1, K + 1, len(JSON_TABLE), torch.device("cpu"))
        self.build(None)

    def build(self, start: int | None) -> None:
        """The target's build over four characters of the text from ``start`` on."""
        fed = [] if start is None else ids(JSON_TABLE, *JSON_TEXT[start : start + 4])
        new = fed[0] if fed else None
        self.masks.clear()
        self.books.build(self.matcher, partial(fill_row, self.masks, 0, self.matcher), new, fed[1:])


@pytest.mark.parametrize("n_acc", [1, 2, 3, 4])
def test_one_rollback_per_verification_lets_the_next_build_go_on(engine: str, n_acc: int) -> None:
    """1.8, the SA vector; Q3: any acceptance of golden ``{`` and three drafts."""
    slot = JsonSlot(engine)
    slot.build(0)
    assert slot.books.advanced == 4
    slot.books.accepted = n_acc - 1
    slot.books.roll_back_rejected(slot.matcher)
    assert slot.matcher.held == n_acc
    slot.build(n_acc)
    assert slot.books.advanced == 4
    assert slot.masks.flagged(0, 0)
    assert not slot.masks.allows(0, 0, JSON_TABLE.eos_id)


def test_without_that_rollback_the_next_golden_token_is_refused(engine: str) -> None:
    """1.8, end of the SA vector: all logits stay unmasked, and that request ends (step 3)."""
    slot = JsonSlot(engine)
    slot.build(0)
    with pytest.raises(MatcherError, match="refuses the emitted token"):
        slot.build(2)
    assert slot.books.advanced == 0
    assert not slot.masks.flagged(0, 0)


# -- The ledgers, rule by rule ------------------------------------------------------------------


def test_a_loop_that_failed_at_its_first_build_leaves_the_next_one_guided(engine: str) -> None:
    """T9, Q1: DT is reset although ADVD is 0."""
    slot = Slot(engine)
    slot.build(None)
    assert slot.draft("z") == "0"
    slot.expect(0, 0, 0, True, "")
    slot.roll_back_drafts()
    assert slot.draft("a") == "1"
    slot.expect(1, 1, 1, False, "a")


def test_a_failing_rollback_still_resets_the_draft_ledgers(engine: str) -> None:
    """T9, T11: each backend can raise; the reset is unconditional."""
    slot = Slot(engine)
    slot.books.advanced_drafts, slot.books.draft_terminated = 1, True
    with pytest.raises(MatcherError):
        slot.roll_back_drafts()
    slot.expect(0, 0, 0, False, "")


def test_a_chain_that_left_the_grammar_is_neither_advanced_nor_masked(engine: str) -> None:
    """1.2 step 3: DT holds until the end of the loop, legal tokens notwithstanding."""
    slot = Slot(engine)
    slot.build(None)
    assert [slot.draft(token) for token in "azb"] == ["1", "0", "0"]
    slot.expect(0, 0, 1, True, "a")


@pytest.mark.parametrize(("n_acc", "terminated"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_rejected_stop_token_unterminates_the_matcher(
    engine: str, n_acc: int, terminated: bool
) -> None:
    """T14, Q7: the drafts ``d $ a`` behind golden ``c``, ADV = 3; T13 clamps n_acc = 4."""
    slot = Slot(engine)
    slot.build(None)
    assert slot.matcher.accept(spell("ab"))
    assert slot.build("c", "d$a") == "1100"
    assert slot.books.advanced == 3
    slot.accept(n_acc)
    slot.roll_back_rejected()
    assert slot.matcher.terminated == terminated
    slot.holds("abcd$"[: 2 + min(n_acc, 3)])


def test_a_terminated_matcher_is_skipped_by_builds_and_rollback(engine: str) -> None:
    """T14: ADV is 0, so there is nothing to roll back."""
    slot = Slot(engine)
    assert slot.matcher.accept(spell("abcd$"))
    assert slot.build("x", "yz") == "0000"
    slot.expect(0, 0, 0, False, "abcd$")
    slot.roll_back_rejected()
    slot.holds("abcd$")


def test_more_accepted_than_fed_is_an_error(engine: str) -> None:
    """T8: r < 0."""
    slot = Slot(engine)
    slot.build(None)
    slot.build("a", "b")
    slot.books.accepted = 2
    with pytest.raises(MatcherError, match="2 drafts accepted of 2 fed"):
        slot.roll_back_rejected()


def test_the_context_phase_consumes_nothing_and_counts_one(engine: str) -> None:
    """1.2 step 4: the virtual 1 makes the first rollback 0."""
    slot = Slot(engine)
    slot.build(None)
    slot.expect(1, 1, 0, False, "")
    slot.roll_back_rejected()
    assert slot.matcher.ledger.rollback_calls["rejected"] == 0


# -- Dead ends (T7) -----------------------------------------------------------------------------

DEAD_AT_ONCE = GrammarSpec.choice(["k"])
DEAD_AFTER_A = GrammarSpec.choice(["ak"])
DEAD_AFTER_AB = GrammarSpec.choice(["abk"])


def test_a_dead_end_in_row_0_of_the_target_is_an_error_and_adv_0(engine: str) -> None:
    slot = Slot(engine, DEAD_AFTER_A)
    slot.build(None)
    with pytest.raises(MatcherError, match="dead end"):
        slot.build("a", "b")
    assert (slot.books.advanced, slot.books.guided) == (0, 0)
    assert flags(slot.masks, K + 1) == "0000"
    slot.roll_back_rejected()
    slot.holds("a")


def test_a_dead_end_in_a_draft_pass_ends_the_guiding_and_is_rolled_back(engine: str) -> None:
    slot = Slot(engine, DEAD_AFTER_AB)
    slot.build(None)
    assert [slot.draft(token) for token in "abx"] == ["1", "0", "0"]
    slot.expect(0, 0, 2, True, "ab")
    slot.roll_back_drafts()
    slot.expect(0, 0, 0, False, "")


def test_a_dead_end_behind_a_draft_ends_the_masked_rows(engine: str) -> None:
    """T7: golden a, drafts b, c; row 1 is dead: flags 1,0,0, GUI = 1, ADV = 2."""
    slot = Slot(engine, DEAD_AFTER_AB)
    slot.build(None)
    assert slot.build("a", "bc")[:3] == "100"
    slot.expect(2, 1, 0, False, "ab")


@pytest.mark.parametrize("grammar", [DEAD_AT_ONCE, DEAD_AFTER_A, DEAD_AFTER_AB])
def test_a_dead_end_fails_one_request_and_the_others_go_on(
    engine: str, grammar: GrammarSpec
) -> None:
    model = ["a", "b", "c", "d", *"xxxxxxxx"]
    watch = toy(model, model, engine).run("trtllm", [ask(grammar, "dead"), ask(name="alive")])
    assert list(watch.errors) == ["dead"]
    assert watch.done["dead"].finish is Finish.FAILED
    assert letters(watch.outputs["alive"]) == "abcd$"


# -- The running strategy -----------------------------------------------------------------------


class Spy(Trtllm):
    """Keeps the law of each step's drafts."""

    def __init__(self, options: TrtllmOptions, jig: Toy) -> None:
        super().__init__(options, jig.setup)
        self.q: list[torch.Tensor | None] = []

    def verify(self, step: Step, logits: torch.Tensor) -> Any:
        self.q += [proposal.q for proposal in step.proposals]
        return super().verify(step, logits)


def test_every_draft_step_is_masked_the_last_one_too(engine: str) -> None:
    """1.4a: the rollback follows the last fill. The draft model wants z everywhere."""
    watch = toy(["a", "b", "c", "d", "$"], ["a", "zb", "zc", "ze"], engine).run("trtllm", [ask()])
    first, second = steps_of(watch)
    assert letters(first.draft_ids) == "bce"
    assert letters(first.emitted_ids) == "bcd"
    assert first.rejected_model == 1
    assert first.rejected_grammar == 0
    assert (first.advanced, first.rollback_draft_tokens, first.held) == (3 + 4, 3, 4)
    assert letters(second.emitted_ids) == "$"
    assert second.rollback_rejected_tokens == 1


def test_drafts_behind_the_stop_token_die_of_the_grammar(engine: str) -> None:
    """1.8: the drafts ``$ x x`` behind golden d; the draft model goes on unguided (T20)."""
    watch = toy(["a", "b", "c", "d", "$", "q"], ["a", "b", "c", "e", "$", "x", "x"], engine).run(
        "trtllm", [ask()]
    )
    assert letters(watch.outputs["r"]) == "abcd$"
    last = steps_of(watch)[-1]
    assert letters(last.draft_ids) == "$xx"
    assert last.drafted == last.accepted + last.rejected_grammar + last.past_stop
    assert last.rejected_model == 0


def test_garbage_accepted_behind_the_stop_token_is_cut_and_clamped(engine: str) -> None:
    """T13: both models go on behind ``$``, so the verification emits four tokens of ADV = 2."""
    target = ["a", "b", "c", "d", "$", "x", "x", "y"]
    watch = toy(target, ["a", "b", "c", "e", *target[4:]], engine).run("trtllm", [ask()])
    last = steps_of(watch)[-1]
    assert letters(watch.outputs["r"]) == "abcd$"
    assert (letters(last.draft_ids), last.accepted, last.past_stop) == ("$xx", 1, 2)
    state = watch.done["r"].state
    assert (state.advanced, state.accepted) == (2, 1)


def test_the_matcher_is_never_asked_behind_the_end(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q10: stop tokens are drafted, accepted and rejected here."""
    forbid_fills_behind_the_end(monkeypatch)
    beside_plain(engine, 5, "trtllm")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_draft_length_of_0_lays_out_one_row(engine: str, limit: int) -> None:
    """T4, Q6: rows follow the run-time draft length, also where others in the batch draft."""
    model = ["a", "b", "c", "d", "$"]
    watch = toy(model, model, engine).run(
        "trtllm", [ask(name="short", max_new_tokens=limit), ask(name="long")]
    )
    assert not watch.errors
    assert letters(watch.outputs["short"]) == "abc"[:limit]
    assert letters(watch.outputs["long"]) == "abcd$"
    last = [trace for trace in watch.steps if trace.request == "short"][-1]
    assert last.rows == 1 + last.drafted == 1 + max(0, limit - 2)


def test_q_is_the_masked_law(engine: str) -> None:
    """T17: no draft probability stands on an illegal token while the chain is guided."""
    jig = Toy(
        TABLE, random_law(TABLE, 1), random_law(TABLE, 1), engine=engine, sampling=Sampling(1.0)
    )
    spy = Spy(TrtllmOptions(), jig)
    jig.run(spy, [ask(GrammarSpec.regex("[ab]{8,}"), max_new_tokens=8)])
    laws = torch.cat([q for q in spy.q if q is not None])
    legal = spell("ab$")
    torch.testing.assert_close(laws.sum(-1), torch.ones(len(laws)))
    torch.testing.assert_close(laws[:, legal].sum(-1), torch.ones(len(laws)))


def test_overlap_verifies_by_equality_with_argmax_drafts(engine: str) -> None:
    """T18, 1.4b."""
    jig = Toy(
        TABLE, random_law(TABLE, 1), random_law(TABLE, 1), engine=engine, sampling=Sampling(1.0)
    )
    assert isinstance(Trtllm(TrtllmOptions(), jig.setup).verifier, RejectionSampling)
    spy = Spy(TrtllmOptions(overlap=True), jig)
    assert isinstance(spy.verifier, MatchOwnSample)
    watch = jig.run(spy, [ask(GrammarSpec.regex("[abc]{3,}"), seed=4)])
    assert all(q is None for q in spy.q)
    plain = jig.run("plain", [ask(GrammarSpec.regex("[abc]{3,}"), seed=4)])
    assert watch.outputs == plain.outputs  # equality makes even sampled outputs the same


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_output_is_that_of_plain_decoding(engine: str, seed: int, overlap: bool) -> None:
    watch, plain = beside_plain(engine, seed, "trtllm", overlap=overlap)
    assert watch.outputs == plain.outputs


def test_the_rollbacks_are_drafts_and_rejected_tails_only(engine: str) -> None:
    """T6, T8, T9: nothing is previewed; what a step's drafting fed it took back."""
    jig = Toy(TABLE, random_law(TABLE, 2), random_law(TABLE, 3), engine)
    watch = jig.run("trtllm", [ask(GrammarSpec.regex("[abcde]{4,20}"))])
    steps = steps_of(watch)
    assert sum(step.rollback_draft_tokens for step in steps) > 0
    assert sum(step.rollback_rejected_tokens for step in steps) > 0
    assert not any(step.rollback_preview_calls for step in watch.steps)
    assert all(step.rollback_draft_tokens <= step.drafted for step in steps)
    # T6: golden and legal drafts; the rejected tail of the step before is gone (T8).
    emitted = 1
    for step in steps:
        legal_drafts = step.drafted - step.rejected_grammar - step.past_stop
        assert step.held == emitted + legal_drafts
        emitted += step.emitted


def test_a_grammar_that_raises_ends_its_request_alone(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.2 step 3, B: one request fails, and none else."""
    assert_a_broken_grammar_fails_alone("trtllm", engine, monkeypatch)
