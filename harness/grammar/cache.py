"""Compiled grammars and failures, kept within bounds."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from harness.errors import GrammarError
from harness.grammar.matcher import CompiledGrammar
from harness.grammar.spec import GrammarSpec


@dataclass(slots=True)
class Entry:
    """What came of one compilation.

    Attributes:
        outcome: the compiled grammar, or why there is none.
        compile_ms: time that it took, ms; 0 once a request was told.
        expires: when it is forgotten, on the service's clock, s; only failures are.
    """

    outcome: CompiledGrammar | GrammarError
    compile_ms: float
    expires: float = math.inf

    @property
    def memory_bytes(self) -> int:
        """By the engine's own figure; 0 for a failure and where the engine has none."""
        return 0 if isinstance(self.outcome, GrammarError) else self.outcome.memory_bytes


class GrammarCache:
    """Least recently used entries go first; the newest one stays, however large it is.

    Args:
        max_bytes: of all compiled grammars, by their engines' own figures (V1.6c).
        max_entries: grammars and failures; the bound for engines that have no figure.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._entries: OrderedDict[GrammarSpec, Entry] = OrderedDict()
        self.memory_bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: GrammarSpec, now: float) -> Entry | None:
        """The entry of ``key``, which is now the last to go; None = none, or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires <= now:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def keep(self, key: GrammarSpec, entry: Entry) -> None:
        """Add an entry and evict what no longer fits."""
        self._drop(key)
        self._entries[key] = entry
        self.memory_bytes += entry.memory_bytes
        while len(self) > 1 and (
            self.memory_bytes > self._max_bytes or len(self) > self._max_entries
        ):
            self._drop(next(iter(self._entries)))
            self.evicted += 1

    def _drop(self, key: GrammarSpec) -> None:
        if entry := self._entries.pop(key, None):
            self.memory_bytes -= entry.memory_bytes
