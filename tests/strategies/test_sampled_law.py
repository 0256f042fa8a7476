"""Sampled outputs follow the exact law of masked decoding (property 4 of spec/regressions.md).

The law is the locally projected one: at each position the target's probabilities over the legal
tokens, renormalised. It is enumerated here without any engine of the harness but the matcher.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from harness.grammar.matcher import Matcher
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from tests.models.laws import assert_drawn_from
from tests.toys import ENGINES, Law, Toy, random_law, request, toy_table

TABLE = toy_table(["a", "b", "c", "ab"])
GRAMMAR = GrammarSpec.regex("(ab|c){1,2}a?")
TARGET = random_law(TABLE, 11, scale=1.0)
DRAFT = random_law(TABLE, 12, scale=1.0)
REQUESTS = 4_000

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "vllm": ("vllm", {}),
    "vllm, true q, first invalid kept": (
        "vllm",
        {"probabilistic": True, "keep_first_invalid": True},
    ),
    "vllm, padded": ("vllm", {"asynchronous": True}),
    "vllm, padded, true q": ("vllm", {"asynchronous": True, "probabilistic": True}),
    "trtllm": ("trtllm", {}),
    "trtllm, overlap": ("trtllm", {"overlap": True}),
    "llamacpp": ("llamacpp", {}),
    "sglang": ("sglang", {"jump_forward": False}),
    "sglang, tree": ("sglang", {"jump_forward": False, "tree_width": 2}),
    "deepinfer": ("deepinfer", {}),
}


def exact_law(matcher: Matcher, law: Law, output: tuple[int, ...] = ()) -> dict[Any, float]:
    """Probability of each whole output."""
    if matcher.terminated:
        return {output: 1.0}
    legal = [token for token in range(len(TABLE)) if matcher.validate([token])]
    logits = law((0, *output))
    total = sum(math.exp(logits[token]) for token in legal)
    outcomes: dict[Any, float] = {}
    for token in legal:
        after = matcher.fork()
        assert after.accept([token])
        for whole, mass in exact_law(after, law, (*output, token)).items():
            outcomes[whole] = mass * math.exp(logits[token]) / total
    return outcomes


def sampled(engine: str, name: str, options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The outcomes of many requests, as indices into the exact law beside them."""
    toy = Toy(
        TABLE,
        TARGET,
        DRAFT,
        engine=engine,
        slots=128,
        draft_tokens=3,
        sampling=Sampling(temperature=1.0),
    )
    law = exact_law(toy.grammar_engine().compile(GRAMMAR).matcher(), TARGET)
    index = {output: i for i, output in enumerate(law)}
    requests = [request(TABLE, GRAMMAR, f"r{seed}", seed=seed) for seed in range(REQUESTS)]
    watch = toy.run(toy.strategy(name, **options), requests)
    assert not watch.errors
    assert math.isclose(sum(law.values()), 1.0)
    return [index[tuple(output)] for output in watch.outputs.values()], list(law.values())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_drawn_from_the_masked_law(case: str, engine: str) -> None:
    assert_drawn_from(*sampled(engine, *CASES[case]))


def test_trimming_with_true_draft_probabilities_is_biased_as_upstream_is() -> None:
    """comparison.md, "Losslessness, exactly": the reason for ``keep_first_invalid`` (V1.1b)."""
    drawn, law = sampled("xgrammar", "vllm", {"probabilistic": True})
    shares = torch.bincount(torch.tensor(drawn), minlength=len(law)) / len(drawn)
    assert (shares - torch.tensor(law)).abs().sum() / 2 > 0.02  # total variation
    with pytest.raises(AssertionError):
        assert_drawn_from(drawn, law)


def test_own_samples_make_the_output_of_plain_draw_by_draw() -> None:
    """L14: with the draws of a position, acceptance by equality changes nothing at all."""
    toy = Toy(TABLE, TARGET, DRAFT, sampling=Sampling(temperature=1.0))
    requests = [request(TABLE, GRAMMAR, f"r{seed}", seed=seed) for seed in range(50)]
    plain = toy.run("plain", requests).outputs
    assert toy.run(toy.strategy("trtllm", overlap=True), requests).outputs == plain
