"""What the loop asks of a model. ``CausalLM`` is the real one; tests bring a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.draft_vocabulary import DraftVocabulary


@dataclass(slots=True)
class RowInput:
    """What one sequence feeds in one forward.

    Attributes:
        slot: the cache row of the sequence.
        start: tokens already in that cache row; new ones are written from there on. Lowering
            it is the whole rollback of the cache.
        tokens: the tokens to feed, at least one.
        logits: how many trailing tokens want a row of logits.
        parents: for a tree over the last ``len(parents)`` tokens: each node's parent as an
            index into these, -1 for the token just before the tree. None = all are a chain.
    """

    slot: int
    start: int
    tokens: list[int]
    logits: int = 1
    parents: list[int] | None = None


class LanguageModel(Protocol):
    """A causal language model with ``slots`` ragged cache rows.

    Attributes:
        vocab_size: of the tokens that it reads, and of its logits unless they are pruned.
        draft_vocabulary: what its logits stand for where the head is pruned; None = all tokens.
    """

    vocab_size: int
    max_length: int
    device: torch.device
    draft_vocabulary: DraftVocabulary | None

    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """Feed tokens and return their logits.

        Returns:
            fp32 ``[Σ inputs.logits, vocab]`` (``draft_vocab`` of a pruned head), packed in the
            order of ``inputs``. On CUDA the work is only launched.
        """
        ...

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """After a tree was verified: move the cache entries of the accepted nodes together.

        Args:
            slot: the cache row.
            start: cache index of node 0 of the tree.
            path: the accepted nodes, in order.
        """
        ...
