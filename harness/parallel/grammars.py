"""Grammars that are ready when they are on all ranks, and failed when they failed on any."""

from __future__ import annotations

from collections.abc import Iterable
from time import sleep

from harness.errors import GrammarError
from harness.grammar.matcher import CompiledGrammar, GrammarEngine
from harness.grammar.service import GrammarConfig, GrammarService
from harness.grammar.spec import GrammarSpec
from harness.parallel.ranks import Ranks, common_reason

POLL_S = 0.002
"""Between two looks at compilations that nothing else can be done without."""


class AgreedGrammars:
    """What ``GrammarService`` offers the loop, with one answer for all ranks.

    All ranks must ask the same in the same order; the queue that asks is the same on all. No
    rank waits inside a collective while another compiles: each looks how far its own is, and
    they compare.

    Args:
        grammars: of this rank.
        ranks: all of them.
    """

    def __init__(self, grammars: GrammarService, ranks: Ranks) -> None:
        self._own, self._ranks = grammars, ranks

    @property
    def engine(self) -> GrammarEngine:
        return self._own.engine

    @property
    def config(self) -> GrammarConfig:
        return self._own.config

    def start(self, spec: GrammarSpec) -> None:
        """Have ``spec`` compiled, on every rank. Returns at once."""
        self._own.start(spec)

    def first_ready(self, specs: Iterable[GrammarSpec | None]) -> int | None:
        """Index of the first that no rank waits for."""
        ready = self._ready(specs)
        return ready.index(True) if True in ready else None

    def wait(self, specs: Iterable[GrammarSpec]) -> None:
        """Return as soon as one of ``specs`` is ready on all ranks."""
        specs = list(specs)
        while self.first_ready(specs) is None:
            sleep(POLL_S)

    def finish(self, specs: Iterable[GrammarSpec]) -> None:
        """Return when all of ``specs`` have been compiled, or have failed, on all ranks."""
        specs = list(dict.fromkeys(specs))
        for spec in specs:
            self.start(spec)
        while not all(self._ready(specs)):
            sleep(POLL_S)
        self._own.finish(specs)

    def compile(self, spec: GrammarSpec) -> tuple[CompiledGrammar, float]:
        """The compiled grammar and the time that it took on this rank, ms.

        Raises:
            GrammarError: it failed, on this rank or another.
        """
        self.wait([spec])
        outcome, reason = None, None
        try:
            outcome = self._own.compile(spec)
        except GrammarError as error:
            reason = str(error)
        if not all(self._ranks.everywhere([outcome is not None])):
            raise GrammarError(common_reason(self._ranks.gather(reason)))
        assert outcome is not None
        return outcome

    def _ready(self, specs: Iterable[GrammarSpec | None]) -> list[bool]:
        return self._ranks.everywhere([spec is None or self._own.ready(spec) for spec in specs])
