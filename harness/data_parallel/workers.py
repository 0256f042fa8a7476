"""The processes of a data-parallel run, from the one that started them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, Signals, pthread_sigmask
from typing import Any, NamedTuple
from weakref import finalize

from harness.config import Config
from harness.data_parallel.shard import Shard, devices, share_of
from harness.data_parallel.worker import Command, Failure, Finished, Message, Ready, work
from harness.errors import HarnessError, ShardError
from harness.results.journal import Entry

CONTEXT: Any = multiprocessing.get_context("spawn")
"""Each process begins anew: one that was forked from a process with threads or CUDA is broken."""

Take = Callable[[int, Entry], None]
"""Called with a shard's index and each request that it has finished."""


class Worker(NamedTuple):
    """A process, and the line to it."""

    process: BaseProcess
    connection: Connection


class Workers:
    """As many processes as ``engine.dp`` says, with the pair loaded in each.

    Args:
        config: of the run.
        done: strategy and id of each request that has ended before.

    Attributes:
        devices: of each, by shard.
        ready: what each has told of itself, by shard.
        close: end the processes, whatever they do.

    Raises:
        HarnessError: a process cannot serve the config, or has died.
    """

    def __init__(self, config: Config, done: Set[tuple[str, str]]) -> None:
        self.devices = devices(config.pair.device, config.engine.dp)
        self._workers: list[Worker] = []
        self.close = finalize(self, _end, self._workers)
        with _deaf(), _known_start_method():
            for index, device in enumerate(self.devices):
                shard = Shard(index, len(self.devices))
                self._workers.append(_start(share_of(config, device), shard, done))
        try:
            replies = self._replies(_no_entry)
            _refuse(replies, HarnessError)
        except BaseException:
            self.close()
            raise
        self.ready = [each for each in replies if isinstance(each, Ready)]

    def do(self, command: Command, take: Take | None = None) -> list[Finished]:
        """Have all do the same, and return when the last is through. Another command may follow.
        An error or an interrupt ends the processes.

        Raises:
            ShardError: one failed or died. The others were let finish.
        """
        try:
            for worker in self._workers:
                with suppress(ConnectionError):  # that it is gone, its end of the line says
                    worker.connection.send(command)
            replies = self._replies(take or _no_entry)
            _refuse(replies, ShardError)
        except BaseException:
            self.close()
            raise
        return [each for each in replies if isinstance(each, Finished)]

    def _replies(self, take: Take) -> Sequence[Ready | Finished | Failure]:
        """The next reply of each, by shard; what has finished meanwhile is taken as it comes."""
        replies: dict[int, Ready | Finished | Failure] = {}
        while waiting := {
            worker.connection: index
            for index, worker in enumerate(self._workers)
            if index not in replies
        }:
            for connection in wait(list(waiting)):
                assert isinstance(connection, Connection)
                index = waiting[connection]
                message = _receive(self._workers[index])
                if isinstance(message, Entry):
                    take(index, message)
                else:
                    replies[index] = message
        return [replies[index] for index in range(len(self._workers))]


def _start(config: Config, shard: Shard, done: Set[tuple[str, str]]) -> Worker:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(
        target=work, args=(theirs, config, shard, done), name=f"shard {shard.index}", daemon=True
    )
    process.start()
    theirs.close()  # so that its end is noticed
    return Worker(process, ours)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start meanwhile never hear Ctrl-C, which a terminal sends to all: this
    one decides what becomes of them."""
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)


@contextmanager
def _known_start_method() -> Iterator[None]:
    """A process begins by choosing the start method of the one that starts it; in joblib's pool
    that is one of the pool's own, which a process outside of it has never heard of."""
    before = multiprocessing.get_start_method(allow_none=True)
    if before is None or before in multiprocessing.get_all_start_methods():
        yield
        return
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def _receive(worker: Worker) -> Message:
    """The next message; of a process that died, why."""
    try:
        message: Message = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        status = worker.process.exitcode or 0
        how = f"by {Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return Failure(f"its process ended {how}")
    return message


def _no_entry(index: int, entry: Entry) -> None:
    """Nothing is decoded now."""
    raise AssertionError(f"shard {index} has decoded {entry.request.request} unasked")


def _refuse(replies: Sequence[Message], error: type[HarnessError]) -> None:
    """Raise what has failed; all alike, as a run in one process would have said it."""
    failures = {i: each.reason for i, each in enumerate(replies) if isinstance(each, Failure)}
    if failures:
        raise error(_told(failures, len(replies)))


def _told(failures: Mapping[int, str], count: int) -> str:
    reasons = set(failures.values())
    if len(failures) == count and len(reasons) == 1:
        return reasons.pop()
    return "; ".join(f"shard {i} of {count}: {reason}" for i, reason in failures.items())


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join()
        worker.connection.close()
