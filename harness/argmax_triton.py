"""Largest logits and their leads in two kernels; ``argmax`` imports it only for CUDA tensors.

PyTorch has no reduction that gives both, and reduces a row in one block: few rows leave most of
the device idle, and a score of small kernels costs more than the reading of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from harness.core import PAD

BLOCK = 1024
"""Columns per program of the first kernel."""


# No annotations: Triton takes them for types of its own.
@triton.jit  # type: ignore[untyped-decorator]
def _lead_of_blocks(  # type: ignore[no-untyped-def]
    logits_ptr, tops_ptr, seconds_ptr, tokens_ptr, columns, stride, BLOCK: tl.constexpr
):
    """Of one block of columns of one row: largest logit, runner-up, and the largest's column."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    start = row.to(tl.int64) * stride
    logits = tl.load(logits_ptr + start + column, mask=inside, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits != logits, -float("inf"), logits)  # noqa: PLR0124 (a NaN)
    top = tl.max(logits, axis=0)
    token = tl.min(tl.where(logits == top, column, 2147483647), axis=0)
    second = tl.max(tl.where(column == token, -float("inf"), logits), axis=0)
    out = row * tl.num_programs(1) + block
    tl.store(tops_ptr + out, top)
    tl.store(seconds_ptr + out, second)
    tl.store(tokens_ptr + out, token)


@triton.jit  # type: ignore[untyped-decorator]
def _lead_of_rows(  # type: ignore[no-untyped-def]
    tops_ptr,
    seconds_ptr,
    tokens_ptr,
    largest_ptr,
    leads_ptr,
    blocks,
    PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Of one row, from what its blocks came to."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    at = row * blocks + block
    tops = tl.load(tops_ptr + at, mask=inside, other=-float("inf"))
    seconds = tl.load(seconds_ptr + at, mask=inside, other=-float("inf"))
    tokens = tl.load(tokens_ptr + at, mask=inside, other=2147483647)
    top = tl.max(tops, axis=0)
    token = tl.min(tl.where(tops == top, tokens, 2147483647), axis=0)
    second = tl.max(tl.where(tokens == token, seconds, tops), axis=0)
    tl.store(largest_ptr + row, token.to(tl.int64))
    shown = tl.where(top == -float("inf"), PAD, token)
    tl.store(leads_ptr + row, shown.to(tl.float64))
    tl.store(leads_ptr + rows + row, (top - second).to(tl.float64))


def lead_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``argmax.largest`` and ``argmax.leads`` on a CUDA device; only launched. A NaN counts as
    forbidden.

    Args:
        logits: ``[rows, vocab]``, at least one of each; a row's columns are side by side.
    """
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    tops, seconds = logits.new_empty((2, rows, blocks), dtype=torch.float32)
    tokens = logits.new_empty((rows, blocks), dtype=torch.int32)
    largest = logits.new_empty(rows, dtype=torch.int64)
    leads = logits.new_empty((2, rows), dtype=torch.float64)
    _lead_of_blocks[(rows, blocks)](
        logits, tops, seconds, tokens, columns, logits.stride(0), BLOCK=BLOCK
    )
    _lead_of_rows[(rows,)](
        tops,
        seconds,
        tokens,
        largest,
        leads,
        blocks,
        PAD=PAD,
        BLOCKS=triton.next_power_of_2(blocks),
    )
    return largest, leads
