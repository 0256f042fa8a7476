"""What a case is, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import strategies
from harness.models.sampling import Sampling
from tests.toys import ENGINES

SERVED, ISOLATED = "served", "isolated"
"""How a fault may end: without effect on its request, or with that alone failing for a reason."""

LOST, CHANGED, HANG, CRASH, OTHER = "lost", "changed", "hang", "crash", "other"
"""Violations: a neighbour did not finish; it has another output; the case did not end; the process
or the loop did not survive; anything else, such as a broken ledger or a thread left behind."""

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "vllm": (
        {},
        {"asynchronous": True},
        {"keep_first_invalid": True},
        {"probabilistic": True, "asynchronous": True},
    ),
    "trtllm": ({}, {"overlap": True}),
    "sglang": ({}, {"jump_forward": False}, {"tree_width": 2}, {"hold_back_last": 1}),
    "llamacpp": ({}, {"p_min": 0.4, "n_min": 1}),
}
"""Options of the strategies that have any which change what they do with a fault."""

SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=5, top_p=0.9))


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        kind: of fault.
        seed: everything else is drawn from it.
    """

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}"

    def random(self) -> Random:
        """The same numbers for the same case, in any process."""
        return Random(str(self))


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        case: its kind and seed.
        setting: strategy, engine and fault, in words.
        ending: ``SERVED`` or ``ISOLATED``; empty where the case did not end.
        reason: why the victim failed.
        violations: by sort, what was violated.
        invalid: outputs that were complete, but do not fit their grammar.
        stuck: threads that are still inside an engine.
        seconds: that it took.
    """

    case: str
    setting: str = ""
    ending: str = ""
    reason: str = ""
    violations: dict[str, str] = field(default_factory=dict)
    invalid: int = 0
    stuck: int = 0
    seconds: float = 0.0


Runner = Callable[[Case], Outcome]
"""Runs the cases of one kind."""


@dataclass(frozen=True)
class Draw:
    """The settings of a case.

    Attributes:
        strategy, options, engine, sampling: what decodes.
        fields: others of ``tests.toys.Toy``.
    """

    strategy: str
    options: dict[str, Any]
    engine: str
    sampling: Sampling
    fields: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        law = "greedy" if self.sampling.greedy else f"temperature {self.sampling.temperature}"
        return f"{self.strategy}({options}), {self.engine}, {law}"


def draw(random: Random, constrained: bool) -> Draw:
    """Settings from all strategies, or from those that apply grammars."""
    names = [
        name
        for name in strategies.registry()
        if not constrained or strategies.find(name).constrained
    ]
    strategy = random.choice(names)
    return Draw(
        strategy,
        random.choice(VARIANTS.get(strategy, ({},))),
        random.choice(ENGINES),
        random.choice(SAMPLINGS),
        {
            "draft_tokens": random.randint(1, 5),
            "slots": random.randint(2, 4),
            "grammar_threads": random.choice((1, 1, 2)),
            "paranoid": True,
        },
    )
