"""Optimizers of one student."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from harness.errors import ConfigError

BETAS = (0.9, 0.95)


def make_optimizers(
    parameters: Iterable[nn.Parameter], name: str, lr: float, weight_decay: float
) -> list[Optimizer]:
    """AdamW for all, or Muon for the matrices and AdamW for the norms and biases.

    Muon's updates are scaled to the size of AdamW's, so one learning rate serves both (Liu et
    al., 2025, "Muon is scalable for LLM training"). Only matrices decay.

    Raises:
        ConfigError: this version of PyTorch has no Muon.
    """
    own = list(parameters)
    matrices = [each for each in own if each.ndim == 2]
    others = [each for each in own if each.ndim != 2]
    fused = own[0].is_cuda
    if name == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError("optimizer: muon needs PyTorch 2.9 or later; use adamw")
        muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, AdamW(others, lr=lr, betas=BETAS, weight_decay=0.0, fused=fused)]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [AdamW(groups, lr=lr, betas=BETAS, weight_decay=weight_decay, fused=fused)]


def set_rate(optimizers: Iterable[Optimizer], lr: float) -> None:
    """The learning rate of the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
