"""Which token has the largest logit, and by how much."""

from __future__ import annotations

import math

import torch

from harness.core import PAD


def largest(logits: torch.Tensor) -> torch.Tensor:
    """The first largest logit of each row.

    Args:
        logits: ``[rows, vocab]``, each row's columns side by side.

    Returns:
        int64 ``[rows]``; 0 where every token is forbidden.
    """
    if logits.is_cuda:
        from harness.argmax_triton import lead_rows  # noqa: PLC0415 (CUDA only)

        return lead_rows(logits)[0]
    return logits.max(-1).indices


def largest_allowed(logits: torch.Tensor) -> torch.Tensor:
    """``largest``, but ``PAD`` where every token is forbidden."""
    if logits.is_cuda:
        return leads(logits)[0].long()
    best, token = logits.max(-1)
    return torch.where(best == -math.inf, PAD, token)


def leads(logits: torch.Tensor) -> torch.Tensor:
    """The first largest logit of each row and its lead over the runner-up.

    Args:
        logits: ``[rows, vocab]``, each row's columns side by side.

    Returns:
        fp64 ``[2, rows]``: token ids (``PAD`` where every token is forbidden) and leads, which
        are infinite over forbidden tokens.
    """
    if logits.is_cuda:
        from harness.argmax_triton import lead_rows  # noqa: PLC0415 (CUDA only)

        return lead_rows(logits)[1]
    best, token = logits.max(-1, keepdim=True)
    rest = logits.scatter(1, token, -math.inf).amax(-1, keepdim=True)
    shown = torch.where(best == -math.inf, PAD, token)
    return torch.cat([shown.double(), (best - rest).double()], dim=1).T
