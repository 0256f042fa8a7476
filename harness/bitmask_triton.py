"""The by-step mask kernel (D16) for CUDA; ``bitmask`` imports it only for CUDA tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Columns per program: 32 mask words."""


# Row counts change from step to step, and so does where in a copied block the masks and the list
# of one position begin: not specialised, so that no step waits for a compilation.
# No annotations: Triton takes them for types of its own.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["step", "rows", "requests"],
    do_not_specialize_on_alignment=["bitmask_ptr", "indices_ptr"],
)
def _mask_block(  # type: ignore[no-untyped-def]
    logits_ptr,
    bitmask_ptr,
    indices_ptr,
    ftp_ptr,
    step,
    rows,
    requests,
    columns,
    logits_stride,
    bitmask_stride,
    BLOCK: tl.constexpr,
):
    """One block of columns of one listed request; ``ftp_ptr`` None = request r is row r."""
    request = tl.load(indices_ptr + tl.program_id(0)).to(tl.int64)
    listed = request >= 0
    if ftp_ptr is None:
        row = request
        end = rows
    else:
        row = tl.load(ftp_ptr + request, mask=listed, other=rows).to(tl.int64) + step
        end = tl.load(ftp_ptr + request + 1, mask=request + 1 < requests, other=rows)
    if listed & (row < end):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        word = tl.load(bitmask_ptr + request * bitmask_stride + column // 32, mask=inside, other=0)
        forbidden = ((word >> (column % 32)) & 1) == 0
        tl.store(logits_ptr + row * logits_stride + column, -float("inf"), mask=inside & forbidden)


def apply_by_step_triton(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    indices: torch.Tensor,
    ftp: torch.Tensor | None,
    step: int,
) -> None:
    """``bitmask.apply_by_step`` on a CUDA device; only launched.

    Args:
        logits: ``[total rows, vocab]``; a row's columns are contiguous.
        bitmask: int32 ``[requests, words]``; rows may be strided, words are contiguous.
        indices: int32 ``[listed]``, contiguous; -1 for none.
        ftp: int32 ``[requests]``, contiguous, or None.
        step: position inside each request.
    """
    columns = min(logits.shape[1], bitmask.shape[1] * 32)
    grid = (len(indices), triton.cdiv(columns, BLOCK))
    if not all(grid):
        return
    _mask_block[grid](
        logits,
        bitmask,
        indices,
        ftp,
        step,
        logits.shape[0],
        bitmask.shape[0],
        columns,
        logits.stride(0),
        bitmask.stride(0),
        BLOCK=BLOCK,
    )
