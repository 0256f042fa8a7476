"""How long a training is, and the learning rate on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """What ends a training: a number of steps, or a time.

    Attributes:
        steps: used where ``seconds`` is 0.
        seconds: of training, all calls together.
    """

    steps: int
    seconds: float

    def done(self, step: int, seconds: float) -> float:
        """The share of the training before step ``step``, 0 to 1."""
        return min(1.0, seconds / self.seconds if self.seconds else step / self.steps)


def rate(done: float, warm_up: float) -> float:
    """The learning rate as a share of its highest: a linear rise, then half a cosine to 0.

    Args:
        done: share of the training that is behind, 0 to 1.
        warm_up: share of it in which the rate rises.
    """
    if done < warm_up:
        return done / warm_up
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / max(1 - warm_up, 1e-9)))
