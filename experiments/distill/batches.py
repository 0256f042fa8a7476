"""Batches of static shapes: a function of the seed and the index, so that any can be made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from experiments.distill.sequences import TokenSequence

LENGTHS = (256, 384, 512, 768)
"""Rows are padded to the next of these, or to the longest that is allowed: few shapes to
compile, of which each holds the same number of tokens."""
CHUNK = 2048
"""Positions whose logits exist at once; the positions of a batch are padded to a multiple."""
AHEAD = 4
"""Batches that are made while earlier ones are trained on."""

Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """What one step learns from.

    Attributes:
        tokens: int64 ``[rows, length]``, padded with 0 on the right.
        positions: int64 ``[n * CHUNK]``, indices into the flattened ``tokens`` of the positions
            whose next token is predicted.
        rows: int64 ``[n * CHUNK]``, of the masks that say what may stand there; 0 in prompts.
        weights: fp32 ``[n * CHUNK]``; 1, or 0 for padding.
        total: sum of ``weights``.
        real: tokens that are no padding.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    total: int
    real: int

    def to(self, device: torch.device) -> Batch:
        """On a device; from pinned memory the copy is only launched."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        return self._each(torch.Tensor.pin_memory)

    def _each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors = map(move, (self.tokens, self.positions, self.rows, self.weights))
        return Batch(*tensors, self.total, self.real)


def collate(
    sequences: Sequence[TokenSequence],
    shape: tuple[int, int],
    prompt_share: float = 0.0,
    random: np.random.Generator | None = None,
) -> Batch:
    """One batch of these rows.

    Args:
        sequences: one a row, at least one.
        shape: rows and their length; what is left is padding.
        prompt_share: share of the prompt positions that are learnt from; outputs are in full.
        random: draws them.
    """
    tokens = np.zeros(shape, dtype=np.int64)
    chosen, rows = [], []
    for row, each in enumerate(sequences):
        tokens[row, : len(each.tokens)] = each.tokens
        first = each.start - 1  # it predicts the first output token
        picked, masks = np.arange(first, len(each.tokens) - 1), each.rows.astype(np.int64)
        if random is not None and prompt_share > 0:
            prompt = np.flatnonzero(random.random(first) < prompt_share)
            picked = np.concatenate([prompt, picked])
            masks = np.concatenate([np.zeros(len(prompt), np.int64), masks])
        chosen.append(row * shape[1] + picked)
        rows.append(masks)
    flat, masks = np.concatenate(chosen), np.concatenate(rows)
    padded = -(-len(flat) // CHUNK) * CHUNK
    rest = (0, padded - len(flat))
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(np.pad(flat, rest)),
        torch.from_numpy(np.pad(masks, rest)),
        (torch.arange(padded) < len(flat)).float(),
        total=len(flat),
        real=sum(len(each.tokens) for each in sequences),
    )


class Batches:
    """The batches of a training, epoch by epoch.

    Args:
        sequences: to learn from, at least one.
        batch_tokens: tokens of a batch, padding included.
        max_length: of the longest row.
        prompt_share: see ``collate``.
        seed: of the order and of the positions.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        batch_tokens: int,
        max_length: int,
        prompt_share: float,
        seed: int,
    ) -> None:
        self._sequences, self._seed = sequences, seed
        self._prompt_share = prompt_share
        self._buckets = {
            length: (members, max(1, batch_tokens // length))
            for length, members in buckets(sequences, max_length).items()
        }
        self._epoch: tuple[int, list[tuple[int, Array]]] = (-1, [])

    def __len__(self) -> int:
        """Batches of an epoch."""
        return sum(-(-len(members) // rows) for members, rows in self._buckets.values())

    def __getitem__(self, index: int) -> Batch:
        """Batch ``index`` of the training, counted through all epochs."""
        epoch, place = divmod(index, len(self))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        length, rows = self._epoch[1][place]
        random = np.random.default_rng([self._seed, 1, index])
        members = [self._sequences[row] for row in rows.tolist()]
        return collate(members, (len(rows), length), self._prompt_share, random)

    def one_of_each_shape(self) -> Iterator[Batch]:
        """A batch of every shape that there is."""
        for length, (members, rows) in self._buckets.items():
            chosen = [self._sequences[row] for row in np.resize(members, rows).tolist()]
            yield collate(chosen, (rows, length))

    def _shuffled(self, epoch: int) -> list[tuple[int, Array]]:
        """All batches of an epoch; the last one of a bucket is filled up with its first rows."""
        random = np.random.default_rng([self._seed, 0, epoch])
        batches = []
        for length, (members, rows) in self._buckets.items():
            order = random.permutation(members)
            full = np.resize(order, -(-len(order) // rows) * rows)
            batches += [(length, each) for each in full.reshape(-1, rows)]
        return [batches[place] for place in random.permutation(len(batches))]


def buckets(sequences: Sequence[TokenSequence], max_length: int) -> dict[int, Array]:
    """By padded length, the indices of the sequences that have it."""
    lengths = np.array([*(length for length in LENGTHS if length < max_length), max_length])
    place = np.searchsorted(lengths, [len(each.tokens) for each in sequences])
    return {
        int(lengths[bucket]): np.flatnonzero(place == bucket).astype(np.int64)
        for bucket in np.unique(place)
    }


def in_order(
    sequences: Sequence[TokenSequence], batch_tokens: int, max_length: int, full: bool = False
) -> Iterator[Batch]:
    """All sequences once, outputs only: for measuring.

    Args:
        sequences: at least one.
        batch_tokens: of a batch, padding included.
        max_length: of the longest row.
        full: give all batches of a length the same number of rows, for compiled models.
    """
    for length, members in buckets(sequences, max_length).items():
        rows = max(1, batch_tokens // length)
        for first in range(0, len(members), rows):
            chosen = [sequences[row] for row in members[first : first + rows].tolist()]
            yield collate(chosen, (rows if full else len(chosen), length))


def ahead(make: Callable[[int], Batch], first: int) -> Generator[Batch, None, None]:
    """Batches from index ``first`` on, made on a thread while earlier ones are in use."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(make, index) for index in range(first, first + AHEAD))
        for index in count(first + AHEAD):
            waiting.append(pool.submit(make, index))
            yield waiting.popleft().result()
