"""Attention over a ragged cache, for every model that goes through transformers' interface."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from harness.models.ragged_cache import RaggedLayer

NAME = "ragged"
NARROW = 16
"""Tokens per row up to which a step is a decode step. The fused kernels walk the cells one block
after the other, so few queries leave most of the device idle."""


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

    The query heads that share a key head are laid side by side as more query positions; or, if
    the mask says so, each query position is a head of its own that sees one position.

    Args:
        module: the model's attention module, bound to its ``RaggedLayer``.
        query: ``[B, heads, T, D]``.
        key, value: ``[B, kv_heads, T, D]``, the new ones; they are stored here.
        attention_mask: of ``mask_by_position`` or ``mask_by_head``.
        scaling: of the scores; None = ``D ** -0.5``.

    Returns:
        ``[B, T, heads, D]``, and no weights.
    """
    batch, heads, width, size = query.shape
    layer: RaggedLayer = module.ragged_layer  # type: ignore[assignment]
    keys, values = layer.store(key, value)  # [B, kv_heads, S, D]
    by_head = attention_mask.shape[1] > 1
    grouped = query.reshape(batch, heads * width if by_head else key.shape[1], -1, size)
    if by_head:
        out = _attend_by_head(grouped, keys, values, attention_mask, scaling)
    elif query.is_cuda and width <= NARROW:
        scale = size**-0.5 if scaling is None else scaling
        scores = grouped @ keys.transpose(-1, -2) * scale + attention_mask
        out = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    else:
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(batch, heads, width, size).transpose(1, 2).contiguous(), None


def _attend_by_head(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """One position per head: on a GPU cuDNN's kernel, which shares the cells out.

    By its own name: no order of preference among the kernels behind
    ``scaled_dot_product_attention`` outlives torch.compile.
    """
    if query.is_cuda:
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, mask, False, scale=scale
        )[0]
        return out
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )


def attends_by_head(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether cuDNN has a kernel for one position per head, and so ``mask_by_head`` is faster.

    Args:
        query: ``[B, heads, 1, D]``, of the dtype and on the device that are asked about.
        keys: ``[B, kv_heads, S, D]``.
    """
    if not query.is_cuda:
        return False
    mask = query.new_zeros(*query.shape[:3], keys.shape[2])
    params = torch.backends.cuda.SDPAParams(query, keys, keys, mask, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def mask_by_position(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask, 0 where a token sees a cell, -inf elsewhere.

    Args:
        visible: bool ``[B, T, S]``.
        groups: query heads per key head.
        dtype: of the model.

    Returns:
        ``[B, 1, groups * T, S]``.
    """
    return _additive(visible, dtype)[:, None].repeat(1, 1, groups, 1)


def mask_by_head(visible: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The same for one position per head, ``[B, heads * T, 1, S]``; ``heads`` are query heads."""
    return _additive(visible, dtype).repeat(1, heads, 1)[:, :, None]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


AttentionInterface.register(NAME, ragged_attention)
