"""The forward over any Hugging Face causal LM with a ragged cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.models import attention
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
        visible: bool ``[B, T, span]``, which cells each token attends to.
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
    return Layout(tokens, positions, cells, visible, span, wanted)


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
        self.slots = slots
        self.max_length = max_length
        self.device: torch.device = model.device
        model.set_attn_implementation(attention.NAME)
        self.cache = RaggedCache(model, slots, max_length)
        config = model.config.get_text_config(decoder=True)
        self._groups = config.num_attention_heads // (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument between 5.17 and 5.24.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """See ``LanguageModel.forward``."""
        layout = lay_out(inputs, self.max_length)
        slots = [row.slot for row in inputs]
        rows, columns = layout.wanted
        kept = sorted(set(columns))
        at = {column: index for index, column in enumerate(kept)}
        logits = self.compute(
            layout.tokens.to(self.device),
            layout.positions.to(self.device),
            layout.cells.to(self.device),
            layout.visible.to(self.device),
            _rows(slots, self.device),
            torch.tensor(kept, device=self.device),
        )
        return logits[rows, [at[column] for column in columns]].float()

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        visible: torch.Tensor,
        rows: slice | torch.Tensor,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The forward itself, on device tensors; nothing here waits for the device.

        Args:
            tokens, positions, cells: ``[B, T]``, see ``Layout``.
            visible: bool ``[B, T, span]``.
            rows: the cache row of each batch row; a slice where they are consecutive.
            kept: columns that want logits; None = all.

        Returns:
            ``[B, len(kept), vocab]`` in the model's dtype.
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
            attention_mask=attention.additive_mask(visible, self._groups, self.model.dtype),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=0 if kept is None else kept,
            **{self._cache_argument: self.cache},
        ).logits
        return logits[..., : self.vocab_size]

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
