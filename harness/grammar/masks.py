"""Mask rows: where they lie, which of them count, how they reach the logits.

A row says which tokens may stand at one position of one sequence: position 0 follows the
committed tokens, position ``i + 1`` follows draft ``i`` (of a tree: node ``i``). Two ways lead to
the logits: packed, all rows in one call in logits order (vLLM, TensorRT-LLM), and by step, one
call per position (DeepInfer). They give the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

from harness.bitmask import WORD_BITS, apply_by_step, dead_end, mask_rows, upload, words
from harness.draft_vocabulary import DraftVocabulary
from harness.errors import MatcherError
from harness.static_logits import EVERY_TOKEN, Places


class RowSource(Protocol):
    """The part of a matcher, tracked or not, that masks are made from."""

    @property
    def terminated(self) -> bool: ...

    @property
    def constrained(self) -> bool: ...

    def fill(self, mask: torch.Tensor, row: int) -> None: ...


class MaskBuffer:
    """Mask rows of a batch, a fixed number per sequence whatever it drafts (V1.2b, R5).

    A row counts only while it is flagged (T1): an unflagged one masks nothing, whatever stale
    bits it holds, so nothing is ever filled with ones.

    Args:
        sequences: the most sequences of a batch.
        rows_per_sequence: drafts + 1.
        vocab_size: tokens of a row: the width of the logits, unless these are pruned.
        device: where the logits are.
        places: logits that stay where they are, so that masking them can be a graph.
        pruned: what the logits stand for where a draft model has fewer than there are tokens.

    Attributes:
        host: int32 ``[sequences * rows_per_sequence, ceil(vocab_size / 32)]`` on the CPU, 1 =
            allowed.
    """

    def __init__(
        self,
        sequences: int,
        rows_per_sequence: int,
        vocab_size: int,
        device: torch.device,
        places: Places | None = None,
        pruned: DraftVocabulary | None = None,
    ) -> None:
        self.sequences = sequences
        self.rows_per_sequence = rows_per_sequence
        self.vocab_size = vocab_size
        self.device = device
        self._places, self._pruned = places, pruned
        rows = sequences * rows_per_sequence
        # Pinned for CUDA, and read by copies that are only launched: they have ended when what
        # was chosen with these masks is read, and no row is filled again before that.
        self.host = torch.zeros(
            (rows, words(vocab_size)), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._words = self.host.numpy()
        self._flags = [False] * rows
        self._dead: set[int] = set()

    def clear(self) -> None:
        """Start a step: no row counts any more. The bits stay, nothing reads them."""
        self._flags = [False] * len(self.host)
        self._dead.clear()

    def row(self, sequence: int, position: int) -> int:
        """Index in ``host`` of a position of a sequence.

        Raises:
            MatcherError: the buffer has no such row.
        """
        if not (0 <= sequence < self.sequences and 0 <= position < self.rows_per_sequence):
            raise MatcherError(
                f"mask row ({sequence}, {position}): the buffer holds {self.sequences} sequences "
                f"of {self.rows_per_sequence} rows; build it for the largest batch and draft"
            )
        return sequence * self.rows_per_sequence + position

    def flagged(self, sequence: int, position: int) -> bool:
        """True if the row masks anything."""
        return self._flags[self.row(sequence, position)]

    @property
    def any_dead(self) -> bool:
        """True if any row was found dead in this step."""
        return bool(self._dead)

    def dead(self, sequence: int, position: int) -> bool:
        """True if the row was filled in this step and nothing is legal there (T7)."""
        return self.row(sequence, position) in self._dead

    def fill(self, sequence: int, position: int, matcher: RowSource) -> bool:
        """Write and flag what ``matcher`` allows next.

        A terminated matcher is not asked and its row stays unflagged: the output is over. Nor is
        one that does not constrain: its grammar has not started (D13).

        Returns:
            False for a dead end, a row without a legal token (T7): its flag stays 0.
        """
        row = self.row(sequence, position)
        self._flags[row] = False
        if matcher.terminated or not matcher.constrained:
            return True
        matcher.fill(self.host, row)
        if dead_end(self._words[row], self.vocab_size):
            self._dead.add(row)
        else:
            self._flags[row] = True
        return self._flags[row]

    def copy(self, sequence: int, position: int, source_position: int) -> None:
        """Let a row say what an earlier row of its sequence says, flag included (V1.2d)."""
        row, source = self.row(sequence, position), self.row(sequence, source_position)
        self._words[row] = self._words[source]
        self._flags[row] = self._flags[source]

    def allows(self, sequence: int, position: int, token: int) -> bool:
        """True if the row lets ``token`` pass; an unflagged row lets every token pass."""
        row = self.row(sequence, position)
        if not 0 <= token < self.vocab_size:
            return False
        word, bit = divmod(token, WORD_BITS)
        return not self._flags[row] or bool(int(self._words[row, word]) >> bit & 1)

    def apply(self, logits: torch.Tensor, first_row: Sequence[int], rows: Sequence[int]) -> None:
        """Mask packed logits in place, all flagged rows in one call (V1.3b, V1.3c).

        Args:
            logits: fp32 ``[R, vocab]``, or ``[R, draft_vocab]`` of a pruned head.
            first_row: by sequence, its first row of ``logits``.
            rows: by sequence, how many rows of ``logits`` it owns; flagged rows at or behind
                this position have no logits and are left out (V1.3d).

        Raises:
            MatcherError: the layout does not fit the logits or the buffer.
        """
        _check_width(logits, self.vocab_size if self._pruned is None else len(self._pruned))
        total = len(logits)
        sources: list[int] = []
        targets: list[int] = []
        for sequence, (first, count) in enumerate(zip(first_row, rows, strict=True)):
            if first < 0 or first + count > total:
                raise MatcherError(
                    f"sequence {sequence} owns logits rows {first} to {first + count - 1}, "
                    f"but there are {total}; lay out the rows that were forwarded"
                )
            if not count:
                continue
            start = self.row(sequence, count - 1) + 1 - count  # the last one must be there
            for source in range(start, start + count):
                if self._flags[source]:
                    sources.append(source)
                    targets.append(first + source - start)
        if not targets:
            return
        place = self._places.find(logits) if self._places else None
        if place is not None:
            place.mask(self.host, sources, targets)
            return
        aligned = torch.full((len(logits), self.host.shape[1]), EVERY_TOKEN, dtype=torch.int32)
        aligned[targets] = self.host[sources]
        if self._pruned is None:
            mask_rows(logits, upload(aligned, self.device), targets)
        else:
            self._pruned.mask(logits, upload(aligned, self.device))

    def apply_by_step(self, logits: torch.Tensor, first_row: Sequence[int]) -> None:
        """Mask packed logits in place, one call per position that any sequence flags (D15).

        Args:
            logits: fp32 ``[R, vocab]``, packed in the order of the sequences without gaps.
            first_row: by sequence, its first row of ``logits``.

        Raises:
            MatcherError: the layout does not fit the logits or the buffer.
        """
        _check_width(logits, self.vocab_size)
        sequences = range(len(first_row))
        steps = [
            [sequence for sequence in sequences if self.flagged(sequence, position)]
            for position in range(self.rows_per_sequence)
        ]
        if not any(steps):
            return
        by_sequence = self.host.view(self.sequences, self.rows_per_sequence, -1)
        place = self._places.find(logits) if self._places else None
        if place is not None:
            place.mask_by_step(by_sequence, first_row, steps, len(logits))
            return
        masks = upload(by_sequence[: len(sequences)], self.device)
        numbers = torch.tensor([*first_row, *chain(*steps)], dtype=torch.int32)  # in one copy
        sizes = [len(first_row), *map(len, steps)]
        ftp, *indices = torch.split(upload(numbers, self.device), sizes)
        for step, listed in enumerate(indices):
            if len(listed):
                apply_by_step(logits, masks[:, step], listed, ftp, step)


def _check_width(logits: torch.Tensor, columns: int) -> None:
    if logits.ndim != 2 or logits.shape[1] != columns:
        raise MatcherError(
            f"logits of shape {list(logits.shape)} do not fit masks of {columns} tokens; build the "
            "buffer with the width of the model's logits (V1.3e)"
        )
