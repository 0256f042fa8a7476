"""Laws, draws from them, and where the randomness comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness.core import PAD
from harness.errors import ConfigError
from harness.models.draws import COIN, RESAMPLE, SAMPLE, draft_uniforms, uniforms
from harness.models.sampling import Sampling, probabilities, sample
from tests.models.laws import assert_drawn_from, log

INF = math.inf
LAW = [0.4, 0.3, 0.2, 0.1]


def law_of(logits: list[float], **sampling: float) -> list[float]:
    settings_ = Sampling(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    return probabilities(torch.tensor([logits]), settings_)[0].tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
    ],
)
def test_bad_setting_names_its_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"sampling.{field}"):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_temperature_zero_is_greedy_and_takes_the_first_of_equal_logits() -> None:
    assert Sampling().greedy
    assert law_of([1.0, 3.0, 3.0, 2.0], temperature=0.0) == [0, 1, 0, 0]


def test_temperature_divides_logits() -> None:
    assert law_of(log(LAW)) == pytest.approx(LAW)
    squared = [p * p for p in LAW]
    expected = [p / sum(squared) for p in squared]
    assert law_of(log(LAW), temperature=0.5) == pytest.approx(expected)


def test_tiny_temperature_does_not_overflow() -> None:
    assert law_of([80.0, 79.0, -INF, 0.0], temperature=1e-38) == [1, 0, 0, 0]


def test_top_k_comes_before_top_p() -> None:
    assert law_of(log(LAW), top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # Among the best two alone the first holds 4/7 >= 0.55; among all four it holds 0.4.
    assert law_of(log(LAW), top_k=2, top_p=0.55) == pytest.approx([1, 0, 0, 0])
    assert law_of(log(LAW), top_p=0.55) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_top_p_keeps_the_token_that_reaches_the_mass_and_at_least_one() -> None:
    assert law_of(log(LAW), top_p=0.71) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert law_of(log(LAW), top_p=1e-9) == [1, 0, 0, 0]


def test_mask_comes_before_truncation() -> None:
    """V1.3f: the best two legal tokens are kept, not the best two."""
    assert law_of([-INF, *log(LAW[1:])], top_k=2) == pytest.approx([0, 0.6, 0.4, 0])


def test_top_k_beyond_the_vocabulary_and_beyond_the_legal_tokens_keeps_all() -> None:
    assert law_of(log(LAW), top_k=9) == pytest.approx(LAW)
    assert law_of([-INF, 0.0, -INF, 0.0], top_k=3) == pytest.approx([0, 0.5, 0, 0.5])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0), Sampling(0.7, top_k=2), Sampling(0.7, top_p=0.5)],
    ids=["greedy", "plain", "top_k", "top_p"],
)
def test_row_without_a_legal_token_is_zeros_and_harms_no_other_row(sampling: Sampling) -> None:
    logits = torch.tensor([log(LAW), [-INF] * 4, log(LAW)])
    law = probabilities(logits, sampling)
    assert law.dtype == torch.float32
    assert law[1].tolist() == [0, 0, 0, 0]
    assert torch.equal(law[[0]], probabilities(logits[[0]], sampling))
    assert torch.equal(law[0], law[2])
    assert sample(law, torch.full((3,), 0.5, dtype=torch.float64))[1] == PAD


def test_sample_inverts_the_cumulative_distribution() -> None:
    u = torch.tensor([0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    law = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, -1)
    assert sample(law, u).tolist() == [0, 0, 2, 2, 3, 3]


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=1, max_size=40),
    u=st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_sample_never_returns_an_impossible_token(weights: list[float], u: float) -> None:
    token = sample(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)).item()
    if any(weights):
        assert weights[int(token)] > 0
    else:
        assert token == PAD


def test_scan_that_is_not_monotone_gives_no_impossible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parallel scans round differently from entry to entry; token 1 has no mass."""

    def scan(mass: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.tensor([[0.25, 0.2500001, 0.5, 1.0, 1.0000001]], dtype=torch.float64)

    monkeypatch.setattr(torch.Tensor, "cumsum", scan)
    law = torch.tensor([[0.25, 0.0, 0.25, 0.5, 0.0]])
    for u, token in ((0.25000005, 2), (1 - 2**-53, 3)):
        assert sample(law, torch.tensor([u], dtype=torch.float64)).item() == token


def test_sample_follows_the_law() -> None:
    n = 20_000
    u = torch.from_numpy(draft_uniforms(1, 0, n))
    assert_drawn_from(sample(torch.tensor([LAW]).expand(n, -1), u).tolist(), LAW)


def test_draw_of_a_position_does_not_depend_on_how_many_are_drawn() -> None:
    assert np.array_equal(uniforms(5, 3, 2)[0], uniforms(5, 0, 4)[3])
    assert np.array_equal(uniforms(5, 0, 9)[:4], uniforms(5, 0, 4))
    assert uniforms(5, 0, 4).shape == (4, 4)
    assert uniforms(5, 0, 4).dtype == np.float64


def test_seeds_positions_streams_and_drafts_have_draws_of_their_own() -> None:
    assert len({COIN, SAMPLE, RESAMPLE}) == 3
    values = [*uniforms(0, 0, 50).flat, *uniforms(1, 0, 50).flat, *uniforms(2**63, 0, 50).flat]
    values += [u for step in range(10) for u in draft_uniforms(0, step, 9)]
    assert len(set(values)) == len(values)
    assert min(values) >= 0
    assert max(values) < 1


def test_draft_draws_are_addressed_by_step() -> None:
    assert np.array_equal(draft_uniforms(5, 7, 4), draft_uniforms(5, 7, 9)[:4])
    assert not np.intersect1d(draft_uniforms(5, 7, 100), draft_uniforms(5, 8, 100)).size


def test_any_integer_is_a_seed() -> None:
    for seed in (-1, 2**64 - 1, 2**70):
        assert uniforms(seed, 0, 1).shape == (1, 4)
