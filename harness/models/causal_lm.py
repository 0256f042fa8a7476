"""The forward over any Hugging Face causal LM with a ragged cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from harness.models import attention
from harness.models.language_model import RowInput
from harness.models.pruned import draft_vocabulary
from harness.models.ragged_cache import ALIGNMENT, RaggedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Layout:
    """The tensors of one forward, on the CPU. Rows end together: padding stands on the left.

    Attributes:
        tokens: ``[B, T]``, padded with 0.
        positions: ``[B, T]``, for the position encoding; a tree node has its depth.
        cells: ``[B, T]``, where keys and values go; ``max_length`` for padding.
        visible: bool ``[B, T, span]``, which cells each token attends to.
        kept: trailing columns that hold every wanted row of logits.
        picked: indices of the wanted rows in the flattened ``[B, kept]``.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    visible: torch.Tensor
    kept: int
    picked: list[int]


def lay_out(inputs: Sequence[RowInput], max_length: int) -> Layout:
    """Pad ragged inputs into one batch; chains are causal, trees see their own ancestors only."""
    width = max(len(row.tokens) for row in inputs)
    span = max(row.start + len(row.tokens) for row in inputs)
    kept = max(row.logits for row in inputs)
    shape = (len(inputs), width)
    tokens = np.zeros(shape, dtype=np.int64)
    cells = np.full(shape, max_length, dtype=np.int64)
    picked: list[int] = []
    for b, row in enumerate(inputs):
        n = len(row.tokens)
        tokens[b, width - n :] = row.tokens
        cells[b, width - n :] = range(row.start, row.start + n)
        picked.extend(range((b + 1) * kept - row.logits, (b + 1) * kept))
    positions = torch.from_numpy(np.where(cells < max_length, cells, 0))
    visible = see_causally(positions, span)
    for b, row in enumerate(inputs):
        if row.parents is not None:
            _plant(row, visible[b], positions[b])
    return Layout(
        torch.from_numpy(tokens), positions, torch.from_numpy(cells), visible, kept, picked
    )


def see_causally(positions: torch.Tensor, span: int) -> torch.Tensor:
    """Bool ``[B, T, span]``: each token sees its own cell and those before it.

    Padding has position 0 and sees cell 0: no row of the attention is empty, none is NaN.
    """
    return torch.arange(span, device=positions.device) <= positions[:, :, None]


def _plant(row: RowInput, visible: torch.Tensor, positions: torch.Tensor) -> None:
    """Rewrite the last ``len(parents)`` tokens of a row from a chain to a tree."""
    parents = row.parents or []
    first = len(positions) - len(parents)  # column of node 0
    cell = row.start + len(row.tokens) - len(parents)
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

    Attributes:
        draft_vocabulary: see ``LanguageModel``.
        columns: logits per row.
    """

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, slots: int, max_length: int
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.slots = slots
        self.max_length = max_length
        self.device: torch.device = model.device
        self.draft_vocabulary = draft_vocabulary(model, vocab_size)
        self.columns = vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary)
        model.set_attn_implementation(attention.NAME)
        self.cache = RaggedCache(model, slots, max_length)
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        ranks = model.tp_size or 1  # that share the heads
        self._groups = heads // kv_heads
        self._heads, kv_heads = heads // ranks, kv_heads // ranks
        # The most heads, and the fewest cells, that a decode step brings.
        most = self._heads * attention.NARROW
        query = torch.zeros(1, most, 1, size, dtype=model.dtype, device=self.device)
        keys = query.new_zeros(1, kv_heads, ALIGNMENT, size)
        self._by_head = attention.attends_by_head(query, keys)
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument between 5.17 and 5.24.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """See ``LanguageModel.forward``."""
        layout = lay_out(inputs, self.max_length)
        visible, slots = layout.visible, [row.slot for row in inputs]
        if self._by_head:
            visible = F.pad(visible, (0, -visible.shape[-1] % ALIGNMENT))
        logits = self.compute(
            layout.tokens.to(self.device),
            layout.positions.to(self.device),
            layout.cells.to(self.device),
            visible.to(self.device),
            _rows(slots, self.device),
            layout.kept,
        )
        return logits.flatten(0, 1)[layout.picked].float()

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        visible: torch.Tensor,
        rows: slice | torch.Tensor,
        kept: int,
    ) -> torch.Tensor:
        """The forward itself, on device tensors; nothing here waits for the device.

        Args:
            tokens, positions, cells: ``[B, T]``, see ``Layout``.
            visible: bool ``[B, T, span]``.
            rows: the cache row of each batch row; a slice where they are consecutive.
            kept: trailing columns that want logits.

        Returns:
            ``[B, kept, columns]`` in the model's dtype.
        """
        aim = self.cache.aim
        aim.view, aim.cells, aim.span = rows, cells, visible.shape[-1]
        aim.rows = (
            torch.arange(rows.start, rows.stop, device=self.device)
            if isinstance(rows, slice)
            else rows
        )[:, None]
        self.cache.bind()
        logits: torch.Tensor = self.model(
            input_ids=tokens,
            attention_mask=self._mask(visible),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=kept,
            **{self._cache_argument: self.cache},
        ).logits
        return logits[..., : self.columns]

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        if self._by_head and visible.shape[1] <= attention.NARROW:
            return attention.mask_by_head(visible, self._heads, self.model.dtype)
        return attention.mask_by_position(visible, self._groups, self.model.dtype)

    @torch.inference_mode()
    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """See ``LanguageModel.keep_path``."""
        if list(path) != list(range(len(path))):
            self.cache.move(slot, [start + node for node in path], start)


def _rows(slots: list[int], device: torch.device) -> slice | torch.Tensor:
    """Cache rows as a slice where they are consecutive: a view instead of a copy."""
    first = slots[0]
    if slots == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return torch.tensor(slots, device=device)
