"""What verifiers accept and emit: golden walks, edge cases, independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.core import PAD, Proposal, Verdict
from harness.errors import ConfigError
from harness.models.draws import uniforms
from harness.models.sampling import Sampling
from harness.models.verifiers import (
    CheckThenResample,
    Constraint,
    Greedy,
    MatchOwnSample,
    RejectionSampling,
    TargetOnly,
    Verifier,
    VerifyBatch,
)
from tests.models.languages import Language
from tests.models.laws import Draw, log, use_draws

INF = math.inf
WARM = Sampling(temperature=1.0)
GREEDY = Sampling()
VERIFIERS: list[Verifier] = [
    Greedy(),
    MatchOwnSample(),
    RejectionSampling(),
    TargetOnly(),
    CheckThenResample(),
]
names = [type(verifier).__name__ for verifier in VERIFIERS]
every_verifier = pytest.mark.parametrize("verifier", VERIFIERS, ids=names)


def peaked(*tokens: int, vocab: int = 10) -> torch.Tensor:
    """Rows of logits whose argmax is the given token, 3 ahead of the next."""
    return 3.0 * torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def one(
    logits: torch.Tensor,
    proposal: Proposal,
    sampling: Sampling = GREEDY,
    constraint: Constraint | None = None,
) -> VerifyBatch:
    return VerifyBatch(logits, [proposal], [7], [0], sampling, [constraint])


# --- greedy walks ---------------------------------------------------------------------------


@every_verifier
@pytest.mark.parametrize(
    ("drafts", "emitted", "accepted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 9, 3], [1, 2], 1),
        ([9, 2, 3], [1], 0),
        ([1, PAD, 3], [1, 2], 1),
        ([PAD, PAD, PAD], [1], 0),
    ],
)
def test_greedy_chain_emits_argmaxes_up_to_the_first_difference(
    verifier: Verifier, drafts: list[int], emitted: list[int], accepted: int
) -> None:
    """V1.7a."""
    (verdict,) = verifier.verify(one(peaked(1, 2, 3, 4), Proposal(drafts)))
    assert verdict.emitted == emitted
    assert verdict.path == list(range(accepted))
    assert verdict.gaps == [3.0] * len(emitted)


@every_verifier
def test_no_drafts_is_plain_decoding(verifier: Verifier) -> None:
    (verdict,) = verifier.verify(one(peaked(4), Proposal()))
    assert (verdict.emitted, verdict.path) == ([4], [])


# Nodes of S2's worked tree behind its root: 1 -> 2, 8; 2 -> 3, 4, 7; 3 -> 0 -> 5.
TREE_TOKENS = [2, 8, 3, 4, 7, 0, 5]
TREE_PARENTS = [-1, -1, 0, 0, 0, 2, 5]


@pytest.mark.parametrize("verifier", [Greedy(), TargetOnly()])
@pytest.mark.parametrize(
    ("argmaxes", "path", "emitted"),
    [
        ((2, 4, 9, 9, 6, 9, 9, 9), [0, 3], [2, 4, 6]),
        ((2, 3, 9, 0, 9, 9, 5, 1), [0, 2, 5, 6], [2, 3, 0, 5, 1]),
        ((8, 9, 6, 9, 9, 9, 9, 9), [1], [8, 6]),
        ((9, 2, 9, 9, 9, 9, 9, 9), [], [9]),
    ],
)
def test_greedy_tree_follows_the_child_that_equals_the_argmax(
    verifier: Verifier, argmaxes: tuple[int, ...], path: list[int], emitted: list[int]
) -> None:
    """S2g."""
    logits = peaked(*argmaxes)
    (verdict,) = verifier.verify(one(logits, Proposal(TREE_TOKENS, parents=TREE_PARENTS)))
    assert (verdict.path, verdict.emitted) == (path, emitted)
    assert verdict.gaps == [3.0] * len(emitted)


def test_gap_is_the_lead_of_the_row_that_decided() -> None:
    logits = torch.tensor([[5.0, 4.5, 0], [-INF, 2.0, -INF], [1.0, 1.0, 0.0]])
    (verdict,) = Greedy().verify(one(logits, Proposal([0, 1])))
    assert verdict.emitted == [0, 1, 0]
    assert verdict.gaps == [0.5, INF, 0.0]


@pytest.mark.parametrize("verifier", [MatchOwnSample(), RejectionSampling(), CheckThenResample()])
def test_tree_is_refused_where_only_chains_are_verified(verifier: Verifier) -> None:
    tree = Proposal([1, 2], parents=[-1, -1])
    with pytest.raises(ConfigError, match="chain"):
        verifier.verify(one(peaked(1, 2, 3), tree, WARM))


# --- rows without a legal token ------------------------------------------------------------


@every_verifier
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_row_that_allows_nothing_emits_nothing_and_leaves_the_others_alone(
    verifier: Verifier, sampling: Sampling
) -> None:
    live = 50 * peaked(1, 2, 3)
    dead = live.clone()
    dead[1] = -INF
    nothing = torch.full_like(live, -INF)
    batch = VerifyBatch(
        torch.cat([live, dead, nothing, live]),
        [Proposal([1, 2]), Proposal([1, PAD]), Proposal([PAD, 2]), Proposal([1, 2])],
        [1, 2, 3, 4],
        [0, 0, 0, 0],
        sampling,
    )
    verdicts = verifier.verify(batch)
    assert [verdict.emitted for verdict in verdicts] == [[1, 2, 3], [1], [], [1, 2, 3]]
    assert [verdict.path for verdict in verdicts] == [[0, 1], [0], [], [0, 1]]


# --- the batch -----------------------------------------------------------------------------


@every_verifier
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8), Sampling(1.2, top_k=5, top_p=0.9)])
def test_verdict_does_not_depend_on_the_rest_of_the_batch(
    verifier: Verifier, sampling: Sampling
) -> None:
    """Property 5: permuting the batch, or splitting it, changes nothing."""
    generator = torch.Generator().manual_seed(0)
    proposals = [
        Proposal(torch.randint(-1, 6, (n,), generator=generator).tolist())
        for n in (0, 1, 2, 3, 4, 3, 2, 1)
    ]
    for proposal in proposals[4:]:
        proposal.q = torch.rand(len(proposal.tokens), 6, generator=generator).softmax(-1)
    rows = [torch.randn(1 + len(p.tokens), 6, generator=generator) for p in proposals]
    seeds, positions = list(range(20, 28)), list(range(8))

    def run(order: list[int]) -> dict[int, Verdict]:
        batch = VerifyBatch(
            torch.cat([rows[i] for i in order]),
            [proposals[i] for i in order],
            [seeds[i] for i in order],
            [positions[i] for i in order],
            sampling,
            [Language([[0, 1, 2, 3, 4], [2, 3, 4, 5, 1]]) if i % 2 else None for i in order],
        )
        return dict(zip(order, verifier.verify(batch), strict=True))

    together = run(list(range(8)))
    assert run([5, 2, 7, 0, 3, 6, 1, 4]) == together
    assert {i: run([i])[i] for i in range(8)} == together


def test_draws_of_a_tree_go_by_depth() -> None:
    """A position is emitted once, so its draws decide once: siblings share them."""
    rows = peaked(*[0] * 8)
    batch = VerifyBatch(rows, [Proposal(TREE_TOKENS, parents=TREE_PARENTS)], [7], [5], WARM)
    assert np.array_equal(batch.draws(), uniforms(7, 5, 5)[[0, 1, 1, 2, 2, 2, 3, 4]])


@every_verifier
def test_logits_are_left_as_they_were(verifier: Verifier) -> None:
    logits = peaked(1, 2, 3)
    before = logits.clone()
    verifier.verify(one(logits, Proposal([1, 2]), WARM, Language([[2, 2, 2]])))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("verifier", [MatchOwnSample(), CheckThenResample()])
def test_own_samples_are_the_same_tokens_whatever_was_drafted(verifier: Verifier) -> None:
    """L14: the output is that of decoding without drafts, token for token."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(6, 6, generator=generator)  # a bigram model
    drafter = torch.randint(-1, 6, (6,), generator=generator).tolist()
    plain = _decode(verifier, table, [0] * 6, drafts=0)
    assert _decode(verifier, table, drafter, drafts=3) == plain
    assert _decode(verifier, table, table.argmax(-1).tolist(), drafts=4) == plain


def _decode(verifier: Verifier, table: torch.Tensor, drafter: list[int], drafts: int) -> list[int]:
    output = [0]
    while len(output) < 60:
        tokens: list[int] = []
        for _ in range(drafts):
            tokens.append(drafter[max([*output, *tokens][-1], 0)])
        fed = [max(token, 0) for token in [output[-1], *tokens]]
        batch = VerifyBatch(table[fed], [Proposal(tokens)], [11], [len(output)], WARM)
        output += verifier.verify(batch)[0].emitted
    return output[:60]


# --- single draws of the random verifiers --------------------------------------------------


def _with_draws(patch: pytest.MonkeyPatch, coin: float, final: float = 0.5) -> None:
    draw = Draw([(coin, coin), (final, final)], [0, 1])
    use_draws(patch, [draw] * 8)


@pytest.mark.parametrize("verifier", [RejectionSampling(), TargetOnly(), MatchOwnSample()])
@pytest.mark.parametrize("q", [None, torch.tensor([[0.0, 0.0, 1.0]])])
def test_illegal_draft_is_rejected_even_by_a_coin_of_zero(
    verifier: Verifier, q: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1.7b with p(d) = 0: 0 >= u must not pass at u = 0."""
    _with_draws(monkeypatch, coin=0.0)
    logits = torch.tensor([log([0.5, 0.5, 0.0])] * 2)
    (verdict,) = verifier.verify(one(logits, Proposal([2], q=q), WARM))
    assert verdict.path == []
    assert verdict.emitted[0] in (0, 1)


def test_draft_that_its_own_law_excludes_is_rejected_without_a_division(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V1.7b, T20: q(d) = 0."""
    _with_draws(monkeypatch, coin=0.0)
    logits = torch.tensor([log([0.5, 0.5, 0.0])] * 2)
    proposal = Proposal([0], q=torch.tensor([[0.0, 1.0, 0.0]]))
    (verdict,) = RejectionSampling().verify(one(logits, proposal, WARM))
    assert verdict.path == []
    assert verdict.emitted == [0]  # max(p - q, 0) = (.5, 0, 0)


def test_residual_of_zeros_falls_back_to_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft whose q covers p everywhere leaves no residual (padding, p = q)."""
    _with_draws(monkeypatch, coin=0.5, final=0.9)
    law = torch.tensor([[0.5, 0.25, 0.25]])
    (verdict,) = RejectionSampling().verify(
        one(law.log().expand(2, -1), Proposal([PAD], q=law), WARM)
    )
    assert verdict == Verdict([2], [])


def test_coin_of_a_child_is_compared_with_the_mass_tried_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S2h: p = (.2, .3, .5), children 0 and 1; a coin of .4 passes the first, takes the second."""
    _with_draws(monkeypatch, coin=0.4)
    logits = torch.tensor([log([0.2, 0.3, 0.5])] * 3)
    siblings = Proposal([0, 1], parents=[-1, -1])
    assert TargetOnly().verify(one(logits, siblings, WARM))[0].path == [1]
    assert TargetOnly(threshold_acc=0.45).verify(one(logits, siblings, WARM))[0].path == [0]
    assert TargetOnly(threshold_single=0.19).verify(one(logits, siblings, WARM))[0].path == [0]
    assert TargetOnly(threshold_single=0.25).verify(one(logits, siblings, WARM))[0].path == [1]


@pytest.mark.parametrize("name", ["threshold_single", "threshold_acc"])
@pytest.mark.parametrize("value", [0.0, 1.1, math.nan])
def test_threshold_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        TargetOnly(**{name: value})
