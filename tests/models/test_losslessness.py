"""Which law each verifier emits from (property 4 of spec/regressions.md)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from harness.core import PAD, Proposal
from harness.models.draws import COIN, RESAMPLE, SAMPLE, draft_uniforms
from harness.models.sampling import Sampling, sample
from harness.models.verifiers import (
    CheckThenResample,
    MatchOwnSample,
    RejectionSampling,
    TargetOnly,
    Verifier,
    VerifyBatch,
)
from tests.models.languages import Language
from tests.models.laws import (
    assert_drawn_from,
    cells,
    cumulative,
    first_token_law,
    log,
    use_draws,
)

WARM = Sampling(temperature=1.0)
N = 20_000
V = 4

P = [0.5, 0.5, 0.0]
Q = [0.2, 0.3, 0.5]
"""The worked example of spec/comparison.md: token 2 is illegal."""


def exact_law(
    patch: pytest.MonkeyPatch,
    verifier: Verifier,
    p: list[float],
    drafts: list[tuple[float, Proposal]],
    breaks: dict[int, list[float]],
    *,
    sampling: Sampling = WARM,
    language: list[list[int]] | None = None,
) -> list[float]:
    """The law of the first emitted token, integrated over all draws and the weighted proposals."""
    draws = cells(breaks)
    use_draws(patch, draws)
    runs = [(w * d.volume, d_i, proposal) for w, proposal in drafts for d_i, d in enumerate(draws)]
    rows = [log(p)] * sum(1 + len(proposal.tokens) for _, _, proposal in runs)
    batch = VerifyBatch(
        torch.tensor(rows),
        [proposal for _, _, proposal in runs],
        [d_i for _, d_i, _ in runs],
        [0] * len(runs),
        sampling,
        [Language(language) if language else None for _ in runs],
    )
    return first_token_law(verifier.verify(batch), [w for w, _, _ in runs], len(p)).tolist()


def residual(p: list[float], q: list[float]) -> list[float]:
    return [max(a - b, 0) for a, b in zip(p, q, strict=True)]


def one_hot(token: int, vocab: int) -> list[float]:
    return [float(t == token) for t in range(vocab)]


def ratio_breaks(p: list[float], q: list[float]) -> dict[int, list[float]]:
    laws = [p, residual(p, q), *(residual(p, one_hot(t, len(p))) for t in range(len(p)))]
    return {
        COIN: [a / b for a, b in zip(p, q, strict=True) if b] + p + cumulative(p),
        SAMPLE: [x for law in laws for x in cumulative(law)],
    }


def drawn_from(
    q: list[float], replace: dict[int, Proposal] | None = None
) -> list[tuple[float, Proposal]]:
    """Each draft with its probability, bringing its law; ``replace`` stands in for some."""
    law = torch.tensor([q])
    replace = replace or {}
    return [
        (mass, replace.get(token, Proposal([token], q=law))) for token, mass in enumerate(q) if mass
    ]


# --- exact ---------------------------------------------------------------------------------


def test_keeping_the_illegal_draft_preserves_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """comparison.md, V1.7: (.50, .50)."""
    law = exact_law(monkeypatch, RejectionSampling(), P, drawn_from(Q), ratio_breaks(P, Q))
    assert law == pytest.approx([0.5, 0.5, 0], abs=1e-6)


def test_padding_with_its_law_preserves_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """V1.7d: -1 is recovered from max(p - q, 0)."""
    drafts = drawn_from(Q, {2: Proposal([PAD], q=torch.tensor([Q]))})
    law = exact_law(monkeypatch, RejectionSampling(), P, drafts, ratio_breaks(P, Q))
    assert law == pytest.approx([0.5, 0.5, 0], abs=1e-6)


@pytest.mark.parametrize("dropped", [Proposal(), Proposal([PAD])])
def test_dropping_the_illegal_draft_is_biased(
    dropped: Proposal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """comparison.md, V1.7: cut away, or padded without its law, (.45, .55)."""
    drafts = drawn_from(Q, {2: dropped})
    law = exact_law(monkeypatch, RejectionSampling(), P, drafts, ratio_breaks(P, Q))
    assert law == pytest.approx([0.45, 0.55, 0], abs=1e-6)


def test_dropping_a_one_hot_draft_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for proposal in (Proposal([2]), Proposal([PAD]), Proposal()):
        law = exact_law(monkeypatch, RejectionSampling(), P, [(1.0, proposal)], ratio_breaks(P, Q))
        assert law == pytest.approx([0.5, 0.5, 0], abs=1e-6)


laws = (
    st.lists(st.integers(0, 9), min_size=V, max_size=V)
    .filter(any)
    .map(lambda weights: [w / sum(weights) for w in weights])
)
exactly = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@exactly
@given(p=laws, q=laws)
@pytest.mark.parametrize("verifier", [RejectionSampling(), TargetOnly(), MatchOwnSample()])
def test_law_is_exactly_p_for_drafts_drawn_from_any_q(
    verifier: Verifier, p: list[float], q: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    law = exact_law(monkeypatch, verifier, p, drawn_from(q), ratio_breaks(p, q))
    assert law == pytest.approx(p, abs=1e-5)


@exactly
@given(p=laws, draft=st.integers(-1, V - 1))
@pytest.mark.parametrize("verifier", [RejectionSampling(), TargetOnly(), MatchOwnSample()])
def test_law_is_exactly_p_for_a_one_hot_draft(
    verifier: Verifier, p: list[float], draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = [(1.0, Proposal([draft]))]
    law = exact_law(monkeypatch, verifier, p, drafts, ratio_breaks(p, p))
    assert law == pytest.approx(p, abs=1e-5)


@exactly
@given(p=laws, children=st.lists(st.integers(-1, V - 1), min_size=1, max_size=4))
def test_law_is_exactly_p_for_any_siblings_twins_included(
    p: list[float], children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2h: one coin for all children, and rejected ones leave the final draw."""
    tried = np.cumsum(
        [p[c] if c not in children[:i] and c >= 0 else 0.0 for i, c in enumerate(children)]
    )
    left = [0.0 if t in children else x for t, x in enumerate(p)]
    breaks = {COIN: [float(x) for x in tried], SAMPLE: cumulative(left) + cumulative(p)}
    tree = Proposal(children, parents=[-1] * len(children))
    law = exact_law(monkeypatch, TargetOnly(), p, [(1.0, tree)], breaks)
    assert law == pytest.approx(p, abs=1e-5)


def resample_breaks(p: list[float], masked: list[float]) -> dict[int, list[float]]:
    return {SAMPLE: cumulative(p), RESAMPLE: cumulative(masked)}


@exactly
@given(p=laws, legal=st.sets(st.integers(0, V - 1), min_size=1))
def test_check_then_resample_is_the_masked_law_at_any_temperature(
    p: list[float], legal: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L4: p(t) + P(illegal) p_masked(t) = p_masked(t) without truncation."""
    masked = [x if t in legal else 0.0 for t, x in enumerate(p)]
    if not any(masked):
        return
    law = exact_law(
        monkeypatch,
        CheckThenResample(),
        p,
        [(1.0, Proposal())],
        resample_breaks(p, masked),
        language=[[t] for t in legal],
    )
    assert law == pytest.approx([x / sum(masked) for x in masked], abs=1e-5)


def test_check_then_resample_under_top_k_is_biased_as_llama_cpp_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L4: p = (.4, .3, .2, .1), legal {1, 2}, top-k 2; masking first would give (.6, .4)."""
    p, top = [0.4, 0.3, 0.2, 0.1], Sampling(temperature=1.0, top_k=2)
    law = exact_law(
        monkeypatch,
        CheckThenResample(),
        p,
        [(1.0, Proposal())],
        resample_breaks([0.4, 0.3, 0, 0], [0, 0.3, 0.2, 0]),
        sampling=top,
        language=[[1], [2]],
    )
    assert law == pytest.approx([0, 3 / 7 + 4 / 7 * 0.6, 4 / 7 * 0.4, 0], abs=1e-6)


# --- statistical: chains and trees, the real draws ----------------------------------------------


def random_laws(seed: int, rows: int) -> torch.Tensor:
    """``[rows, V]`` laws, some entries 0 (illegal)."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, V, generator=generator) ** 2
    weights[torch.rand(rows, V, generator=generator) < 0.2] = 0
    weights[:, seed % V] += 0.1
    return weights / weights.sum(-1, keepdim=True)


def drafted(q: torch.Tensor) -> torch.Tensor:
    """``[N, drafts]`` tokens drawn from the rows of q, with each request's own draft draws."""
    u = torch.from_numpy(np.stack([draft_uniforms(seed, 0, len(q)) for seed in range(N)]))
    return torch.stack([sample(q[i].expand(N, -1), u[:, i]) for i in range(len(q))], dim=1)


def assert_positions_follow(
    verifier: Verifier, target: torch.Tensor, proposals: list[Proposal]
) -> None:
    """In every row that decided a token, tokens are distributed as that row's law."""
    batch = VerifyBatch(target.log().repeat(N, 1), proposals, list(range(N)), [0] * N, WARM)
    decided: dict[int, list[int]] = {}
    for verdict in verifier.verify(batch):
        rows = [0, *(node + 1 for node in verdict.path)]
        assert len(verdict.emitted) == len(rows)
        for row, token in zip(rows, verdict.emitted, strict=True):
            decided.setdefault(row, []).append(token)
    assert max(map(len, decided.values())) == N
    for row, tokens in decided.items():
        assert_drawn_from(tokens, target[row].tolist())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("verifier", [RejectionSampling(), TargetOnly(), MatchOwnSample()])
@pytest.mark.parametrize("law", ["true q", "one-hot q"])
def test_every_position_of_a_chain_is_distributed_as_the_target(
    verifier: Verifier, law: str, seed: int
) -> None:
    target, q = random_laws(seed, 3), random_laws(seed + 100, 2)
    if law == "true q":
        proposals = [Proposal(tokens, q=q) for tokens in drafted(q).tolist()]
    else:
        proposals = [Proposal(q.argmax(-1).tolist()) for _ in range(N)]
    assert_positions_follow(verifier, target, proposals)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_node_of_a_tree_is_distributed_as_the_target(seed: int) -> None:
    """S2h with two children under the root and under its first child."""
    proposals = [Proposal([0, 1, 2, 3], parents=[-1, -1, 0, 0]) for _ in range(N)]
    assert_positions_follow(TargetOnly(), random_laws(seed, 5), proposals)


def test_lower_thresholds_accept_more_than_the_target_allows() -> None:
    """S2h: the other way round the test would not notice a wrong law."""
    proposals = [Proposal([0, 1, 2, 3], parents=[-1, -1, 0, 0]) for _ in range(N)]
    with pytest.raises(AssertionError):
        assert_positions_follow(TargetOnly(threshold_acc=0.8), random_laws(1, 5), proposals)


def test_worked_example_holds_for_the_real_draws() -> None:
    """comparison.md again, N requests: keeping follows (.5, .5), dropping does not."""
    q = torch.tensor([Q])
    kept = [Proposal(tokens, q=q) for tokens in drafted(q).tolist()]
    cut = [proposal if proposal.tokens != [2] else Proposal() for proposal in kept]
    laws = []
    for proposals in (kept, cut):
        rows = sum(1 + len(proposal.tokens) for proposal in proposals)
        logits = torch.tensor([log(P)]).expand(rows, -1)
        batch = VerifyBatch(logits, proposals, list(range(N)), [0] * N, WARM)
        laws.append([verdict.emitted[0] for verdict in RejectionSampling().verify(batch)])
    assert_drawn_from(laws[0], P)
    assert_drawn_from(laws[1], [0.45, 0.55, 0])
    with pytest.raises(AssertionError):
        assert_drawn_from(laws[1], P)


def test_resampling_follows_the_masked_law_for_the_real_draws() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    batch = VerifyBatch(
        torch.tensor([log(p)]).expand(N, -1),
        [Proposal() for _ in range(N)],
        list(range(N)),
        [0] * N,
        WARM,
        [Language([[1], [2]]) for _ in range(N)],
    )
    tokens = [verdict.emitted[0] for verdict in CheckThenResample().verify(batch)]
    assert_drawn_from(tokens, [0, 0.6, 0.4, 0])
    assert math.isclose(tokens.count(1) / N, 0.6, abs_tol=0.02)
