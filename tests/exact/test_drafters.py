"""The law of whole outputs under every drafter: drafts change what a step costs, no more.

As in ``test_exact``: the real loop, strategy, drafter and verifier, integrated over all draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from harness.drafters.length import AdaptiveLength
from harness.drafters.uniform import UniformDrafter
from tests.exact.cases import LOSSLESS, SAMPLINGS, Case, find
from tests.exact.draws import Tape
from tests.exact.laws import Outcome, Problem, checked
from tests.exact.test_exact import UNPROMISED, one_thread

__all__ = ["one_thread"]

NGRAM: dict[str, Any] = {"name": "ngram", "min_n": 1}
CHAIN: dict[str, Any] = {"name": "chain", "min_n": 1}
GRAMMAR, RANDOM = {"name": "grammar"}, {"name": "random"}
ADAPTIVE = {"length": "adaptive", "draft_ms": 0.3, "verify_ms": 1.0, "row_ms": 0.0}
"""Two drafts at first; one behind a rejection, none behind two."""
KNOWN_Q = {"asynchronous": True, "probabilistic": True}


class Alone(Case):
    """Each run by itself: what a length has learnt must not come from another run."""

    def decode(
        self, problem: Problem, seeds: Iterable[int], tape: Tape | None = None
    ) -> list[Outcome]:
        return [super(Alone, self).decode(problem, [seed], tape)[0] for seed in seeds]


CASES: dict[str, Case] = {
    "vllm, ngram": Case("", "vllm", "argmax", drafter=NGRAM),
    "deepinfer, ngram": Case("", "deepinfer", "argmax", drafter=NGRAM),
    "llamacpp, ngram": Case("", "llamacpp", "argmax", rule=checked, longest=3, drafter=NGRAM),
    "vllm, grammar": Case("", "vllm", "argmax", drafter=GRAMMAR),
    "deepinfer, grammar": Case("", "deepinfer", "argmax", drafter=GRAMMAR),
    "deepinfer, chain": Case("", "deepinfer", "sampled", longest=3, drafter=CHAIN),
    "sglang, chain": Case("", "sglang", "argmax", {"jump_forward": False}, drafter=CHAIN),
    "vllm, random taken for certain": Case("", "vllm", "sampled", longest=3, drafter=RANDOM),
    "vllm, random with its law": Case("", "vllm", "sampled", KNOWN_Q, longest=3, drafter=RANDOM),
    "deepinfer, random": Case("", "deepinfer", "sampled", longest=3, drafter=RANDOM),
    "sglang, random": Case(
        "", "sglang", "sampled", {"jump_forward": False}, longest=3, drafter=RANDOM
    ),
}


@pytest.mark.parametrize("sampling", ["temperature", "top-k"])
@pytest.mark.parametrize("name", CASES)
def test_a_drafter_does_not_change_the_law(name: str, sampling: str) -> None:
    """V1.7, D17, S2h, L4; q is one-hot unless the drafts were drawn (V1.7b)."""
    if (name, sampling) == ("llamacpp, ngram", "top-k"):
        pytest.skip("biased with every drafter (L4)")
    each = CASES[name]
    finding = find(each, each.problem(SAMPLINGS[sampling], "xgrammar", 4))
    assert finding.verdict == LOSSLESS
    assert math.fsum(finding.integral.law.values()) == pytest.approx(1)


def test_a_length_may_follow_what_became_of_earlier_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five tokens, so that a shorter window behind a rejection is one."""
    limits: set[int] = set()
    observe = AdaptiveLength.observe

    def spy(length: AdaptiveLength, drafted: int, accepted: int) -> None:
        limits.add(length.limit)
        observe(length, drafted, accepted)

    monkeypatch.setattr(AdaptiveLength, "observe", spy)
    each = Alone("", "deepinfer", "argmax", drafter=ADAPTIVE)
    finding = find(each, each.problem(SAMPLINGS["top-k"], "xgrammar", 5))
    assert finding.verdict == LOSSLESS
    assert limits == {0, 1, 2}


def test_a_length_that_looks_at_the_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft drawn from q and withheld for what it is: trimming by another name (V1.7)."""
    each = Case("", "deepinfer", "sampled", longest=3, drafter=RANDOM)
    free = UniformDrafter.free

    def withhold(*args: Any, **kwargs: Any) -> Any:
        proposals = free(*args, **kwargs)
        for proposal in proposals:
            if proposal.tokens and proposal.tokens[0] == 0:
                proposal.tokens, proposal.q = [], None
        return proposals

    monkeypatch.setattr(UniformDrafter, "free", withhold)
    finding = find(each, each.problem(SAMPLINGS["temperature"], "xgrammar", 3))
    assert finding.verdict == UNPROMISED
