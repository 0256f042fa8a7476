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
from experiments.distill.masks import Masks
from experiments.distill.objective import legal_logits
from experiments.distill.sequences import TokenSequence
from experiments.distill.student import hidden_states
from harness.results.metrics import bootstrap_interval

Counts = npt.NDArray[np.int64]

KINDS = {
    "own": "both without a grammar: how well the draft knows the target",
    "free": "a draft made without the grammar, the target under it: what strategies with free "
    "drafts verify",
    "guided": "both under the grammar: what strategies that guide the draft verify",
}
"""Which best tokens are compared: the words for it, and what that says."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over the outputs of some sequences, end tokens included.

    Attributes:
        agreed: by kind of ``KINDS``, int64 ``[sequences]``, positions where both models have the
            same best token.
        positions: int64 ``[sequences]``, all positions.
    """

    agreed: dict[str, Counts]
    positions: Counts

    @property
    def tokens(self) -> int:
        return int(self.positions.sum())

    def share(self, kind: str) -> float:
        return int(self.agreed[kind].sum()) / self.tokens

    def interval(self, kind: str) -> tuple[float, float]:
        """Of the share: 95 %, by bootstrap over the sequences."""
        found = bootstrap_interval(self.agreed[kind], self.positions)
        assert found is not None, "every sequence has an output"
        return found


@torch.inference_mode()
def agreement(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    head: torch.Tensor,
    sequences: Sequence[TokenSequence],
    masks: Masks,
    batch_tokens: int,
) -> Agreement:
    """Feed the sequences to both models and compare their argmax at each output token.

    Args:
        draft: shares the target's embeddings and head.
        target: on the same device.
        head: ``[vocab, hidden]``, see ``head_of``.
        sequences: at least one.
        masks: int32 ``[rows, words]`` that they refer to.
        batch_tokens: of one forward, padding included.
    """
    longest = max(len(each.tokens) for each in sequences)
    table = torch.from_numpy(masks).to(target.device)
    agreed: dict[str, list[Counts]] = {kind: [] for kind in KINDS}
    positions = []
    for batch in in_order(sequences, batch_tokens, longest):
        rows, length = batch.tokens.shape
        row = (batch.positions[: batch.total] // length).numpy()
        for kind, same in _same_best(draft, target, head, batch.to(target.device), table).items():
            counts = np.bincount(row, weights=same.cpu().numpy(), minlength=rows)
            agreed[kind].append(counts.astype(np.int64))
        positions.append(np.bincount(row, minlength=rows))
    whole = {kind: np.concatenate(parts) for kind, parts in agreed.items()}
    return Agreement(whole, np.concatenate(positions))


def _same_best(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    head: torch.Tensor,
    batch: Batch,
    table: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """By kind of ``KINDS``, bool ``[batch.total]``: whether both have the same argmax."""
    kept, masks = batch.positions[: batch.total], table[batch.rows[: batch.total]]
    free, legal = zip(
        *(
            _best(hidden_states(model, batch.tokens).flatten(0, 1)[kept], masks, head)
            for model in (draft, target)
        ),
        strict=True,
    )
    return {
        "own": free[0] == free[1],
        "free": free[0] == legal[1],
        "guided": legal[0] == legal[1],
    }


def _best(
    states: torch.Tensor, masks: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens, and the best legal ones, each int64 ``[positions]``."""
    free, legal = [], []
    for own, mask in zip(states.split(CHUNK), masks.split(CHUNK), strict=True):
        logits = F.linear(own, head)
        free.append(logits.argmax(-1))
        legal.append(legal_logits(logits, mask).argmax(-1))
    return torch.cat(free), torch.cat(legal)
