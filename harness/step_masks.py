"""Masks addressed by step (D15, D16) as a graph takes them: all in places that stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.bitmask import apply_by_step, words
from harness.core import PAD


class StepMasks:
    """What a masking by step of static logits needs, on the CPU and on their device.

    The kernels are launched alike whatever the batch: lists of requests are padded with ``PAD``,
    and the requests that are missing own no row. One of these is always there; it begins where
    the last real one ends, so the number of packed rows lies in memory as well.

    Args:
        logits: the static logits, fp32 ``[R, vocab]``.
        requests: the most that own rows of them.
        positions: calls per masking, one for each row that a request may own.
    """

    def __init__(self, logits: torch.Tensor, requests: int, positions: int) -> None:
        self._logits = logits
        masks = requests + 1, positions, words(logits.shape[1])
        numbers = 1 + positions, requests + 1  # first rows, then a list of requests by position
        self._host = [
            torch.empty(shape, dtype=torch.int32, pin_memory=logits.is_cuda)
            for shape in (masks, numbers)
        ]
        self._on_device = [torch.empty_like(each, device=logits.device) for each in self._host]
        self._masks, self._numbers = (each.numpy() for each in self._host)

    def load(
        self,
        bitmask: torch.Tensor,
        first_row: Sequence[int],
        steps: Sequence[Sequence[int]],
        rows: int,
    ) -> None:
        """Lay out what comes next; of the masks, those listed, as nothing reads the others.

        Args:
            bitmask: int32 ``[requests, positions, words]`` on the CPU.
            first_row: by request, its first packed row.
            steps: by position, the requests to mask.
            rows: packed rows of the logits.
        """
        source = bitmask.numpy()
        self._numbers[0] = rows
        self._numbers[0, : len(first_row)] = first_row
        self._numbers[1:] = PAD
        for step, listed in enumerate(steps):
            self._numbers[1 + step, : len(listed)] = listed
            for request in listed:  # quicker than all at once, which copies them twice
                self._masks[request, step] = source[request, step]

    def body(self) -> None:
        """What is captured: the copies to the device, and one call per position."""
        for host, on_device in zip(self._host, self._on_device, strict=True):
            on_device.copy_(host, non_blocking=True)
        masks, (ftp, *steps) = self._on_device
        for step, listed in enumerate(steps):
            apply_by_step(self._logits, masks[:, step], listed, ftp, step)
