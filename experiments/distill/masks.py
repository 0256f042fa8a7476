"""What a grammar allowed at each token of an output, as rows of a table of distinct masks.

A mask of 49,152 tokens takes 6 KiB, so millions of positions cannot keep one each. But masks recur:
the 1.5 million positions of the shipped draft's training have 9,977 (``stages=data`` prints it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from harness.errors import GrammarError
from harness.grammar.matcher import ALL, Matcher, TokenTable, Whitespace
from harness.grammar.service import GrammarConfig, GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec

COMPILE_TIMEOUT_S = 10.0
GRAMMAR_CACHE_MB = 16_384
AT_ONCE = 512
"""Grammars that are compiled together, before any of them is used."""

Masks = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int32]


class MaskTable:
    """Distinct masks; row 0 allows every token and stands where no grammar speaks.

    Args:
        words: of a mask, 32 tokens each.
    """

    def __init__(self, words: int) -> None:
        self._masks: list[Masks] = []
        self._rows: dict[bytes, int] = {}
        self.row(np.full(words, ALL, np.int32))

    def row(self, mask: Masks) -> int:
        """The row of an int32 mask ``[words]``, added if it is new."""
        key = mask.tobytes()
        if key not in self._rows:
            self._rows[key] = len(self._masks)
            self._masks.append(mask.copy())
        return self._rows[key]

    @property
    def masks(self) -> Masks:
        """int32 ``[rows, words]``."""
        return np.stack(self._masks)

    def follow(self, matcher: Matcher, output: Sequence[int]) -> Rows:
        """The row of what a grammar allows at each token of an output.

        Behind a token that it refuses, which a reference answer may hold, it allows everything.

        Args:
            matcher: at its start.
            output: token ids.
        """
        rows = np.zeros(len(output), np.int32)
        mask = torch.empty((1, self._masks[0].size), dtype=torch.int32)
        for position, token in enumerate(output):
            matcher.fill(mask, 0)
            rows[position] = self.row(mask[0].numpy())
            if not matcher.accept([token]):
                break
        return rows


class Governed(NamedTuple):
    """An output and its grammar.

    Attributes:
        output: token ids.
        grammar: None = none.
        whitespace: that the grammar allows.
    """

    output: Sequence[int]
    grammar: GrammarSpec | None
    whitespace: Whitespace


class Grammars:
    """The grammars of one vocabulary, each compiled once for each whitespace.

    Args:
        table: the vocabulary.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._services: dict[Whitespace, GrammarService] = {}

    def service(self, whitespace: Whitespace) -> GrammarService:
        """What compiles for this whitespace."""
        if whitespace not in self._services:
            config = GrammarConfig(
                whitespace=whitespace, timeout_s=COMPILE_TIMEOUT_S, cache_mb=GRAMMAR_CACHE_MB
            )
            engine = grammar_engine(config.engine, self._table, whitespace)
            self._services[whitespace] = GrammarService(engine, config)
        return self._services[whitespace]

    def new_table(self) -> MaskTable:
        """A table for masks of this vocabulary."""
        return MaskTable(-(-len(self._table) // 32))

    def follow(self, outputs: Iterable[Governed], table: MaskTable) -> list[Rows]:
        """``MaskTable.follow`` of each output; row 0 where no grammar governs it, or none that
        compiles."""
        outputs, found = list(outputs), list[Rows]()
        for first in range(0, len(outputs), AT_ONCE):
            chunk = outputs[first : first + AT_ONCE]
            self._compile(chunk)
            found += [self._follow(each, table) for each in chunk]
        return found

    def _compile(self, outputs: Iterable[Governed]) -> None:
        """All of their grammars, on the services' threads."""
        specs: dict[Whitespace, list[GrammarSpec]] = {}
        for each in outputs:
            if each.grammar is not None:
                specs.setdefault(each.whitespace, []).append(each.grammar)
        for whitespace, chosen in specs.items():
            self.service(whitespace).finish(chosen)

    def _follow(self, governed: Governed, table: MaskTable) -> Rows:
        free = np.zeros(len(governed.output), np.int32)
        if governed.grammar is None:
            return free
        try:
            compiled, _ = self.service(governed.whitespace).compile(governed.grammar)
        except GrammarError:
            return free
        return table.follow(compiled.matcher(), governed.output)
