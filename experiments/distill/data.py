"""The stage ``data``: sequences to learn from, in rounds; what exists is kept.

One round decodes prompts in one mode (under their grammars with compact or free whitespace, or
without them; greedy or at temperature 1) and writes one file. The first rounds have the records of
the training as they are, once in each mode; each later one has a variant of every call
(``experiments.distill.variants``). A round depends on its number and the seed alone,
so a later call goes on where this one stopped, and its folder holds what one call would have made.

Besides the rounds: ``reference``, the records' own answers behind several variants of their
prompts, in all styles of JSON; and ``held_out``, reference answers and greedy outputs of the
held-out records. Every sequence knows what its grammar allowed at each token of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from experiments.distill import prompts
from experiments.distill.decoding import Decoder, Mode
from experiments.distill.masks import Masks, MaskTable
from experiments.distill.progress import Progress, progress
from experiments.distill.prompts import Record, is_call, is_held_out
from experiments.distill.references import OTHERS, reference_sequences
from experiments.distill.sequences import TokenSequence, by_source, read, write
from experiments.distill.settings import Settings, claim
from experiments.distill.variants import Variants
from harness.errors import ConfigError
from harness.models.pair import PairConfig, load_pair
from harness.results.table import Table
from harness.workloads.item import derive_seed

GREEDY = (Mode("compact", 0.0), Mode("free", 0.0))
"""What is measured on: as the harness decodes by default."""
SAMPLED = (Mode("compact", 1.0), Mode("free", 1.0))
MODES = (*GREEDY, *SAMPLED, Mode(None, 0.0), Mode(None, 1.0))
"""Of the first rounds."""
LATER = (*GREEDY, *SAMPLED, Mode("compact", 0.0), Mode(None, 1.0))
"""Of all others, in turn: mostly what decoding under a grammar meets."""
REFERENCE, HELD_OUT = "reference", "held_out"
"""Files of sequences that are made once."""


Made = tuple[list[TokenSequence], Masks]


class Data(NamedTuple):
    """What the stage leaves.

    Attributes:
        train: sequences to train on.
        held_out: those of held-out records.
        masks: int32 ``[rows, words]``, of both.
    """

    train: list[TokenSequence]
    held_out: list[TokenSequence]
    masks: Masks

    def without_masks(self) -> Data:
        """The same sequences as if no grammar had governed them."""
        parts = (
            [each._replace(rows=np.zeros_like(each.rows)) for each in part]
            for part in (self.train, self.held_out)
        )
        return Data(*parts, self.masks[:1])


def load(folder: Path) -> Data:
    """All sequences that exist.

    Raises:
        ConfigError: there are none.
    """
    held_out = folder / f"{HELD_OUT}.parquet"
    files = sorted(set(folder.glob("*.parquet")) - {held_out})
    if not files or not held_out.is_file():
        raise ConfigError(f"stages: {folder} holds no sequences; run the stage data first")
    parts = [read(file) for file in (*files, held_out)]
    table = MaskTable(words=parts[0][1].shape[1])
    *train, unseen = [_moved(*part, table) for part in parts]
    return Data([each for part in train for each in part], unseen, table.masks)


def _moved(sequences: list[TokenSequence], masks: Masks, table: MaskTable) -> list[TokenSequence]:
    """Sequences whose masks are rows of another table."""
    place = np.array([table.row(mask) for mask in masks], np.int32)
    return [each._replace(rows=place[each.rows]) for each in sequences]


def rounds(folder: Path) -> int:
    """How many generation rounds there are."""
    return len(list(folder.glob("round-*.parquet")))


def counts(data: Data) -> list[tuple[str, int, int]]:
    """Of the training sequences: each source, its sequences and their output tokens."""
    return [
        (source, len(each), sum(len(one.tokens) - one.start for one in each))
        for source, each in sorted(by_source(data.train).items())
    ]


def as_table(data: Data) -> Table:
    """One row per source."""
    rows = tuple((source, str(number), str(tokens)) for source, number, tokens in counts(data))
    return Table(
        title=f"Training sequences, {len(data.masks):,} masks",
        headers=("source", "sequences", "output tokens"),
        docs=("workload, and what made the outputs", "number", "end tokens included"),
        rows=rows,
    )


def make(settings: Settings, folder: Path) -> None:
    """Make what is missing, within the bounds of ``rounds`` and ``data_seconds``.

    Raises:
        ConfigError: the folder holds sequences of other settings.
    """
    begun = perf_counter()
    claim(folder, settings.values("data"))
    files: dict[Path, Callable[[_Maker], Made]] = {
        folder / f"{REFERENCE}.parquet": _Maker.references,
        folder / f"{HELD_OUT}.parquet": _Maker.held_out,
    }
    once = set(files)
    for number in range(settings.rounds):
        files[folder / f"round-{number:04d}.parquet"] = partial(_Maker.round, number=number)
    first, step = settings.share
    mine = dict(list(files.items())[first::step])
    if all(path.exists() for path in mine):
        return
    with progress("data") as shown:
        maker = _Maker(settings, shown)
        for path, make_it in mine.items():
            spent = perf_counter() - begun
            if settings.data_seconds and spent > settings.data_seconds and path not in once:
                break
            if not path.exists():
                write(path, *make_it(maker))


class _Maker:
    """Makes sequences of one pair and its settings."""

    def __init__(self, settings: Settings, shown: Progress) -> None:
        self._settings, self._shown = settings, shown
        self._pair = load_pair(PairConfig(settings.target, device=settings.device))
        config = self._pair.target.config.get_text_config(decoder=True)
        self._max_length = min(settings.max_length, config.max_position_embeddings)
        self._decoder = Decoder(
            self._pair, settings.slots, self._max_length, settings.max_new_tokens
        )
        records = [
            *prompts.read(prompts.CALLS, "train"),
            *prompts.read(prompts.SCHEMAS, "train"),
        ]
        self._train = self._limited(record for record in records if not is_held_out(record))
        self._held_out = self._limited(record for record in records if is_held_out(record))
        self._variants = Variants(self._train, settings.seed)

    def round(self, number: int) -> Made:
        """One generation round."""
        first, seed = number < len(MODES), self._settings.seed
        mode = MODES[number] if first else LATER[(number - len(MODES)) % len(LATER)]
        records = self._variants(self._train, 0 if first else number)
        if not first:  # an unchanged prompt brings nothing new
            records = [record for record in records if is_call(record)]
        done, seed = number / self._settings.rounds, derive_seed(seed, str(number))
        table = self._decoder.grammars.new_table()
        return self._outputs(f"round {number}", done, records, mode, seed, table), table.masks

    def references(self) -> Made:
        """Reference answers behind variants of their prompts, each compact and in another style."""
        others, table = cycle(OTHERS), self._decoder.grammars.new_table()
        found: list[TokenSequence] = []
        for variant in range(self._settings.references):
            chosen = [
                (record, ("compact", next(others)))
                for record in self._variants(self._train, variant)
                if is_call(record) or variant == 0
            ]
            found += self._answered(chosen, table)
            self._shown.at(0.0, f"references, variant {variant}")
        return found, table.masks

    def held_out(self) -> Made:
        """Of each held-out record its reference answers, compact, and the target's own outputs."""
        table = self._decoder.grammars.new_table()
        found = self._answered([(record, ("compact",)) for record in self._held_out], table)
        for mode in GREEDY:
            found += self._outputs(HELD_OUT, 0.0, self._held_out, mode, self._settings.seed, table)
        return found, table.masks

    def _limited(self, records: Iterable[Record]) -> list[Record]:
        """``items`` of each workload, or all."""
        kept: dict[bool, list[Record]] = {True: [], False: []}
        for record in records:
            kept[is_call(record)].append(record)
        limit = self._settings.items or None
        return [*kept[True][:limit], *kept[False][:limit]]

    def _answered(
        self, records: Iterable[tuple[Record, Iterable[str]]], table: MaskTable
    ) -> list[TokenSequence]:
        return reference_sequences(
            records, self._pair.tokenizer, self._max_length, self._decoder.grammars, table
        )

    def _outputs(
        self,
        what: str,
        done: float,
        records: Sequence[Record],
        mode: Mode,
        seed: int,
        table: MaskTable,
    ) -> list[TokenSequence]:
        """The target's own outputs in one mode."""
        told = lambda count: self._shown.at(done, f"{what}, {mode.name}: {count}")  # noqa: E731
        return self._decoder.decode(records, mode, seed, table, told)
