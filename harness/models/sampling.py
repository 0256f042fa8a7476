"""From logits to tokens: one law and one way to draw from it, for target and draft alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from harness.core import PAD
from harness.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from a row of logits.

    Attributes:
        temperature: divides the logits; 0 = greedy.
        top_k: keep the k most likely tokens, and those tied with the last of them; 0 = all.
        top_p: keep the fewest most likely tokens whose mass reaches this; 1 = all.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"sampling.temperature: {self.temperature} is not a number >= 0")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k: {self.top_k} is negative; use 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p: {self.top_p} is not in (0, 1]; use 1 to keep all")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The law that tokens are drawn from: temperature, then top-k, then top-p.

    A grammar's mask is applied to the logits before (V1.3f), so truncation counts legal tokens
    only.

    Args:
        logits: ``[rows, vocab]``; -inf = forbidden.

    Returns:
        fp32 ``[rows, vocab]``; a row sums to 1, or to 0 if every token of it is forbidden. Greedy
        sampling gives all mass to the first largest logit.
    """
    logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)
    dead = best == -math.inf
    if sampling.greedy:
        winner = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, winner, 1.0).masked_fill_(dead, 0.0)
    if 0 < sampling.top_k < logits.shape[-1]:
        last_kept = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < last_kept, -math.inf)
    # Relative to the best: a tiny temperature then gives -inf, never inf / inf.
    law = torch.softmax((logits - best) / sampling.temperature, dim=-1).masked_fill_(dead, 0.0)
    return law if sampling.top_p == 1 else _nucleus(law, sampling.top_p)


def _nucleus(law: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep each token whose more likely ones hold less than ``top_p``; renormalise."""
    ordered, order = law.sort(dim=-1, descending=True, stable=True)
    ahead = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    kept = torch.zeros_like(law).scatter_(-1, order, ordered.masked_fill(ahead >= top_p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(law.dtype).tiny)


def sample(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw a token per row by inverting its cumulative distribution, in float64.

    Args:
        probabilities: ``[rows, vocab]``, not negative; a row need not sum to 1.
        u: ``[rows]`` uniforms in [0, 1).

    Returns:
        int64 ``[rows]``: always a token of positive probability; ``PAD`` for a row of zeros.
    """
    mass = probabilities.double()
    # A parallel scan need not be monotone in its last bits: impossible tokens are taken out
    # of the race, and the largest sum is the total.
    cumulative = mass.cumsum(dim=-1).masked_fill_(mass <= 0, 0.0)
    beyond = cumulative > u.double().unsqueeze(-1) * cumulative.amax(dim=-1, keepdim=True)
    # argmax gives the first of equal maxima.
    return torch.where(beyond.any(dim=-1), beyond.to(torch.uint8).argmax(dim=-1), PAD)


@dataclass(frozen=True)
class Draw:
    """Work: a token for each row, from ``[rows, vocab]`` logits and fp64 ``[rows]`` uniforms."""

    sampling: Sampling

    def __call__(self, logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return sample(probabilities(logits, self.sampling), u)
