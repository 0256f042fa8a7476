"""Runs cases in processes that can be killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch

from experiments.faults.cases import CRASH, HANG, Case, Outcome, Runner
from experiments.study import failure

CONTEXT = get_context("forkserver")
PRELOADED = ["experiments.faults.kinds", "harness.cli", "harness.results.report"]
"""Imported once, by the process that all others are forked from."""


POLL_S = 1.0
"""How often processes are looked at that say nothing."""


@dataclass
class Worker:
    """A process and the case that it is given.

    Attributes:
        case: the case; None = it waits for one.
        since: when it got that.
    """

    process: ForkServerProcess
    pipe: Connection
    case: Case | None = None
    since: float = 0.0

    @classmethod
    def start(cls, runner: str) -> Worker:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(theirs, runner))
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, case: Case) -> None:
        self.case, self.since = case, time.monotonic()
        self.pipe.send(case)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def campaign(
    cases: Iterable[Case], processes: int, limit_s: Callable[[Case], float], runner: str
) -> Iterator[Outcome]:
    """Run cases, a few at a time; outcomes come as they are known.

    A process that dies is a crash, one that takes too long a hang; both cost just the case. A
    process that a case leaves threads in, stuck inside an engine, gets no other one.

    Args:
        cases: to run.
        processes: at once.
        limit_s: how long each may take.
        runner: ``module:function`` that runs one.
    """
    CONTEXT.set_forkserver_preload(PRELOADED)
    left = iter(cases)
    workers: list[Worker] = []
    try:
        while True:
            _employ(workers, left, processes, runner)
            busy = [worker for worker in workers if worker.case is not None]
            if not busy:
                return
            wait([each.pipe for each in busy], POLL_S)
            for worker in busy:
                outcome = _outcome(worker, limit_s)
                if outcome is None:
                    continue
                worker.case = None
                if outcome.stuck or HANG in outcome.violations or CRASH in outcome.violations:
                    worker.end()
                    workers.remove(worker)
                yield outcome
    finally:
        for worker in workers:
            worker.end()


def _employ(workers: list[Worker], left: Iterator[Case], processes: int, runner: str) -> None:
    """Give a case to each process that waits for one, and start those that are missing."""
    idle = [worker for worker in workers if worker.case is None]
    for _ in range(len(idle) + processes - len(workers)):
        case = next(left, None)
        if case is None:
            return
        if idle:
            worker = idle.pop()
        else:
            worker = Worker.start(runner)
            workers.append(worker)
        worker.give(case)


def _outcome(worker: Worker, limits: Callable[[Case], float]) -> Outcome | None:
    """What came of a process's case; None = nothing yet."""
    assert worker.case is not None
    seconds, limit_s = time.monotonic() - worker.since, limits(worker.case)
    if worker.pipe.poll():
        try:
            outcome: Outcome = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            death = f"the process died (exit status {worker.process.exitcode})"
            outcome = Outcome(str(worker.case), violations={CRASH: death})
    elif seconds > limit_s:
        hang = f"still running after {limit_s:g} s"
        outcome = Outcome(str(worker.case), violations={HANG: hang})
    else:
        return None
    outcome.seconds = seconds
    return outcome


def _serve(pipe: Connection, runner: str) -> None:
    """The life of a process."""
    torch.set_num_threads(1)
    module, _, function = runner.partition(":")
    run: Runner = getattr(import_module(module), function)
    while True:
        case: Case = pipe.recv()
        try:
            outcome = run(case)
        except Exception as error:  # of the campaign itself
            outcome = Outcome(str(case), violations={CRASH: failure(error)})
        pipe.send(outcome)
