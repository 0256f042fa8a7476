"""The divergence of a student from its target, and its gradient, a few positions at a time.

Logits of a batch over a whole vocabulary would fill the memory. They exist for one chunk of
positions only, and no graph is kept of them: the gradient of the forward divergence is known,

    KL(p || q) = sum_v p_v (log p_v - log q_v),   dKL / dlogits_q = q - p   (Hinton et al., 2015)

and goes through the frozen head by one product. What is left to autograd is the student's layers.

Under a grammar the target's law p is the masked one, which decoding draws from: what the grammar
forbids has probability 0. The student's law is its own, without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from experiments.distill.batches import CHUNK, Batch


class Divergence(NamedTuple):
    """Over a batch, on its device.

    Attributes:
        sums: fp32 ``[2]``: the divergence (nats) and the number of positions where both have the
            same best token, each summed over the weighted positions.
        gradient: ``[positions, hidden]``, of the summed divergence by the student's states.
    """

    sums: torch.Tensor
    gradient: torch.Tensor


ChunkDivergence = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]


LegalLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def legal_logits(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The logits; those that a mask forbids have the lowest finite value.

    Args:
        logits: ``[positions, vocab]``.
        masks: int32 ``[positions, words]``; bit i of word w allows token 32 w + i.
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits) & 1
    legal = allowed.flatten(1)[:, : logits.shape[1]] == 1
    return logits.masked_fill(~legal, torch.finfo(logits.dtype).min)


def chunk_divergence(
    target_logits: torch.Tensor, states: torch.Tensor, weights: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Divergence`` of one chunk; it is what torch.compile gets.

    Args:
        target_logits: ``[positions, vocab]``.
        states: ``[positions, hidden]`` of the student.
        weights: fp32 ``[positions]``.
        head: ``[vocab, hidden]``.
    """
    logits = F.linear(states.to(head.dtype), head)
    log_p = F.log_softmax(target_logits.float(), dim=-1)
    log_q = F.log_softmax(logits.float(), dim=-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(dim=-1)
    agreed = target_logits.argmax(dim=-1) == logits.argmax(dim=-1)
    sums = torch.stack([(weights * divergence).sum(), (weights * agreed).sum()])
    slope = (log_q.exp() - p) * weights[:, None]
    return sums, (slope.to(head.dtype) @ head).to(states.dtype)


@torch.no_grad()
def divergences(
    target_states: torch.Tensor,
    states: list[torch.Tensor],
    batch: Batch,
    masks: torch.Tensor,
    head: torch.Tensor,
    of_chunk: ChunkDivergence = chunk_divergence,
    legal: LegalLogits = legal_logits,
) -> list[Divergence]:
    """How far each student is from the target, whose logits are computed once for all.

    Args:
        target_states: ``[positions, hidden]``; positions are a multiple of ``CHUNK``.
        states: by student, the same.
        batch: whose positions they are.
        masks: int32 ``[rows, words]`` that its rows refer to.
        head: ``[vocab, hidden]``, of them all.
        of_chunk: ``chunk_divergence``, perhaps compiled.
        legal: ``legal_logits``, perhaps compiled.
    """
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in states]
    for first in range(0, len(batch.weights), CHUNK):
        chunk = slice(first, first + CHUNK)
        target_logits = F.linear(target_states[chunk], head)
        target_logits = legal(target_logits, masks[batch.rows[chunk]])
        for parts, own in zip(found, states, strict=True):
            parts.append(of_chunk(target_logits, own[chunk], batch.weights[chunk], head))
    return [
        Divergence(
            torch.stack([sums for sums, _ in parts]).sum(0), torch.cat([g for _, g in parts])
        )
        for parts in found
    ]
