"""Every strategy with every option that changes its law, and what each must sample from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from harness.core import Sequence
from harness.drafters.base import StopRule
from harness.drafters.chain import DraftChain
from harness.drafters.model import ModelDrafter
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from tests.drafters.makers import with_drafter
from tests.exact.draws import Integral, Tape, WatchedVerifier, integrate
from tests.exact.laws import (
    Outcome,
    OutcomeLaw,
    Problem,
    Rule,
    argmax_drafts,
    checked,
    generous,
    outcome_law,
    projected,
    total_variation,
    trimmed,
)
from tests.toys import Toy, random_law, request, toy_table

TABLE = toy_table(["a", "b", "c", "ab"])
"""The text ``ab`` has two tokenisations, so that the law of tokens is not that of texts."""
GRAMMAR = GrammarSpec.regex("(ab|c){1,2}a?")
TARGET, DRAFT = random_law(TABLE, 11, scale=1.0), random_law(TABLE, 12, scale=1.0)
DRAFT_TOKENS = 2
SLOTS = 128

TOLERANCE = 1e-6
"""Probabilities are made in fp32, and that of an output is a product of a few."""

VERDICTS = LOSSLESS, AS_EXPECTED, BIASED = "lossless", "biased as expected", "BIASED"
"""The last: a law that is neither the projected one nor the one that the options promise."""

DraftLaw = Literal["argmax", "sampled"]
"""Drafts are the draft model's argmax (q is one-hot) or drawn from its law (q is true)."""

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=0.8, top_k=2),
    "top-p": Sampling(temperature=0.8, top_p=0.7),
}


@dataclass(frozen=True)
class Case:
    """A strategy with options and a kind of draft.

    Attributes:
        name: of the row in the table.
        strategy, options: what runs.
        drafts: how drafts are chosen; the strategy's own way where that is an option of it, else
            the drafter sees to it.
        rule: the law of a token; anything but ``projected`` and ``argmax_drafts`` is a bias.
        jumps: forced text is inserted between steps.
        longest: most tokens of its outputs, whatever is asked: cells multiply with every draw.
        drafter: settings of the drafter; empty = the draft model alone.
    """

    name: str
    strategy: str
    drafts: DraftLaw
    options: dict[str, Any] = field(default_factory=dict)
    rule: Rule = projected
    jumps: bool = False
    longest: int | None = None
    drafter: dict[str, Any] = field(default_factory=dict)

    def expected(self, problem: Problem) -> OutcomeLaw:
        """The law that the options promise, biased or not."""
        return outcome_law(problem, self.rule, self.jumps)

    def problem(self, sampling: Sampling, engine: str, limit: int) -> Problem:
        """What the case decodes, under ``GRAMMAR`` if it uses grammars."""
        limit = min(limit, self.longest or limit)
        grammar = None if self.strategy == "unguided" else GRAMMAR
        return Problem(TABLE, TARGET, DRAFT, grammar, engine, sampling, limit, DRAFT_TOKENS)

    def toy(self, problem: Problem) -> Toy:
        """The models of the problem, and a drafter of the case's kind."""
        warm = Sampling(temperature=1.0) if problem.sampling.greedy else problem.sampling
        law = warm if self.drafts == "sampled" else None
        own = "probabilistic" in self.options
        toy = Toy(
            problem.table,
            problem.target,
            problem.draft,
            problem.engine,
            draft_tokens=problem.draft_tokens,
            slots=SLOTS,
            sampling=problem.sampling,
            drafter=ModelDrafter if own else type("Drafter", (LawDrafter,), {"law": law}),
        )
        return with_drafter(toy, **self.drafter) if self.drafter else toy

    def decode(
        self, problem: Problem, seeds: Iterable[int], tape: Tape | None = None
    ) -> list[Outcome]:
        """The outputs of one request under many seeds, by the real loop.

        Args:
            problem: what is decoded.
            seeds: of the requests; runs of the tape, if there is one.
            tape: where draws come from; None = the harness's own.
        """
        toy = self.toy(problem)
        strategy = toy.strategy(self.strategy, **self.options)
        requests = [
            request(
                problem.table, problem.grammar, f"{seed}", seed=seed, max_new_tokens=problem.limit
            )
            for seed in seeds
        ]
        if tape is None:
            watch = toy.run(strategy, requests)
        else:
            strategy.verifier = WatchedVerifier(strategy.verifier, tape)
            with tape.playing():
                watch = toy.run(strategy, requests)
        assert not watch.errors, watch.errors
        return [tuple(watch.outputs[each.id]) for each in requests]


class LawDrafter(ModelDrafter):
    """Draws drafts from ``law`` (None: argmax), whatever the strategy asks for."""

    law: ClassVar[Sampling | None]

    def chain(
        self,
        sequences: SequenceOf[Sequence],
        sampling: Sampling | None = None,
        width: int = 1,
        limit: int | None = None,
        stop: StopRule | None = None,
    ) -> DraftChain:
        return super().chain(sequences, self.law, width, limit, stop)


VLLM_OPTIONS: dict[str, dict[str, bool]] = {
    "": {},
    ", keep_first_invalid": {"keep_first_invalid": True},
    ", asynchronous": {"asynchronous": True},
    ", asynchronous, keep_first_invalid": {"asynchronous": True, "keep_first_invalid": True},
}

CASES = (
    Case("plain", "plain", "argmax"),
    *(
        Case(f"vllm{name}", "vllm", "argmax", {**options, "probabilistic": False})
        for name, options in VLLM_OPTIONS.items()
    ),
    *(
        Case(
            f"vllm{name}, probabilistic",
            "vllm",
            "sampled",
            {**options, "probabilistic": True},
            projected if options else trimmed,
        )
        for name, options in VLLM_OPTIONS.items()
    ),
    *(
        Case(f"{name}{label}", name, drafts, options)
        for name, label, options in (
            ("trtllm", "", {}),
            ("trtllm", ", overlap", {"overlap": True}),
            ("deepinfer", "", {}),
            ("sglang", ", jump_forward off", {"jump_forward": False}),
            ("unguided", "", {}),
        )
        for drafts in ("argmax", "sampled")
    ),
    Case("sglang, tree", "sglang", "argmax", {"jump_forward": False, "tree_width": 2}),
    Case("sglang, jump_forward", "sglang", "argmax", {}, argmax_drafts, jumps=True),
    Case(
        "sglang, threshold_acc 0.7",
        "sglang",
        "argmax",
        {"jump_forward": False, "threshold_acc": 0.7},
        generous(0.7),
    ),
    Case("llamacpp", "llamacpp", "argmax", {}, checked),
    Case("llamacpp", "llamacpp", "sampled", {}, checked, longest=3),
    Case("llamacpp, p_min and n_min", "llamacpp", "argmax", {"p_min": 0.4, "n_min": 1}, checked),
)

CONTROLS: tuple[tuple[str, DraftLaw], ...] = (
    ("plain", "argmax"),
    ("vllm, asynchronous, probabilistic", "sampled"),
    ("sglang, tree", "argmax"),
    ("llamacpp", "argmax"),
    ("vllm, probabilistic", "sampled"),
)
"""Names and drafts of the cases that are sampled too: one per verifier, and a biased one."""


@dataclass(frozen=True)
class Finding:
    """What a case was found to sample from, all of it in total variation.

    Attributes:
        integral: the law of its outputs.
        promised: between the law that its options promise and the locally projected one.
        measured: between its own law and the locally projected one.
        off: between its own law and the promised one.
    """

    integral: Integral
    promised: float
    measured: float
    off: float

    @property
    def verdict(self) -> str:
        if self.off > TOLERANCE:
            return BIASED
        return AS_EXPECTED if self.promised > TOLERANCE else LOSSLESS


def find(case: Case, problem: Problem) -> Finding:
    """Integrate a case and compare."""
    integral = integrate(lambda runs, tape: case.decode(problem, range(runs), tape))
    expected, projection = case.expected(problem), outcome_law(problem)
    return Finding(
        integral,
        promised=total_variation(expected, projection),
        measured=total_variation(integral.law, projection),
        off=total_variation(integral.law, expected) + integral.lost,
    )
