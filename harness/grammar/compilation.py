"""Compiling off the loop's thread.

The engines release Python's lock while they compile (xgrammar 0.2.9, llguidance 1.9.1,
outlines-core 0.2.14), so what runs meanwhile goes on; validation and conversion hold it.
A thread inside an engine cannot be stopped. One whose compilation is given up on is replaced at
once, and ends when the engine returns. All are daemon threads, so one that never does keeps no
process alive. Each takes a core and memory until then: where ``MAX_STUCK`` of them are, nothing
more is compiled until one comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from weakref import finalize

from harness.clock import Clock
from harness.errors import GrammarError
from harness.grammar.cache import Entry
from harness.grammar.matcher import CompiledGrammar, GrammarEngine
from harness.grammar.spec import GrammarSpec
from harness.grammar.validation import validate

MAX_STUCK = 8
"""Threads that may be inside an engine, with a compilation that was given up on, at a time."""

JOIN_S = 2.0
"""How long the end of a pool waits for a compilation under way. A thread that came out of an
engine while the interpreter is being taken down would be ended inside foreign code."""


class Compilation:
    """One grammar on its way through an engine.

    Attributes:
        spec: what is compiled.
        done: settled with an ``Entry`` once, by the thread that compiles or by who gave it up.
        started: when a thread took it, s; None = it is queued.
        worker: that thread.
    """

    def __init__(self, spec: GrammarSpec, engine: GrammarEngine, now: Callable[[], float]) -> None:
        self.spec = spec
        self.done: Future[Entry] = Future()
        self.started: float | None = None
        self.worker: Thread | None = None
        self._engine, self._now = engine, now

    def settle(self, entry: Entry) -> bool:
        """Set what came of it; False if that is decided already (a late result: S3f)."""
        with suppress(InvalidStateError):
            self.done.set_result(entry)
            return True
        return False

    def run(self) -> bool:
        """Compile, unless it was refused in the queue; False if it was given up on meanwhile."""
        if self.done.done():
            return True
        self.worker, self.started = current_thread(), self._now()
        with Clock().span("compile") as span:
            outcome = self._outcome()
        return self.settle(Entry(outcome, span.us / 1e3))

    def _outcome(self) -> CompiledGrammar | GrammarError:
        """Whatever an engine raises, a panic in Rust included, is this grammar's failure (S3e)."""
        try:
            validate(self.spec)
            return self._engine.compile(self.spec)
        except GrammarError as error:
            return error
        except BaseException as error:
            name = type(error).__name__
            return GrammarError(
                f"grammar.{self.spec.kind}: {self._engine.name} failed ({name}: {error})"
            )


class CompilePool:
    """Daemon threads that compile, made when there is work for them.

    Args:
        threads: that compile at once (V1.6a: half of the cores).

    Attributes:
        workers: the threads that were started and have not ended, as far as is known.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._inbox: SimpleQueue[Compilation | None] = SimpleQueue()
        self._given_up: list[Thread] = []
        self.workers: list[Thread] = []
        finalize(self, _dismiss, self._inbox, self.workers)

    @property
    def full(self) -> bool:
        """As many threads are stuck as may be."""
        return self._stuck() >= MAX_STUCK

    def submit(self, compilation: Compilation) -> None:
        """Compile this, behind what was submitted before."""
        self._inbox.put(compilation)
        self._add()

    def give_up(self, worker: Thread) -> None:
        """Put another thread in the place of one that takes too long, unless the pool is full."""
        self._given_up.append(worker)
        if not self.full:
            self._add()

    def _stuck(self) -> int:
        """How many threads were given up on and have not come back."""
        self._given_up[:] = [each for each in self._given_up if each.is_alive()]
        return len(self._given_up)

    def _add(self) -> None:
        """One more thread, if fewer compile than should."""
        self.workers[:] = [each for each in self.workers if each.is_alive()]
        number = len(self.workers)
        if number - self._stuck() >= self._threads:
            return
        worker = Thread(target=_work, args=(self._inbox,), name=f"compile-{number}", daemon=True)
        self.workers.append(worker)
        worker.start()


def _work(inbox: SimpleQueue[Compilation | None]) -> None:
    """The life of a thread: until its pool is gone, or another has taken its place."""
    for compilation in iter(inbox.get, None):
        if not compilation.run():
            return
        del compilation  # else the last grammar would live until the next one


def _dismiss(inbox: SimpleQueue[Compilation | None], workers: list[Thread]) -> None:
    for _ in workers:
        inbox.put(None)
    for worker in workers:
        if worker is not current_thread():  # which may be the one that collects the pool
            worker.join(JOIN_S / len(workers))
