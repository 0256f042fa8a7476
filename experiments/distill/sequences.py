"""Token sequences, and the files that they are kept in: Parquet, and the masks beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.distill.masks import Masks, Rows
from harness.errors import ConfigError

Ids = npt.NDArray[np.int32]

SCHEMA = pa.schema(
    [
        ("item", pa.string()),
        ("source", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("start", pa.int32()),
        ("rows", pa.list_(pa.int32())),
    ]
)


class TokenSequence(NamedTuple):
    """A prompt and what follows it.

    Attributes:
        item: id of the record that it was made from.
        source: where it came from, such as ``bfcl, reference, compact``.
        tokens: prompt, then output, the stop token included.
        start: index of the first output token, at least 1.
        rows: of each output token, the row of the masks that says what its grammar allowed there.
    """

    item: str
    source: str
    tokens: Ids
    start: int
    rows: Rows

    @property
    def output(self) -> list[int]:
        """Token ids."""
        return self.tokens[self.start :].tolist()


def sequence(
    item: str, source: str, prompt: Sequence[int], output: Sequence[int], max_length: int
) -> TokenSequence | None:
    """A sequence cut to ``max_length``, yet without masks; None if no output is left."""
    tokens = np.array([*prompt, *output][:max_length], dtype=np.int32)
    if len(tokens) <= len(prompt):
        return None
    rows = np.zeros(len(tokens) - len(prompt), np.int32)
    return TokenSequence(item, source, tokens, len(prompt), rows)


def by_source(sequences: Iterable[TokenSequence]) -> dict[str, list[TokenSequence]]:
    """The sequences of each source, in the order in which the sources come."""
    found: dict[str, list[TokenSequence]] = {}
    for each in sequences:
        found.setdefault(each.source, []).append(each)
    return found


def write(path: Path, sequences: Iterable[TokenSequence], masks: Masks) -> None:
    """Write a file that appears under its name only when it is complete.

    Args:
        path: of the Parquet file; the masks lie beside it, in ``.npz``.
        sequences: may be none.
        masks: int32 ``[rows, words]`` that they refer to.
    """
    np.savez_compressed(path.with_suffix(".npz"), masks=masks)
    table = [each._asdict() for each in sequences]
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(table, SCHEMA), part, compression="zstd")
    part.replace(path)


def read(path: Path) -> tuple[list[TokenSequence], Masks]:
    """What ``write`` wrote.

    Raises:
        ConfigError: the file has no masks beside it.
    """
    masks = path.with_suffix(".npz")
    if not masks.is_file():
        raise ConfigError(
            f"out: {path} has no masks beside it ({masks.name}), so an earlier version of this "
            "study made it; name another folder and run the stage data"
        )
    table = pq.read_table(path, schema=SCHEMA)
    names, sources = table["item"].to_pylist(), table["source"].to_pylist()
    starts = table["start"].to_pylist()
    columns = names, sources, _lists(table["tokens"]), starts, _lists(table["rows"])
    with np.load(masks) as kept:
        return [TokenSequence(*row) for row in zip(*columns, strict=True)], kept["masks"]


def _lists(column: pa.ChunkedArray) -> list[Ids]:
    """The values of a column of lists, as views of one array."""
    whole = column.combine_chunks()
    flat, ends = whole.values.to_numpy(), whole.offsets.to_numpy()
    return [flat[first:last] for first, last in pairwise(ends)]
