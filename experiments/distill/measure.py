"""How often two models agree on the best next token, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from experiments.distill.batches import CHUNK, Batch, in_order
from experiments.distill.sequences import TokenSequence
from experiments.distill.student import hidden_states
from harness.results.metrics import bootstrap_interval


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over the outputs of some sequences, end tokens included.

    Attributes:
        agreed: int64 ``[sequences]``, positions where both models have the same best token.
        positions: int64 ``[sequences]``, all positions.
    """

    agreed: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.positions.sum())

    @property
    def share(self) -> float:
        return int(self.agreed.sum()) / self.tokens

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share: 95 %, by bootstrap over the sequences."""
        found = bootstrap_interval(self.agreed, self.positions)
        assert found is not None, "every sequence has an output"
        return found


@torch.inference_mode()
def agreement(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    head: torch.Tensor,
    sequences: Sequence[TokenSequence],
    batch_tokens: int,
) -> Agreement:
    """Feed the sequences to both models and compare their argmax at each output token.

    Args:
        draft: shares the target's embeddings and head.
        target: on the same device.
        head: ``[vocab, hidden]``, see ``head_of``.
        sequences: at least one.
        batch_tokens: of one forward, padding included.
    """
    longest = max(len(each.tokens) for each in sequences)
    agreed, positions = [], []
    for batch in in_order(sequences, batch_tokens, longest):
        rows, length = batch.tokens.shape
        row = (batch.positions[: batch.total] // length).numpy()
        same = _same_best(draft, target, head, batch.to(target.device)).cpu().numpy()
        agreed.append(np.bincount(row, weights=same, minlength=rows).astype(np.int64))
        positions.append(np.bincount(row, minlength=rows))
    return Agreement(np.concatenate(agreed), np.concatenate(positions))


def _same_best(
    draft: PreTrainedModel, target: PreTrainedModel, head: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """Bool ``[batch.total]``: whether both have the same argmax."""
    kept = batch.positions[: batch.total]
    states = [hidden_states(each, batch.tokens).flatten(0, 1)[kept] for each in (draft, target)]
    best = [
        torch.cat([F.linear(part, head).argmax(-1) for part in torch.split(each, CHUNK)])
        for each in states
    ]
    return best[0] == best[1]
