"""The stage ``data``: sequences to learn from, in rounds; what exists is kept.

One round decodes every record of the training once in one mode (under its grammar with compact or
free whitespace, or without it; greedy or at temperature 1) and writes one file. Each pass over
the modes has another variant of the prompts. A round depends on its number and the seed alone,
so a later call goes on where this one stopped, and its folder holds what one call would have made.

Besides the rounds: ``reference``, the records' own answers behind several variants of their
prompts, in all styles of JSON; and ``held_out``, reference answers and greedy outputs of the
held-out records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from experiments.distill import prompts
from experiments.distill.decoding import Decoder, Mode
from experiments.distill.progress import Progress, progress
from experiments.distill.prompts import Record, is_call, is_held_out
from experiments.distill.references import OTHERS, reference_sequences
from experiments.distill.sequences import TokenSequence, by_source, read, write
from experiments.distill.settings import Settings, claim
from harness.errors import ConfigError
from harness.models.pair import PairConfig, load_pair
from harness.results.table import Table
from harness.workloads.item import derive_seed

GREEDY = (Mode("compact", 0.0), Mode("free", 0.0))
"""What is measured on: as the harness decodes by default."""
MODES = (*GREEDY, Mode("compact", 1.0), Mode("free", 1.0), Mode(None, 0.0), Mode(None, 1.0))
REFERENCE, HELD_OUT = "reference", "held_out"
"""Files of sequences that are made once."""


class Data(NamedTuple):
    """What the stage leaves: sequences to train on, and those of held-out records."""

    train: list[TokenSequence]
    held_out: list[TokenSequence]


def load(folder: Path) -> Data:
    """All sequences that exist.

    Raises:
        ConfigError: there are none.
    """
    held_out = folder / f"{HELD_OUT}.parquet"
    files = sorted(set(folder.glob("*.parquet")) - {held_out})
    if not files or not held_out.is_file():
        raise ConfigError(f"stages: {folder} holds no sequences; run the stage data first")
    return Data([each for file in files for each in read(file)], read(held_out))


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
        title="Training sequences",
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
    once = {REFERENCE: _Maker.references, HELD_OUT: _Maker.held_out}
    files = {name: folder / f"{name}.parquet" for name in once}
    of_rounds = [folder / f"round-{number:04d}.parquet" for number in range(settings.rounds)]
    first, step = settings.share
    mine = [of_rounds[number] for number in range(first, settings.rounds, step)]
    if all(path.exists() for path in (*files.values(), *mine)):
        return
    with progress("data") as shown:
        maker = _Maker(settings, shown)
        for name, path in files.items():
            if not path.exists():
                write(path, once[name](maker))
        for number, path in list(enumerate(of_rounds))[first::step]:
            spent = perf_counter() - begun
            if settings.data_seconds and spent > settings.data_seconds:
                break
            if not path.exists():
                write(path, maker.round(number))


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

    def round(self, number: int) -> list[TokenSequence]:
        """One generation round."""
        variant, place = divmod(number, len(MODES))
        mode, seed = MODES[place], self._settings.seed
        mix = prompts.requestioned if variant % 3 == 2 else prompts.distracted
        records = mix(self._train, variant, seed)
        if variant and mode.temperature == 0:  # an unchanged prompt brings nothing new
            records = [record for record in records if is_call(record)]
        done = number / self._settings.rounds
        return self._outputs(f"round {number}", done, records, mode, derive_seed(seed, str(number)))

    def references(self) -> list[TokenSequence]:
        """Reference answers behind variants of their prompts, each compact and in another style."""
        others = cycle(OTHERS)
        found: list[TokenSequence] = []
        for variant in range(self._settings.references):
            for record in prompts.distracted(self._train, variant, self._settings.seed):
                if is_call(record) or variant == 0:
                    found += self._answered(record, ("compact", next(others)))
            self._shown.at(0.0, f"references, variant {variant}")
        return found

    def held_out(self) -> list[TokenSequence]:
        """Of each held-out record its reference answers, compact, and the target's own outputs."""
        found = [each for record in self._held_out for each in self._answered(record, ("compact",))]
        for mode in GREEDY:
            found += self._outputs(HELD_OUT, 0.0, self._held_out, mode, self._settings.seed)
        return found

    def _limited(self, records: Iterable[Record]) -> list[Record]:
        """``items`` of each workload, or all."""
        kept: dict[bool, list[Record]] = {True: [], False: []}
        for record in records:
            kept[is_call(record)].append(record)
        limit = self._settings.items or None
        return [*kept[True][:limit], *kept[False][:limit]]

    def _answered(self, record: Record, styles: Iterable[str]) -> Iterable[TokenSequence]:
        return reference_sequences(record, styles, self._pair.tokenizer, self._max_length)

    def _outputs(
        self, what: str, done: float, records: Sequence[Record], mode: Mode, seed: int
    ) -> list[TokenSequence]:
        """The target's own outputs in one mode."""
        return self._decoder.decode(
            records,
            mode,
            seed,
            lambda count: self._shown.at(done, f"{what}, {mode.name}: {count}"),
        )
