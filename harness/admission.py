"""Requests that are not in a slot yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from harness.core import Request
from harness.grammar.matcher import CompiledGrammar, GrammarEngine
from harness.grammar.service import GrammarConfig
from harness.grammar.spec import GrammarSpec

LOOKAHEAD = 4
"""Grammars are compiled for as many requests at the queue's head as this times the slots: enough
to have the next ones ready, and a bound of what is compiled but not yet used."""


class Grammars(Protocol):
    """What the loop asks of ``GrammarService``; under tensor parallelism, of all ranks' ones."""

    @property
    def engine(self) -> GrammarEngine: ...

    @property
    def config(self) -> GrammarConfig: ...

    def start(self, spec: GrammarSpec) -> None: ...

    def first_ready(self, specs: Iterable[GrammarSpec | None]) -> int | None: ...

    def wait(self, specs: Iterable[GrammarSpec]) -> None: ...

    def finish(self, specs: Iterable[GrammarSpec]) -> None: ...

    def compile(self, spec: GrammarSpec) -> tuple[CompiledGrammar, float]: ...


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    Attributes:
        request: the request.
        spec: the grammar that it waits for, if it waits for one.
        delay_ms: time in which a slot was free for it, but its grammar not ready; with it, its
            time to the first token begins.
    """

    request: Request
    spec: GrammarSpec | None
    delay_ms: float = 0.0


class Admission:
    """The queue in front of the slots: first come, first served, among those that are ready.

    A request whose grammar is not compiled yet takes no slot and holds back nobody behind it
    (V1.6b, S3b, D5).

    Args:
        grammars: compiles.
        constrained: grammars are used at all.
        slots: of the engine.
    """

    def __init__(self, grammars: Grammars, constrained: bool, slots: int) -> None:
        self._grammars, self._constrained = grammars, constrained
        self._window = LOOKAHEAD * slots
        self._head: list[Waiting] = []  # in order; their grammars are asked for
        self._tail: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests behind those that wait; with ``grammar.ahead`` return when all their
        grammars are compiled."""
        added = [
            Waiting(request, request.grammar if self._constrained else None) for request in requests
        ]
        if self._grammars.config.ahead:
            self._grammars.finish(each.spec for each in added if each.spec is not None)
        self._tail.extend(added)

    def look_ahead(self) -> None:
        """Have the grammars of the queue's head compiled."""
        while self._tail and len(self._head) < self._window:
            waiting = self._tail.popleft()
            if waiting.spec is not None:
                self._grammars.start(waiting.spec)
            self._head.append(waiting)

    def next_ready(self) -> Waiting | None:
        """Take out the first request that can go into a slot now, if there is one."""
        self.look_ahead()
        index = self._grammars.first_ready(waiting.spec for waiting in self._head)
        return None if index is None else self._head.pop(index)

    def wait(self) -> None:
        """Return when a request of the queue's head is ready."""
        if not any(waiting.spec is None for waiting in self._head):
            self._grammars.wait(each.spec for each in self._head if each.spec is not None)

    def delay(self, ms: float, free: int) -> None:
        """Count time in which ``free`` slots were: the first requests could have had them."""
        for waiting in self._head[:free]:
            waiting.delay_ms += ms
