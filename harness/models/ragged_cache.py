"""A key/value cache whose rows have their own lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

ALIGNMENT = 64
"""Kernels are slow over a number of cells that is no multiple of it."""


def padded_cells(max_length: int) -> int:
    """Cells of a row that holds ``max_length`` tokens: one more is scratch, the last are spare."""
    return -(-(max_length + 1) // ALIGNMENT) * ALIGNMENT


class Aim:
    """Where one forward writes, and what it may read; shared by all layers.

    Attributes:
        rows: ``[B, 1]``, the cache row of each batch row.
        cells: ``[B, T]``, the cell of each token.
        view: the rows as a slice where they are consecutive: a view instead of a copy.
        span: cells ``0..span-1`` are read.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    view: slice | torch.Tensor
    span: int


class RaggedLayer:
    """Keys and values of one layer: ``[slots, kv_heads, padded_cells(max_length), head_dim]``.

    Allocated by the first states that come, whose shape no config needs to tell.
    """

    def __init__(self, slots: int, max_length: int, aim: Aim) -> None:
        self._size = slots, padded_cells(max_length)
        self._aim = aim
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, kv_heads, T, head_dim]``; return all that the rows hold, up to the span."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._allocate(keys), self._allocate(values)
        aim = self._aim
        self.keys[aim.rows, :, aim.cells] = keys.transpose(1, 2)
        self.values[aim.rows, :, aim.cells] = values.transpose(1, 2)
        # The span first: rows that are not consecutive are copied.
        return self.keys[:, :, : aim.span][aim.view], self.values[:, :, : aim.span][aim.view]

    def move(self, slot: int, source: Sequence[int], start: int) -> None:
        """Copy the cells ``source`` of a row to ``start``, ``start + 1``, …"""
        for store in (self.keys, self.values):
            assert store is not None, "a tree was fed before its path is kept"
            store[slot, :, start : start + len(source)] = store[slot, :, list(source)]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        slots, cells = self._size
        return states.new_zeros(slots, states.shape[1], cells, states.shape[3])


class RaggedCache(Cache):  # type: ignore[misc]
    """Stands in for transformers' cache; the attention function does the work.

    No lengths are stored: each forward says where its tokens go (``aim``), and what lies behind
    a row's length is overwritten or masked. So a rollback costs nothing here. The cell behind the
    last token's is scratch: the padding of a forward is written there.
    """

    def __init__(self, model: torch.nn.Module, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.aim = Aim()
        self._layers: dict[int, RaggedLayer] = {}
        self._modules: list[tuple[torch.nn.Module, RaggedLayer]] = []
        for module in model.modules():
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int):
                layer = self._layers.setdefault(index, RaggedLayer(slots, max_length, self.aim))
                self._modules.append((module, layer))

    def bind(self) -> None:
        """Let the model's attention modules find their layers.

        As an attribute of the module, not by ``layer_idx``: so one compilation of a layer
        serves all layers.
        """
        for module, layer in self._modules:
            module.ragged_layer = layer  # type: ignore[assignment]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass the new states on to the attention function, which stores them."""
        return key_states, value_states

    def move(self, slot: int, source: Sequence[int], start: int) -> None:
        """Copy the cells ``source`` of a row to ``start``, ``start + 1``, … in every layer."""
        for layer in self._layers.values():
            layer.move(slot, source, start)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nothing may be inferred from this."""
        return 0
