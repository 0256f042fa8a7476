"""The largest logit and its lead: the first of equals, and the same by the kernels."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness.argmax import largest, leads
from harness.core import PAD

Both = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
KERNEL_BLOCK = 1024


def by_kernels(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels; without a GPU, in Triton's interpreter if that was asked for."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    pytest.importorskip("triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = importlib.import_module("harness.argmax_triton")
    tokens, both = kernels.lead_rows(logits.to(device))
    return tokens.cpu(), both.cpu()


def by_reductions(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return largest(logits), leads(logits)


BOTH = pytest.mark.parametrize(
    "work", [by_reductions, pytest.param(by_kernels, marks=pytest.mark.gpu)]
)


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 3, KERNEL_BLOCK - 1, KERNEL_BLOCK, KERNEL_BLOCK + 1, 5000]),
    levels=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_the_first_of_equals_is_chosen_and_leads_by_nothing(
    work: Both, rows: int, vocab: int, levels: int, seed: int
) -> None:
    """Few levels make many ties; some rows have one legal token or none."""
    torch.manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab)).float()
    logits[torch.rand(rows, vocab) < torch.rand(rows, 1).round(decimals=1)] = -math.inf
    tokens, (shown, gaps) = work(logits)
    for row, values in enumerate(logits.tolist()):
        order = sorted(range(vocab), key=lambda token: -values[token])
        best, runner_up = values[order[0]], values[order[1]] if vocab > 1 else -math.inf
        assert tokens[row] == order[0]
        assert shown[row] == (PAD if best == -math.inf else order[0])
        if best > -math.inf:
            assert gaps[row] == best - runner_up


@BOTH
def test_rows_of_a_wider_tensor_are_read_where_they_are(work: Both) -> None:
    wide = torch.zeros((3, 2, 2000), dtype=torch.bfloat16)
    wide[:, -1, 1500] = torch.tensor([1.0, 2.0, 3.0])
    wide[:, :, 1900] = 9.0
    tokens, (_, gaps) = work(wide[:, -1, :1800])
    assert tokens.tolist() == [1500] * 3
    assert gaps.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.gpu
def test_the_kernels_choose_no_nan() -> None:
    logits = torch.tensor([[math.nan, 1.0, 0.0], [math.nan] * 3])
    tokens, (shown, gaps) = by_kernels(logits)
    assert (tokens[0], shown[0], gaps[0]) == (1, 1, 1.0)
    assert (tokens[1], shown[1]) == (0, PAD)
