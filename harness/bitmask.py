"""Token bitmasks and logits: what both the grammars and the verifiers know of each other.

A mask row is ``ceil(vocab / 32)`` int32 words; bit ``b`` of word ``w`` stands for token
``32 w + b``, 1 = allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

from harness.errors import MatcherError

WORD_BITS = 32
"""Tokens per mask word."""

MaskRow = NDArray[np.int32]
"""One mask row on the CPU, int32 ``[words]``."""


def words(vocab_size: int) -> int:
    """Words per mask row."""
    return -(-vocab_size // WORD_BITS)


def dead_end(row: MaskRow, vocab_size: int) -> bool:
    """True if no token below ``vocab_size`` is allowed in a mask row (T7).

    Padding bits of the last word do not count; bit 31, the sign, does.
    """
    whole, spare = divmod(vocab_size, WORD_BITS)
    if row[:whole].tobytes() != _nothing(whole):  # several times as quick as any()
        return False
    return not spare or not int(row[whole]) & ((1 << spare) - 1)


@cache
def _nothing(words: int) -> bytes:
    return bytes(words * WORD_BITS // 8)


def mask_rows(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int] | None = None
) -> None:
    """Mask rows of logits in place with xgrammar's kernel; on CUDA only launched, but that
    listed ``rows`` are copied there first.

    Args:
        logits: fp32 ``[R, vocab]``.
        bitmask: int32 ``[R, words]`` on the logits' device; its padding bits are overwritten.
        rows: the rows to mask; None = all.
    """
    spare = logits.shape[1] % WORD_BITS
    if spare:
        # For a row that allows every token, xgrammar 0.2.9's CPU kernel also masks the first
        # column of the next row, unless the padding bits are set; its result ignores them.
        bitmask[:, -1] |= -1 << spare
    indices = None if rows is None else list(rows)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask, indices=indices)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting; from memory that is not pinned, through a pinned copy."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def apply_by_step(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    indices: torch.Tensor,
    ftp: torch.Tensor | None = None,
    step: int = 0,
) -> None:
    """Mask one position of each listed request in place (D16).

    Request ``r`` owns the packed rows from ``ftp[r]`` up to the next request's first one (the last
    request: up to the end). Its row ``ftp[r] + step`` gets ``bitmask[r]``; a request that is too
    short to have that row is skipped. Without ``ftp``, request ``r`` is row ``r``.

    Args:
        logits: fp32 ``[total rows, vocab]``; columns at or above ``32 * words`` stay untouched.
        bitmask: int32 ``[requests, words]``, indexed by request, never by row; 0 = -inf.
        indices: int32, the requests to mask; -1 for none.
        ftp: int32 ``[requests]``, first packed row of each request, rising.
        step: position inside each request.

    Raises:
        MatcherError: the shapes or types do not fit each other.
    """
    _check_step(logits, bitmask, indices, ftp)
    if logits.is_cuda:
        from harness.bitmask_triton import apply_by_step_triton  # noqa: PLC0415 (CUDA only)

        apply_by_step_triton(logits, bitmask, indices, ftp, step)
    else:
        _apply_by_step_torch(logits, bitmask, indices, ftp, step)


def _apply_by_step_torch(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    indices: torch.Tensor,
    ftp: torch.Tensor | None,
    step: int,
) -> None:
    total, vocab_size = logits.shape
    requests = indices[indices >= 0].long()
    if ftp is None:
        rows, ends = requests, torch.full_like(requests, total)
    else:
        rows = ftp.long()[requests] + step
        ends = torch.cat((ftp[1:].long(), ftp.new_tensor([total]).long()))[requests]
    rows, requests = rows[rows < ends], requests[rows < ends]
    columns = min(vocab_size, bitmask.shape[1] * WORD_BITS)
    bits = bitmask[requests, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32) & 1
    forbidden = bits.flatten(1)[:, :columns] == 0  # [listed, columns]
    logits[rows, :columns] = logits[rows, :columns].masked_fill(forbidden, -torch.inf)


def _check_step(
    logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor, ftp: torch.Tensor | None
) -> None:
    """What can be checked without waiting for a device."""
    if logits.ndim != 2 or bitmask.ndim != 2 or bitmask.dtype != torch.int32:
        raise MatcherError("give logits [rows, vocab] and an int32 bitmask [requests, words]")
    if bitmask.shape[1] > words(logits.shape[1]):
        raise MatcherError(
            f"the bitmask has {bitmask.shape[1]} words, the logits {words(logits.shape[1])}; "
            "cut the bitmask to the width of the logits"
        )
    if indices.ndim != 1 or indices.dtype != torch.int32:
        raise MatcherError("indices: give an int32 list of request numbers")
    if ftp is not None and (ftp.shape != bitmask.shape[:1] or ftp.dtype != torch.int32):
        raise MatcherError(f"ftp: give one int32 first row for each of the {len(bitmask)} requests")
