"""The ranks of a study: started and led by one process, as ``torchrun`` would start them."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from weakref import finalize

import pandas as pd

from harness.config import Config
from harness.data_parallel.workers import CONTEXT, Worker
from harness.errors import HarnessError, RanksError, named
from harness.parallel.launch import join
from harness.parallel.ranks import Ranks
from harness.results.record import Recorder
from harness.run import Run


@dataclass(frozen=True)
class Pass:
    """All requests, decoded once, as one rank saw it.

    Attributes:
        steps, requests: its rows.
        agree_us: by strategy, what the ranks took to compare where they stand, µs.
    """

    steps: pd.DataFrame
    requests: pd.DataFrame
    agree_us: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """A rank has ended, for this reason: one line."""

    reason: str


class RankPool:
    """``engine.tp`` processes with the pair loaded, which decode when they are told to.

    Args:
        config: of the run.

    Attributes:
        close: end the processes, whatever they do.

    Raises:
        RanksError: one cannot serve the config, or has died.
    """

    def __init__(self, config: Config) -> None:
        self._ranks: list[Worker] = []
        self.close = finalize(self, _end, self._ranks)
        port = _free_port()
        for number in range(config.engine.tp):
            ours, theirs = CONTEXT.Pipe()
            given = theirs, config, number, port
            process = CONTEXT.Process(target=work, args=given, daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed
            self._ranks.append(Worker(process, ours))
        self._replies()

    def decode(self) -> list[Pass]:
        """Decode all requests once; returns what each rank tells, by rank.

        Raises:
            RanksError: one has failed or died.
        """
        for rank in self._ranks:
            with suppress(ConnectionError):  # that it is gone, its end of the line says
                rank.connection.send("decode")
        return [each for each in self._replies() if isinstance(each, Pass)]

    def _replies(self) -> list[Pass | Failure | None]:
        replies = [_receive(rank) for rank in self._ranks]
        failures = {i: each.reason for i, each in enumerate(replies) if isinstance(each, Failure)}
        if failures:
            self.close()
            raise RanksError("; ".join(f"rank {i}: {reason}" for i, reason in failures.items()))
        return replies


def work(connection: Connection, config: Config, number: int, port: int) -> None:
    """The life of a rank: load the pair, say so, then decode whenever it is told to.

    Args:
        connection: to the process that leads.
        config: of the run.
        number: of this rank.
        port: where all meet.
    """
    if config.engine.tp > 1:
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(config.engine.tp),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    try:
        ranks = join(config.engine.tp, config.engine.tp_timeout_s, config.pair.device)
        recorder = Recorder()
        with ranks.together():
            run = Run(config, recorder, lambda _: None, ranks=ranks)
        connection.send(None)
        while True:
            connection.recv()
            connection.send(_decode(run, recorder, ranks))
    except (EOFError, ConnectionError) as error:
        # The one that leads is gone, or has had enough, and hears nothing; or it is another file
        # or line that has ended, of a strategy's, say.
        _tell(connection, named(error))
    except HarnessError as error:
        _tell(connection, str(error))
    except Exception as error:
        traceback.print_exc()
        _tell(connection, named(error))


def _decode(run: Run, recorder: Recorder, ranks: Ranks) -> Pass:
    """All requests, strategies in turn, as ``Run.go`` takes them; but again and again."""
    recorder.steps.clear()
    recorder.requests.clear()
    ranks.clock.take()
    turn = run.config.engine.turn
    agree_us = dict.fromkeys(run.names, 0.0)
    for start in range(0, len(run.requests), turn):
        for loop in run.loops:
            loop.run(run.requests[start : start + turn])
            agree_us[loop.strategy.name] += ranks.clock.take().get("agree", 0.0)
    steps, requests = recorder.frames()
    return Pass(steps, requests, agree_us)


def _receive(rank: Worker) -> Pass | Failure | None:
    """The next reply; of a process that died, that it did."""
    try:
        reply: Pass | Failure | None = rank.connection.recv()
    except (EOFError, OSError):
        rank.process.join()
        return Failure(f"its process ended with exit status {rank.process.exitcode}")
    return reply


def _tell(connection: Connection, reason: str) -> None:
    with suppress(ConnectionError):
        connection.send(Failure(reason))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _end(ranks: Sequence[Worker]) -> None:
    for rank in ranks:
        rank.process.kill()  # one that waits for its GPU hears nothing else
    for rank in ranks:
        rank.process.join()
        rank.connection.close()
