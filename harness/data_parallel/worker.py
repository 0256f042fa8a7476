"""A process of a data-parallel run: what it does, and what it says to the one that started it."""

from __future__ import annotations

import traceback
from collections.abc import Set
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple

from harness.config import Config
from harness.core import RequestTrace, StepTrace
from harness.data_parallel.shard import Shard
from harness.errors import HarnessError, named
from harness.results.journal import Entry
from harness.results.record import Recorder
from harness.results.viewer.tokens import TokenTexts
from harness.run import Run

Command = Literal["warm_up", "go"]
"""A method of ``Run``."""


class Ready(NamedTuple):
    """The pair is loaded.

    Attributes:
        workload: stands for what is decoded, see ``Run.workload``.
        strategies: their names, in the order of their turns.
        items: ids of the whole workload, in its order.
        mine: ids of this process's part.
        setup: see ``Run.setup``.
        texts: of all tokens.
    """

    workload: str
    strategies: list[str]
    items: list[str]
    mine: list[str]
    setup: dict[str, Any]
    texts: TokenTexts


class Finished(NamedTuple):
    """A command is done.

    Attributes:
        facts: see ``Run.facts``.
        wall_s: time that it took.
        cpu_s: time that all threads of the process spent on cores meanwhile.
    """

    facts: dict[str, Any]
    wall_s: float
    cpu_s: float


class Failure(NamedTuple):
    """The process has ended, for this reason: one line."""

    reason: str


Message = Ready | Entry | Finished | Failure


class Outbox(Recorder):
    """Hands each request over as it ends, with its steps, and keeps none."""

    def __init__(self, done: Set[tuple[str, str]], connection: Connection) -> None:
        super().__init__()
        self._done, self._connection = set(done), connection
        self._steps: dict[tuple[str, str], list[StepTrace]] = {}

    @property
    def done(self) -> set[tuple[str, str]]:
        """Strategy and id of each request that had ended before this process began."""
        return self._done

    def step(self, trace: StepTrace) -> None:
        """See ``Recorder``."""
        self._steps.setdefault((trace.strategy, trace.request), []).append(trace)

    def finished(self, trace: RequestTrace) -> None:
        """See ``Recorder``.

        Raises:
            ConnectionError: nobody listens any more.
        """
        steps = self._steps.pop((trace.strategy, trace.request), [])
        self._connection.send(Entry(trace, steps))


def work(connection: Connection, config: Config, shard: Shard, done: Set[tuple[str, str]]) -> None:
    """The life of a process: load the pair, then do each command that comes, until none can.

    Args:
        connection: to the one that started it; takes ``Command``, gives ``Message``.
        config: of the run, with this process's device.
        shard: its part.
        done: strategy and id of each request that has ended before.
    """
    try:
        run = Run(config, Outbox(done, connection), lambda _: None, shard)
        connection.send(
            Ready(
                run.workload,
                run.names,
                [item.id for item in run.items],
                run.mine,
                run.setup(),
                run.vocabulary(),
            )
        )
        while True:
            command: Command = connection.recv()
            wall_s, cpu_s = perf_counter(), process_time()
            run.go() if command == "go" else run.warm_up()
            wall_s, cpu_s = perf_counter() - wall_s, process_time() - cpu_s
            connection.send(Finished(run.facts(), wall_s, cpu_s))
    except (EOFError, ConnectionError) as error:
        # The one that started it is gone, or has had enough, and hears nothing; or it is another
        # file or line that has ended, of a strategy's, say.
        _tell(connection, named(error))
    except HarnessError as error:
        _tell(connection, str(error))
    except Exception as error:
        traceback.print_exc()
        _tell(connection, named(error))


def _tell(connection: Connection, reason: str) -> None:
    with suppress(ConnectionError):
        connection.send(Failure(reason))
