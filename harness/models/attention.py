"""Attention over a ragged cache, for every model that goes through transformers' interface."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from harness.models.ragged_cache import RaggedLayer

NAME = "ragged"
NARROW = 16
"""Tokens per row up to which scores are computed as they are: a decode step. The fused kernels
walk the cells one block after the other, so few queries leave most of the device idle; two matrix
products do not."""


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention without repeated keys and values.

    The query heads that share a key head are laid side by side as more query positions, so that
    keys and values are read as they are.

    Args:
        module: the model's attention module, bound to its ``RaggedLayer``.
        query: ``[B, heads, T, D]``.
        key, value: ``[B, kv_heads, T, D]``, the new ones; they are stored here.
        attention_mask: additive ``[B, 1, heads // kv_heads * T, S]``, see ``additive_mask``.
        scaling: of the scores; None = ``D ** -0.5``.

    Returns:
        ``[B, T, heads, D]``, and no weights.
    """
    batch, heads, width, size = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, size)
    layer: RaggedLayer = module.ragged_layer  # type: ignore[assignment]
    keys, values = layer.store(key, value)  # [B, kv_heads, S, D]
    if query.is_cuda and width <= NARROW:
        scale = size**-0.5 if scaling is None else scaling
        scores = grouped @ keys.transpose(-1, -2) * scale + attention_mask
        out = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    else:
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(batch, heads, width, size).transpose(1, 2).contiguous(), None


def additive_mask(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of ``ragged_attention``: 0 where a token sees a cell, -inf elsewhere.

    Args:
        visible: bool ``[B, T, S]``.
        groups: query heads per key head.
        dtype: of the model.

    Returns:
        ``[B, 1, groups * T, S]``.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None].repeat(1, 1, groups, 1)


AttentionInterface.register(NAME, ragged_attention)
