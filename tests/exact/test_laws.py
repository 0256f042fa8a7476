"""The enumerated laws against the worked examples of the specification."""

from __future__ import annotations

import math

import pytest
import torch

from harness.core import PAD
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling, probabilities
from tests.exact.cases import CASES, SAMPLINGS
from tests.exact.laws import (
    Outcome,
    Problem,
    Rule,
    checked,
    generous,
    outcome_law,
    token_law,
    total_variation,
    trimmed,
)
from tests.toys import ENGINES, Law, toy_table

TABLE = toy_table("abcd")
WARM = Sampling(temperature=1.0)


def always(*law: float) -> Law:
    """Logits of a law, EOS excluded, wherever it is asked."""
    logits = [math.log(p) if p else -math.inf for p in (*law, 0.0)]
    return lambda _: logits


def next_law(
    rule: Rule, target: Law, draft: Law, words: list[str], sampling: Sampling = WARM
) -> list[float]:
    """``[vocab]`` of the first token, one draft in the window."""
    grammar = GrammarSpec.choice(words)
    problem = Problem(TABLE, target, draft, grammar, "xgrammar", sampling, 4, 1)
    masses = [0.0] * len(TABLE)
    for token, mass, _ in rule(problem, (), 1):
        masses[token] += mass
    return masses


def test_trimming_gives_the_biased_law_of_the_worked_example() -> None:
    """comparison.md: p = (.5, .5, 0) and q = (.2, .3, .5) give (.45, .55)."""
    law = next_law(trimmed, always(0.3, 0.3, 0.4, 0), always(0.2, 0.3, 0.5, 0), ["a", "b"])
    assert law == pytest.approx([0.45, 0.55, 0, 0, 0])


def test_checking_after_top_k_gives_the_biased_law_of_the_worked_example() -> None:
    """L4: p = (.4, .3, .2, .1), legal b and c, top-k 2; masking first would give (.6, .4)."""
    p = always(0.4, 0.3, 0.2, 0.1)
    law = next_law(checked, p, p, ["b", "c"], Sampling(temperature=1.0, top_k=2))
    assert law == pytest.approx([0, 3 / 7 + 4 / 7 * 0.6, 4 / 7 * 0.4, 0, 0])
    assert next_law(checked, p, p, ["b", "c"]) == pytest.approx([0, 0.6, 0.4, 0, 0])


def test_a_threshold_of_half_doubles_the_mass_of_a_draft() -> None:
    """S2h: the draft b has p = .3."""
    p, q = always(0.4, 0.3, 0.2, 0.1), always(0.1, 0.9, 0, 0)
    law = next_law(generous(0.5), p, q, ["a", "b", "c", "d"])
    assert law == pytest.approx([0.4 * 4 / 7, 0.6, 0.4 * 2 / 7, 0.4 / 7, 0])
    lossless = next_law(generous(1.0), p, q, ["a", "b", "c", "d"])
    assert lossless == pytest.approx([0.4, 0.3, 0.2, 0.1, 0])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_token_laws_agree_with_the_samplers_own(sampling: Sampling) -> None:
    """Two implementations of temperature, top-k and top-p, ties and forbidden tokens included."""
    rows = torch.randn(200, 6, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    rows[:, 2] = -math.inf
    for row, law in zip(rows.tolist(), probabilities(rows, sampling).tolist(), strict=True):
        assert token_law(row, sampling) == pytest.approx(law, abs=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_projected_law_is_not_the_conditional_law_of_the_model(engine: str) -> None:
    """comparison.md, arXiv 2405.21047: a prefix with little behind it keeps its mass.

    The model writes ``a`` or ``b`` alike, then anything; ``a`` must be followed by ``a``, ``b`` by
    any letter. Projected: half of the outputs begin with each.
    """
    words = ["aa", "ba", "bb", "bc", "bd"]
    even = always(0.25, 0.25, 0.25, 0.25)
    problem = Problem(TABLE, even, even, GrammarSpec.choice(words), engine, WARM, 2, 1)
    law = outcome_law(problem)
    first: dict[Outcome, float] = {}
    for outcome, mass in law.items():
        first[outcome[:1]] = first.get(outcome[:1], 0.0) + mass
    assert first == pytest.approx({(0,): 0.5, (1,): 0.5})


def test_both_grammar_engines_allow_the_same_outputs() -> None:
    (plain,) = (case for case in CASES if case.name == "plain")
    one, other = (
        outcome_law(plain.problem(SAMPLINGS["temperature"], engine, 6)) for engine in ENGINES
    )
    assert one == other
    assert math.isclose(math.fsum(one.values()), 1.0)
    assert total_variation(one, {}) == pytest.approx(0.5)
    assert PAD not in {token for outcome in one for token in outcome}
