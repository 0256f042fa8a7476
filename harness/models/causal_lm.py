"""The forward over any Hugging Face causal LM with a ragged cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.models.language_model import RowInput
from harness.models.ragged_cache import RaggedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Layout:
    """The tensors of one forward, on the CPU.

    Attributes:
        tokens: ``[B, T]``, right-padded with 0.
        positions: ``[B, T]``, for the position encoding; a tree node has its depth.
        cells: ``[B, T]``, where keys and values go; ``max_length`` for padding.
        visible: ``[B, 1, T, span]``, which cells each token attends to.
        span: number of cells that any token attends to.
        wanted: the ``(row, column)`` of each token whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    visible: torch.Tensor
    span: int
    wanted: tuple[list[int], list[int]]


def lay_out(inputs: Sequence[RowInput], max_length: int) -> Layout:
    """Pad ragged inputs into one batch; chains are causal, trees see their own ancestors only."""
    width = max(len(row.tokens) for row in inputs)
    span = max(row.start + len(row.tokens) for row in inputs)
    shape = (len(inputs), width)
    tokens = torch.zeros(shape, dtype=torch.long)
    cells = torch.full(shape, max_length, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    wanted: tuple[list[int], list[int]] = ([], [])
    for b, row in enumerate(inputs):
        n = len(row.tokens)
        tokens[b, :n] = torch.tensor(row.tokens)
        cells[b, :n] = torch.arange(row.start, row.start + n)
        wanted[0].extend([b] * row.logits)
        wanted[1].extend(range(n - row.logits, n))
    positions.copy_(cells.where(cells < max_length, 0))
    visible = torch.arange(span) <= positions[:, :, None]  # padding sees cell 0: no NaN
    for b, row in enumerate(inputs):
        if row.parents is not None:
            _plant(row, visible[b], positions[b])
    return Layout(tokens, positions, cells, visible[:, None], span, wanted)


def _plant(row: RowInput, visible: torch.Tensor, positions: torch.Tensor) -> None:
    """Rewrite the last ``len(parents)`` tokens of a row from a chain to a tree."""
    parents = row.parents or []
    first = len(row.tokens) - len(parents)  # column of node 0
    cell = row.start + first
    for node, parent in enumerate(parents):
        above = first + parent if parent >= 0 else first - 1
        visible[first + node, cell:] = visible[above, cell:]
        visible[first + node, cell + node] = True
        positions[first + node] = positions[above] + 1


class CausalLM:
    """A causal LM of ``transformers`` over a ragged cache; satisfies ``LanguageModel``.

    Logits are cut to the tokenizer's vocabulary, so a padded embedding never samples.

    Args:
        model: in eval mode, on its device.
        vocab_size: of the tokenizer.
        slots: cache rows.
        max_length: tokens a row can hold, drafts included.
    """

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, slots: int, max_length: int
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.device: torch.device = model.device
        self.cache = RaggedCache(slots, max_length)
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument between 5.17 and 5.24.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """See ``LanguageModel.forward``."""
        layout = lay_out(inputs, self.max_length)
        self.cache.aim(
            torch.tensor([row.slot for row in inputs], device=self.device),
            layout.cells.to(self.device),
            layout.span,
        )
        rows, columns = layout.wanted
        kept = sorted(set(columns))
        at = {column: index for index, column in enumerate(kept)}
        logits = self.model(
            input_ids=layout.tokens.to(self.device),
            attention_mask=layout.visible.to(self.device),
            position_ids=layout.positions.to(self.device),
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=self.device),
            **{self._cache_argument: self.cache},
        ).logits
        picked: torch.Tensor = logits[rows, [at[column] for column in columns], : self.vocab_size]
        return picked.float()

    @torch.inference_mode()
    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """See ``LanguageModel.keep_path``."""
        if list(path) != list(range(len(path))):
            self.cache.move(slot, [start + node for node in path], start)
