"""A key/value cache whose rows have their own lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache


class RaggedCache(Cache):  # type: ignore[misc]
    """Keys and values of ``slots`` sequences, each with a length of its own.

    The cache stores no lengths: each forward says where its tokens go (``aim``), and what lies
    behind a row's length is overwritten or masked. So a rollback costs nothing here. The
    last cell of each row is scratch: the padding of a forward is written there.

    Attributes:
        keys, values: per layer ``[slots, kv_heads, max_length + 1, head_dim]``, allocated when
            a layer is first used.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.slots, self.max_length = slots, max_length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._rows = self._cells = torch.empty(0)
        self._view: slice | torch.Tensor = slice(0, 0)
        self._span = 0

    def aim(self, rows: torch.Tensor, cells: torch.Tensor, span: int) -> None:
        """Say where the next forward writes and how much of each row it may read.

        Args:
            rows: ``[B]``, cache row of each batch row.
            cells: ``[B, T]``, cell of each token; ``max_length`` for padding.
            span: cells ``0..span-1`` are returned to the attention.
        """
        self._rows, self._cells, self._span = rows[:, None], cells, span
        first, count = int(rows[0]), len(rows)
        consecutive = rows.tolist() == list(range(first, first + count))
        # A slice is a view; an index copies the rows.
        self._view = slice(first, first + count) if consecutive else rows

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, kv_heads, T, head_dim]``; return all that the rows hold, up to the span."""
        while len(self.keys) <= layer_idx:
            for store, states in ((self.keys, key_states), (self.values, value_states)):
                shape = (self.slots, states.shape[1], self.max_length + 1, states.shape[3])
                store.append(states.new_zeros(shape))
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[layer_idx][self._rows, :, self._cells] = states.transpose(1, 2)
        return (
            self.keys[layer_idx][self._view, :, : self._span],
            self.values[layer_idx][self._view, :, : self._span],
        )

    def move(self, slot: int, source: Sequence[int], start: int) -> None:
        """Copy the cells ``source`` of a row to ``start``, ``start + 1``, …"""
        for store in (*self.keys, *self.values):
            store[slot, :, start : start + len(source)] = store[slot, :, list(source)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nothing may be inferred from this."""
        return 0
