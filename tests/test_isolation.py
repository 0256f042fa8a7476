"""A request that fails fails alone: every fault, under every strategy that can meet it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest
import torch

import strategies
from harness.core import PAD, Proposal, Request, Sequence
from harness.drafters.model import ModelDrafter
from harness.errors import GrammarError
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, Matcher
from harness.grammar.service import GrammarConfig
from harness.grammar.spec import GrammarSpec
from harness.results.record import Recorder
from harness.run import Judge
from harness.workloads.item import Item
from tests.forwarding import ForwardingMatcher
from tests.strategies.letters import REGEXES, TABLE, ask
from tests.toys import Toy, ToyCodec, Watch, random_law

STRATEGIES = list(strategies.registry())
CONSTRAINED = [name for name in STRATEGIES if strategies.find(name).constrained]
DRAFTING = [name for name in STRATEGIES if strategies.find(name).uses_draft]

VICTIM = GrammarSpec.regex("a[bcd]{6,9}e")
"""The grammar that the faults are in; the other requests have others."""

TIMEOUT_S = 2.0


class Sabotaged(ForwardingMatcher):
    """A matcher that breaks from its ``at``-th use on, in one of two ways.

    Args:
        inner: does the work until then.
        refuse: say no to every token, though the mask allowed it; otherwise raise.
        at: uses before that, checked masks and accepted tokens alike.
    """

    def __init__(self, inner: Matcher, refuse: bool, at: int) -> None:
        super().__init__(inner)
        self.refuse, self.left = refuse, at

    def _use(self) -> bool:
        """Whether it still works.

        Raises:
            RuntimeError: it does not, and raises.
        """
        self.left -= 1
        if self.left < 0 and not self.refuse:
            raise RuntimeError("sabotage")
        return self.left >= 0

    def accept(self, tokens: SequenceOf[int]) -> bool:
        return self._use() and self.inner.accept(tokens)

    def validate(self, tokens: SequenceOf[int]) -> int:
        return self.inner.validate(tokens) if self._use() else 0

    def fill(self, mask: torch.Tensor, row: int) -> None:
        self._use()
        self.inner.fill(mask, row)

    def fork(self) -> Matcher:
        return Sabotaged(self.inner.fork(), self.refuse, self.left)


@dataclass
class Fault:
    """What goes wrong with the victim.

    Attributes:
        reason: pattern of what its error says; a jump meets a dead end as text.
        compile: raised in place of its compiled grammar.
        compile_s: what compiling takes longer.
        refuse, at: of its matcher, see ``Sabotaged``; ``at`` -1 = it is sound.
        victim: fields of the request.
    """

    reason: str
    compile: Exception | None = None
    compile_s: float = 0.0
    refuse: bool = False
    at: int = -1
    victim: dict[str, Any] | None = None


FAULTS = {
    "compile error": Fault("no such rule", compile=GrammarError("no such rule")),
    "engine bug": Fault("KeyError", compile=KeyError("rule")),
    "compile time-out": Fault("not compiled within", compile_s=2 * TIMEOUT_S),
    "first use raises": Fault("RuntimeError: sabotage", at=0),
    "later use raises": Fault("RuntimeError: sabotage", at=5),
    "first token refused": Fault("refuse", refuse=True, at=1),
    "later token refused": Fault("refuse", refuse=True, at=6),
    "dead end": Fault(
        "dead end|no token begins", victim={"grammar": GrammarSpec.regex("a[bc]{2,4}f")}
    ),
    "prompt token": Fault("prompt: 99", victim={"prompt_ids": (0, 99)}),
    "empty prompt": Fault("prompt", victim={"prompt_ids": ()}),
    "long prompt": Fault("exceed the context", victim={"prompt_ids": (0,) * 300}),
}
ANYWHERE = ("prompt token", "empty prompt", "long prompt")
"""Faults that need no grammar."""


class Compiled(CompiledGrammar):
    """The victim's grammar."""

    def __init__(self, inner: CompiledGrammar, fault: Fault) -> None:
        self.inner, self.fault = inner, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def matcher(self) -> Matcher:
        return Sabotaged(self.inner.matcher(), self.fault.refuse, self.fault.at)


@dataclass
class FaultyToy(Toy):
    """A toy whose grammar engine has a fault where the victim's grammar is concerned."""

    fault: Fault | None = None

    def grammar_engine(self) -> GrammarEngine:
        engine, fault = super().grammar_engine(), self.fault
        sound = engine.compile

        def compile_(spec: GrammarSpec) -> CompiledGrammar:
            if fault is None or spec != VICTIM:
                return sound(spec)
            time.sleep(fault.compile_s)
            if fault.compile is not None:
                raise fault.compile
            return Compiled(sound(spec), fault) if fault.at >= 0 else sound(spec)

        engine.compile = compile_  # type: ignore[method-assign]
        return engine


def healthy() -> list[Request]:
    requests = [ask(GrammarSpec.regex(text), f"r{i}", seed=i) for i, text in enumerate(REGEXES)]
    return [*requests, ask(None, "free", max_new_tokens=8)]


def decode(strategy: str, requests: SequenceOf[Request], **fields: Any) -> Watch:
    laws, limits = (random_law(TABLE, 1), random_law(TABLE, 2)), GrammarConfig(timeout_s=TIMEOUT_S)
    return FaultyToy(TABLE, *laws, slots=3, grammar=limits, **fields).run(strategy, requests)


def rows(watch: Watch) -> pd.DataFrame:
    """The request table, by request."""
    recorder, items = Recorder(), {name: Item(name, "test", ()) for name in watch.done}
    judge = Judge("s", "e", items, TABLE, ToyCodec(TABLE), recorder, lambda _: None)
    for name, sequence in watch.done.items():
        judge.finished(sequence, watch.times[name])
    return recorder.frames()[1].set_index("request")


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        (strategy, fault)
        for strategy in STRATEGIES
        for fault in (FAULTS if strategy in CONSTRAINED else ANYWHERE)
    ],
)
def test_a_fault_fails_its_request_alone_with_its_reason(strategy: str, fault: str) -> None:
    what = FAULTS[fault]
    victim = ask(**{"grammar": VICTIM, "name": "victim", **(what.victim or {})})
    others = healthy()
    mixed = decode(strategy, [others[0], victim, *others[1:]], fault=what)
    alone = decode(strategy, others)
    row = rows(mixed).loc["victim"]
    assert row.finish == "failed"
    assert re.search(what.reason, row.error)
    assert list(mixed.errors) == ["victim"]
    mixed.done.pop("victim")
    assert mixed.outputs == alone.outputs


class Hostile(ModelDrafter):
    """Drafts a token that no vocabulary has, for the victim."""

    token = 10**6

    def free(self, sequences: SequenceOf[Sequence], *args: Any, **kwargs: Any) -> list[Proposal]:
        proposals = super().free(sequences, *args, **kwargs)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            if sequence.request.id == "victim":
                proposal.tokens = [self.token]
        return proposals


@pytest.mark.parametrize("token", [10**6, len(TABLE), PAD - 1])
@pytest.mark.parametrize("grammar", [VICTIM, None])
@pytest.mark.parametrize("strategy", [name for name in DRAFTING if name != "trtllm"])
def test_a_draft_outside_of_the_vocabulary_ends_no_batch(
    strategy: str, grammar: GrammarSpec | None, token: int
) -> None:
    """Of a grammar, the draft is just illegal where the strategy trims; else its request fails."""
    drafter = type("Drafter", (Hostile,), {"token": token})
    victim, others = ask(grammar, "victim"), healthy()
    mixed = decode(strategy, [others[0], victim, *others[1:]], drafter=drafter)
    alone = decode(strategy, others)
    assert set(mixed.errors) <= {"victim"}
    if mixed.errors:
        assert f"draft {token} is no token" in mixed.errors["victim"]
    assert ("victim" in mixed.errors) or (strategy == "vllm" and grammar is not None)
    mixed.done.pop("victim")
    assert mixed.outputs == alone.outputs
