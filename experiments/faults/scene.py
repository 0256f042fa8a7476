"""Decodes a victim among its neighbours, and the neighbours alone, and compares."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.faults.cases import (
    CHANGED,
    CRASH,
    ISOLATED,
    LOST,
    OTHER,
    SERVED,
    Case,
    Draw,
    Outcome,
)
from experiments.study import failure
from harness.core import Finish, Request, Sequence as Decoded
from tests.toys import Toy, Watch

VICTIM = "victim"
"""How the ids of requests with a fault begin; all others are neighbours."""

LEAVE_S = 3.0
"""How long threads may take to end once nothing needs them."""


@dataclass(frozen=True)
class Scene:
    """Requests and who decodes them.

    Attributes:
        draw: the settings.
        toy: decodes, with a fault where a victim is concerned.
        requests: victims and neighbours, in this order.
        fault: in words.
    """

    draw: Draw
    toy: Toy
    requests: Sequence[Request]
    fault: str

    @property
    def neighbours(self) -> list[Request]:
        return [each for each in self.requests if not each.id.startswith(VICTIM)]

    def decode(self, requests: Sequence[Request]) -> tuple[Watch, int]:
        """On fresh models; with it, how many compilations were given up on."""
        strategy = self.toy.strategy(self.draw.strategy, **self.draw.options)
        watch, loop = self.toy.loop(strategy)
        loop.run(requests)
        return watch, loop.grammars.counts.timed_out


def play(case: Case, scene: Scene) -> tuple[Outcome, list[Decoded]]:
    """Decode, compare, and say what was violated.

    Returns:
        What came of the case, and the victims as far as they got.
    """
    outcome, victims = Outcome(str(case), f"{scene.draw}; {scene.fault}"), []
    before, given_up = set(threading.enumerate()), 0
    gc.freeze()  # what is older than the case need not be walked to collect what the case left
    try:
        alone, _ = scene.decode(scene.neighbours)
        mixed, given_up = scene.decode(scene.requests)
    except Exception as error:  # what leaves the loop ends the whole batch
        outcome.violations[CRASH] = failure(error)
        del error
    else:
        victims = [each for name, each in mixed.done.items() if name.startswith(VICTIM)]
        outcome.violations |= _harm(scene, alone, mixed)
        outcome.violations |= _unexplained(scene, victims)
        reasons = [each.error for each in victims if each.error]
        outcome.ending = ISOLATED if reasons else SERVED
        outcome.reason = reasons[0] if reasons else ""
    outcome.stuck = _threads_left(before)
    gc.unfreeze()
    if outcome.stuck > given_up:
        outcome.violations[OTHER] = f"{outcome.stuck} threads are left, {given_up} may be stuck"
    return outcome, victims


def _harm(scene: Scene, alone: Watch, mixed: Watch) -> dict[str, str]:
    """What happened to the neighbours."""
    found = {}
    for request in scene.neighbours:
        name = request.id
        if name not in mixed.done:
            found[LOST] = f"{name} did not finish"
        elif mixed.done[name].error != alone.done[name].error:
            found[LOST] = f"{name}: {mixed.done[name].error}"
        elif mixed.outputs[name] != alone.outputs[name]:
            found[CHANGED] = f"{name}: {mixed.outputs[name]} instead of {alone.outputs[name]}"
    return found


def _unexplained(scene: Scene, victims: Sequence[Decoded]) -> dict[str, str]:
    """A victim that is missing, or whose failure has no reason."""
    if len(victims) + len(scene.neighbours) != len(scene.requests):
        return {LOST: "a victim did not finish"}
    if any((each.finish is Finish.FAILED) != bool(each.error) for each in victims):
        return {OTHER: "a victim failed without a reason, or has one and did not fail"}
    return {}


def _threads_left(before: set[threading.Thread]) -> int:
    """Threads that were not there before and do not end."""
    gc.collect()
    deadline = time.monotonic() + LEAVE_S
    while left := [each for each in threading.enumerate() if each not in before]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return len(left)
