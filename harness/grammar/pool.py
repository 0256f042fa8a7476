"""Grammar work of a batch on several threads.

The engines release Python's lock while they fill a mask, and xgrammar while it accepts as well
(xgrammar 0.2.9, llguidance 1.9.1); what stands around their calls holds it. So threads can help
only as far as the engines' own time goes; ``experiments/grammar_threads.py`` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread, current_thread
from weakref import finalize

from harness.clock import Clock
from harness.core import Sequence
from harness.errors import ConfigError
from harness.grammar.tracked import TrackedMatcher
from harness.step import isolate

Job = tuple[int, Sequence, TrackedMatcher]
"""Index in the batch, sequence, and its matcher: what ``Step.constrained`` yields."""

Work = Callable[[int, Sequence, TrackedMatcher], object]
"""What is done for one sequence, with no regard to the others."""

Share = tuple[Iterator[Job], Work, "SimpleQueue[BaseException | None]"]
"""A batch as its helpers get it: jobs left, what to do, and where to report each one done (None)
or what stopped the helper."""


class GrammarPool:
    """Runs one job per sequence of a batch: on threads that live as long as the pool, and here.

    Nothing is handed over with one thread, the default, or one job. An engine's call is short
    (microseconds for schemas of BFCL and JSONSchemaBench), so a job gives Python's lock away a
    dozen times, for less than handing it over costs; slower grammars may gain by more threads.

    Args:
        threads: that work at once, the calling one included.
        clock: where the calling thread's time goes.

    Raises:
        ConfigError: ``threads`` is below 1.
    """

    def __init__(self, threads: int, clock: Clock) -> None:
        if threads < 1:
            raise ConfigError(f"engine.grammar_threads: {threads} is below 1; raise it")
        self.threads = threads
        self._clock = clock
        self._inbox: SimpleQueue[Share | None] = SimpleQueue()
        helpers = [
            Thread(target=_help, args=(self._inbox,), name=f"grammar-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for helper in helpers:
            helper.start()
        finalize(self, _dismiss, self._inbox, helpers)

    def each(self, jobs: Iterable[Job], work: Work) -> None:
        """Do ``work`` for every job, in any order, and return when all is done.

        An exception of one ends its own sequence (``harness.step.isolate``); what is no
        ``Exception``, such as an interrupt or a panic in Rust, is raised here. The whole is one
        ``grammar`` span, so its wall time counts however many threads worked.
        """
        with self._clock.span("grammar"):
            if self.threads == 1:
                for index, sequence, matcher in jobs:
                    with isolate(sequence):
                        work(index, sequence, matcher)
                return
            jobs = list(jobs)
            done: SimpleQueue[BaseException | None] = SimpleQueue()
            share = iter(jobs), work, done
            for _ in range(min(self.threads, len(jobs)) - 1):
                self._inbox.put(share)
            try:
                _work_off(share)
            except BaseException as error:
                done.put(error)
            left = len(list(share[0]))  # behind an error here: now nobody takes them
            outcomes = [done.get() for _ in range(len(jobs) - left)]
        for outcome in outcomes:
            if outcome is not None:
                raise outcome


def _work_off(share: Share) -> None:
    """Take jobs until none is left.

    ``next`` of a list's iterator is atomic under Python's lock, so threads can share one.
    """
    left, work, done = share
    for index, sequence, matcher in left:
        with isolate(sequence):
            work(index, sequence, matcher)
        done.put(None)


def _help(inbox: SimpleQueue[Share | None]) -> None:
    """The life of a helper; a batch that others have finished has no jobs left for it."""
    for share in iter(inbox.get, None):
        try:
            _work_off(share)
        except BaseException as error:
            share[-1].put(error)
        del share  # else the batch, and all that it refers to, would live until the next one


def _dismiss(inbox: SimpleQueue[Share | None], helpers: list[Thread]) -> None:
    """End the helpers with their pool, or before the interpreter ends, which would kill them
    where they stand, inside an engine's code or not."""
    for _ in helpers:
        inbox.put(None)
    for helper in helpers:
        if helper is not current_thread():  # which may be the one that collects the pool
            helper.join()
