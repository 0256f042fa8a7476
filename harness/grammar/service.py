"""From a grammar spec to a compiled grammar: validated first, compiled once, off the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from time import monotonic

from harness.errors import ConfigError, GrammarError, check_timeout
from harness.grammar.auto import AutoEngine
from harness.grammar.cache import Entry, GrammarCache
from harness.grammar.canonical import canonical
from harness.grammar.compilation import MAX_STUCK, Compilation, CompilePool
from harness.grammar.llguidance import LLGuidanceEngine
from harness.grammar.matcher import (
    WHITESPACES,
    CompiledGrammar,
    GrammarEngine,
    TokenTable,
    Whitespace,
)
from harness.grammar.outlines import OutlinesEngine
from harness.grammar.spec import GrammarSpec
from harness.grammar.xgrammar import XGrammarEngine

ENGINES: dict[str, type[GrammarEngine]] = {
    engine.name: engine for engine in (XGrammarEngine, LLGuidanceEngine, OutlinesEngine, AutoEngine)
}


@dataclass
class GrammarConfig:
    """Who compiles grammars, and how (config group ``grammar``).

    Attributes:
        engine: xgrammar, llguidance, outlines, or auto: the first of xgrammar and llguidance
            that takes the grammar.
        whitespace: between JSON tokens: ``compact``, ``minimal`` or ``free``, see ``Whitespace``.
        ahead: compile the grammars of all requests before the first one is decoded. Which
            requests share a batch then depends on no clock, and no strategy of a comparison pays
            for what the next one finds in the cache. If false, as in a serving engine: requests
            wait for their grammars while others are decoded.
        threads: that compile at once; 0 = half of the cores (V1.6a).
        timeout_s: how long one compilation may take (D4); its request fails, and no other.
        retry_s: how long a failure is remembered, so that it is not compiled again (S3e, S3f);
            0 = not at all (V1.6b).
        cache_mb: bound of the compiled grammars, by the engines' own figures (V1.6c). Only
            xgrammar has one.
        cache_grammars: bound of their number.
    """

    engine: str = "xgrammar"
    whitespace: str = "compact"
    ahead: bool = True
    threads: int = 0
    timeout_s: float = 20.0
    retry_s: float = 600.0
    cache_mb: int = 512
    cache_grammars: int = 4096

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACES:
            raise ConfigError(
                f"grammar.whitespace: {self.whitespace!r} is none of {', '.join(WHITESPACES)}"
            )
        check_timeout("grammar.timeout_s", self.timeout_s)
        for name, least in {"threads": 0, "retry_s": 0, "cache_mb": 0, "cache_grammars": 1}.items():
            if not getattr(self, name) >= least:  # nor is nan
                raise ConfigError(
                    f"grammar.{name}: {getattr(self, name)} is below {least}; raise it"
                )


def grammar_engine(
    name: str, table: TokenTable, whitespace: Whitespace = "compact"
) -> GrammarEngine:
    """The engine called ``name``, for one vocabulary.

    Raises:
        ConfigError: there is no such engine, or its package is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"grammar.engine: {name!r} is unknown; use one of {', '.join(ENGINES)}")
    return ENGINES[name](table, whitespace)


@dataclass(slots=True)
class CompileCounts:
    """What a service has done so far.

    Attributes:
        compiled: compilations that an engine finished.
        failed: those that ended in an error, time-outs included.
        timed_out: those that were given up on.
        hits: times that a grammar was there already.
        failed_hits: times that a failure was.
    """

    compiled: int = 0
    failed: int = 0
    timed_out: int = 0
    hits: int = 0
    failed_hits: int = 0


class GrammarService:
    """Compiles each grammar once, on threads of its own.

    ``start`` begins, ``ready`` asks, ``wait`` and ``finish`` wait, and ``compile`` takes what came
    of it. Specs of one canonical key share all of that, also while it is under way (S3a, S3b).
    One thread uses a service.

    Args:
        engine: compiles.
        config: its limits; those that belong to the engine are not read.
        now: the time, s, that expiry and time-outs go by.

    Attributes:
        counts: statistics.
        cache: what is kept.
    """

    def __init__(
        self,
        engine: GrammarEngine,
        config: GrammarConfig | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.engine = engine
        self.config = config or GrammarConfig()
        self.counts = CompileCounts()
        self.cache = GrammarCache(self.config.cache_mb * 2**20, self.config.cache_grammars)
        self._now = now
        self._pool = CompilePool(self.config.threads or max(1, ((os.cpu_count() or 1) + 1) // 2))
        self._under_way: dict[GrammarSpec, Compilation] = {}

    def start(self, spec: GrammarSpec) -> None:
        """Have ``spec`` compiled, unless it is, or is about to be. Returns at once."""
        key = canonical(spec)
        if key in self._under_way or self.cache.find(key, self._now()):
            return
        compilation = Compilation(key, self.engine, self._now)
        self._under_way[key] = compilation
        if self._pool.full:
            self._refuse(compilation)
        else:
            self._pool.submit(compilation)

    def ready(self, spec: GrammarSpec) -> bool:
        """Whether ``compile`` would return, or raise, at once."""
        self.start(spec)
        compilation = self._under_way.get(canonical(spec))
        if compilation is None:
            return True
        self._give_up_late(compilation)
        return compilation.done.done()

    def first_ready(self, specs: Iterable[GrammarSpec | None]) -> int | None:
        """Index of the first that nothing has to be waited for; that there is none is ready."""
        ready = (i for i, spec in enumerate(specs) if spec is None or self.ready(spec))
        return next(ready, None)

    def wait(self, specs: Iterable[GrammarSpec]) -> None:
        """Return as soon as one of ``specs`` is ready."""
        specs = list(specs)
        while not any(self.ready(spec) for spec in specs):
            wait(
                [self._under_way[canonical(spec)].done for spec in specs],
                timeout=self._until_the_next_time_out(),
                return_when=FIRST_COMPLETED,
            )
            for compilation in self._under_way.values():  # one may block the queue
                self._give_up_late(compilation)

    def finish(self, specs: Iterable[GrammarSpec]) -> None:
        """Return when all of ``specs`` have been compiled, or have failed."""
        specs = list(dict.fromkeys(specs))
        for spec in specs:
            self.start(spec)
        for spec in specs:
            self._entry(spec)

    def compile(self, spec: GrammarSpec) -> tuple[CompiledGrammar, float]:
        """The compiled grammar, waited for if need be, and the time that it took, ms.

        Whoever asks first is told the time; later it is 0.0.

        Raises:
            GrammarError: the spec is invalid, the engine refuses it, or it took too long.
        """
        entry = self._entry(spec)
        if isinstance(entry.outcome, GrammarError):
            raise GrammarError(str(entry.outcome))
        compile_ms, entry.compile_ms = entry.compile_ms, 0.0
        return entry.outcome, compile_ms

    def _entry(self, spec: GrammarSpec) -> Entry:
        """What came of ``spec``, from now on in the cache."""
        key = canonical(spec)
        while True:
            self.wait([spec])
            if compilation := self._under_way.pop(key, None):
                return self._keep(key, compilation.done.result())
            if entry := self.cache.find(key, self._now()):  # else it has just expired
                failed = isinstance(entry.outcome, GrammarError)
                self.counts.failed_hits += failed
                self.counts.hits += not failed
                return entry

    def _keep(self, key: GrammarSpec, entry: Entry) -> Entry:
        if not isinstance(entry.outcome, GrammarError):
            self.counts.compiled += 1
            self.cache.keep(key, entry)
            return entry
        self.counts.failed += 1
        entry.expires = min(entry.expires, self._now() + self.config.retry_s)
        if entry.expires > self._now():
            self.cache.keep(key, entry)
        return entry

    def _give_up_late(self, compilation: Compilation) -> None:
        """Fail a compilation that takes too long. Its time counts from when a thread took it: one
        that is queued behind a slow one is not to blame (D4 counts from the submission)."""
        limit = self.config.timeout_s
        if compilation.started is None or self._now() - compilation.started < limit:
            return
        error = GrammarError(
            f"grammar.{compilation.spec.kind}: not compiled within {limit:g} s; simplify it or "
            "raise grammar.timeout_s"
        )
        assert compilation.worker is not None, "what has started has a thread"
        if compilation.settle(Entry(error, limit * 1e3)):
            self.counts.timed_out += 1
            self._pool.give_up(compilation.worker)
        if self._pool.full:
            for queued in self._under_way.values():
                if queued.started is None:
                    self._refuse(queued)

    def _refuse(self, compilation: Compilation) -> None:
        """Fail what has no thread left to compile it. That is no fault of its own: it is forgotten
        at once, and may be asked for again."""
        error = GrammarError(
            f"grammar.{compilation.spec.kind}: not compiled, {MAX_STUCK} compilations before it "
            "were given up on and still run; simplify their grammars or start anew"
        )
        compilation.settle(Entry(error, 0.0, expires=self._now()))

    def _until_the_next_time_out(self) -> float:
        now = self._now()
        started = [
            each.started
            for each in self._under_way.values()
            if each.started is not None and not each.done.done()
        ]
        return max(0.0, min(started, default=now) + self.config.timeout_s - now)
