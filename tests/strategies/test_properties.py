"""What holds for every strategy, whatever the drafts, the grammar and the batch.

The numbers behind the checks are the properties of spec/regressions.md. A model made of a table
drives each strategy; drafts come from another table, or from a script that proposes illegal
tokens, stop tokens anywhere, padding, and more than the grammar has room for.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.core import PAD, Proposal, Sequence
from harness.drafters.model import ModelDrafter
from harness.grammar.matcher import CompiledGrammar, Matcher
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from harness.results.metrics import check_identities, compare_with_plain, summarise
from harness.results.record import Recorder
from strategies.trtllm import ledgers
from tests.toys import ENGINES, Toy, random_law, request, toy_table

TABLE = toy_table(["a", "b", "c", "ab", "bc", "abc", "d"])

ATOMS = st.sampled_from(["a", "b", "c", "[abc]", "(ab|c)", "(abc|abd)", "[^a]"])
REPEATS = st.sampled_from(["", "", "?", "*", "{1,3}"])
REGEXES = st.lists(st.tuples(ATOMS, REPEATS).map("".join), min_size=1, max_size=4).map("".join)
WORDS = st.text("abcd", min_size=1, max_size=6)
GRAMMARS = st.one_of(
    REGEXES.map(GrammarSpec.regex),
    st.lists(WORDS, min_size=1, max_size=4, unique=True).map(GrammarSpec.choice),
)
SCRIPTS = st.lists(st.integers(PAD, len(TABLE) - 1), min_size=1, max_size=12)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "vllm": ("vllm", {}),
    "vllm_async": ("vllm", {"asynchronous": True}),
    "vllm_keep": ("vllm", {"keep_first_invalid": True}),
    "vllm_async_keep": ("vllm", {"asynchronous": True, "keep_first_invalid": True}),
    "trtllm": ("trtllm", {}),
    "trtllm_overlap": ("trtllm", {"overlap": True}),
    "llamacpp": ("llamacpp", {}),
    "llamacpp_limits": ("llamacpp", {"p_min": 0.3, "n_min": 1}),
    "sglang": ("sglang", {"jump_forward": False}),
    "sglang_tree": ("sglang", {"jump_forward": False, "tree_width": 2}),
    "sglang_jump": ("sglang", {}),
    "sglang_jump_hold_back": ("sglang", {"hold_back_last": 1}),
    "deepinfer": ("deepinfer", {}),
}


class ScriptedDrafter(ModelDrafter):
    """Proposes tokens from a script, whatever the draft model says."""

    script: ClassVar[list[int]] = []

    def free(self, sequences: SequenceOf[Sequence], *_: Any, **__: Any) -> list[Proposal]:
        proposals = []
        for sequence in sequences:
            at = sequence.length % len(self.script)
            room = max(0, min(self.draft_tokens, sequence.remaining - 1))
            proposals.append(Proposal((self.script * (room + 1))[at : at + room]))
        return proposals


class StrategyMachine(RuleBasedStateMachine):
    """Requests arrive at any time; the loop is advanced one step at a time."""

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]]

    @initialize(
        engine=st.sampled_from(ENGINES),
        seed=st.integers(0, 50),
        script=st.one_of(st.none(), SCRIPTS),
        slots=st.integers(1, 3),
        drafts=st.integers(1, 5),
    )
    def start(
        self, engine: str, seed: int, script: list[int] | None, slots: int, drafts: int
    ) -> None:
        drafter = ModelDrafter
        if script is not None and self.name != "trtllm":  # which never drafts freely
            drafter = type("Scripted", (ScriptedDrafter,), {"script": script})
        self.toy = Toy(
            TABLE,
            random_law(TABLE, seed),
            random_law(TABLE, seed + 1),
            engine=engine,
            slots=slots,
            draft_tokens=drafts,
            drafter=drafter,
            paranoid=True,
        )
        self.watch, self.loop = self.toy.loop(self.toy.strategy(self.name, **self.options))
        self.compiled: dict[str, CompiledGrammar] = {}

    @rule(grammar=GRAMMARS, limit=st.integers(1, 12))
    def submit(self, grammar: GrammarSpec, limit: int) -> None:
        name = f"r{len(self.compiled)}"
        self.compiled[name] = self.toy.grammar_engine().compile(grammar)
        self.loop.submit([request(TABLE, grammar, name, max_new_tokens=limit)])

    @rule()
    def advance(self) -> None:
        self.loop.advance()

    @invariant()
    def every_prefix_is_legal(self) -> None:  # 3
        for sequence in self.sequences():
            fresh = self.compiled[sequence.request.id].matcher()
            assert fresh.accept(sequence.output_ids), (sequence.output_ids, sequence.error)

    @invariant()
    def the_matcher_stands_where_the_output_says(self) -> None:  # 1 and 6
        for sequence in self.sequences():
            if sequence.finish is None and sequence.matcher is not None:
                assert sequence.matcher.ledger.held == sequence.matcher.held
                committed, state = self.committed(sequence)
                fresh = self.compiled[sequence.request.id].matcher()
                assert fresh.accept(committed)
                assert next_row(fresh).equal(next_row(state))

    def committed(self, sequence: Sequence) -> tuple[list[int], Matcher]:
        """What the matcher must hold, and the matcher without what it holds beyond that."""
        assert sequence.matcher is not None
        state, output = sequence.matcher.inner.fork(), sequence.output_ids
        if self.name == "deepinfer":  # all but the last step (D12)
            return output[: len(output) - len(sequence.state)], state
        if self.name == "trtllm":  # the golden token comes with the next build (T6, T8)
            books = ledgers(sequence)
            state.rollback(books.advanced - 1 - books.accepted)
            return output[:-1], state
        return output, state

    def sequences(self) -> list[Sequence]:
        started = hasattr(self, "loop")
        return [*self.loop.running, *self.watch.done.values()] if started else []

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run([])
        assert not self.watch.errors
        plain = self.toy.run("plain", [each.request for each in self.watch.done.values()])
        if self.name != "sglang" or not self.options.get("jump_forward", True):
            assert self.watch.outputs == plain.outputs  # 2
        recorder = Recorder()
        recorder.steps = self.watch.steps
        recorder.requests = self.watch.request_traces(self.name)
        steps, requests = recorder.frames()
        check_identities(summarise(steps, compare_with_plain(requests)), steps)


def next_row(matcher: Matcher) -> torch.Tensor:
    """The mask of what may follow."""
    mask = torch.zeros(1, 1, dtype=torch.int32)
    matcher.fill(mask, 0)
    return mask


def _machine(label: str) -> Any:
    name, options = CASES[label]
    machine: Any = type(label, (StrategyMachine,), {"name": name, "options": options})
    case = machine.TestCase
    case.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
    return case


globals().update({f"TestMachine_{label}": _machine(label) for label in CASES})


@pytest.mark.parametrize("label", CASES)
@given(order=st.permutations(range(5)), slots=st.integers(1, 5), warm=st.booleans())
@settings(max_examples=8, deadline=None)
def test_an_output_does_not_depend_on_what_shares_its_batch(  # 5
    label: str, order: list[int], slots: int, warm: bool
) -> None:
    name, options = CASES[label]
    sampling = Sampling(temperature=1.0) if warm else Sampling()
    laws = random_law(TABLE, 3), random_law(TABLE, 4)
    patterns = ["(ab|c)*d", "[abcd]{2,7}", "abc(abd)?", "a(b|bc){1,4}", "c[ab]{0,5}d"]
    requests = [
        request(TABLE, GrammarSpec.regex(pattern), f"r{i}", seed=i)
        for i, pattern in enumerate(patterns)
    ]
    alone = Toy(TABLE, *laws, slots=1, sampling=sampling)
    shared = Toy(TABLE, *laws, slots=slots, sampling=sampling)
    one_by_one = alone.run(alone.strategy(name, **options), requests)
    together = shared.run(shared.strategy(name, **options), [requests[i] for i in order])
    assert not together.errors
    assert together.outputs == one_by_one.outputs
