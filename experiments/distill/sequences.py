"""Token sequences, and the Parquet files that they are kept in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Ids = npt.NDArray[np.int32]

SCHEMA = pa.schema(
    [
        ("item", pa.string()),
        ("source", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("start", pa.int32()),
    ]
)


class TokenSequence(NamedTuple):
    """A prompt and what follows it.

    Attributes:
        item: id of the record that it was made from.
        source: where it came from, such as ``bfcl, reference, compact``.
        tokens: prompt, then output, the stop token included.
        start: index of the first output token, at least 1.
    """

    item: str
    source: str
    tokens: Ids
    start: int


def sequence(
    item: str, source: str, prompt: Sequence[int], output: Sequence[int], max_length: int
) -> TokenSequence | None:
    """A sequence cut to ``max_length``; None if nothing of the output is left."""
    tokens = np.array([*prompt, *output][:max_length], dtype=np.int32)
    if len(tokens) <= len(prompt):
        return None
    return TokenSequence(item, source, tokens, len(prompt))


def by_source(sequences: Iterable[TokenSequence]) -> dict[str, list[TokenSequence]]:
    """The sequences of each source, in the order in which the sources come."""
    found: dict[str, list[TokenSequence]] = {}
    for each in sequences:
        found.setdefault(each.source, []).append(each)
    return found


def write(path: Path, sequences: Iterable[TokenSequence]) -> None:
    """Write a file that appears under its name only when it is complete."""
    rows = [each._asdict() for each in sequences]
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), part, compression="zstd")
    part.replace(path)


def read(path: Path) -> list[TokenSequence]:
    """What ``write`` wrote."""
    table = pq.read_table(path, schema=SCHEMA)
    column = table["tokens"].combine_chunks()
    flat = column.values.to_numpy()
    ends = column.offsets.to_numpy()
    return [
        TokenSequence(item, source, flat[first:last], start)
        for item, source, first, last, start in zip(
            table["item"].to_pylist(),
            table["source"].to_pylist(),
            ends[:-1],
            ends[1:],
            table["start"].to_pylist(),
            strict=True,
        )
    ]
