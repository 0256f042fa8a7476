"""Where a training stands, written now and then: another process goes on as this one would have."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.distill.student import Weights

TRAINING = "train"
"""Folder of a training."""
FILE = "checkpoint.pt"


@dataclass(slots=True)
class Point:
    """A point of one student's curve.

    Attributes:
        student: its name.
        step: steps done.
        tokens: that they held, without padding.
        seconds: of training.
        loss: mean divergence since the last point, nats.
        agreement: share of equal best tokens since the last point.
        held_out: that share by source of the held-out sequences.
    """

    student: str
    step: int
    tokens: int
    seconds: float
    loss: float
    agreement: float
    held_out: dict[str, float]


@dataclass(slots=True)
class Checkpoint:
    """All that a training needs to go on; its batches follow from the number of steps.

    Attributes:
        step, tokens, seconds: as in ``Point``.
        weights: by student, its own tensors, fp32.
        optimizers: by student, the states of its optimizers.
        sums: by student, fp32 ``[3]``: divergence, agreement and positions since the last point.
        curve: the points so far.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    weights: dict[str, Weights] = field(default_factory=dict)
    optimizers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    curve: list[Point] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint | None:
        """The last one of a training; None if there is none."""
        path = folder / FILE
        if not path.exists():
            return None
        values = torch.load(path, map_location="cpu", weights_only=True)
        return cls(**{**values, "curve": [Point(**point) for point in values["curve"]]})

    def write(self, folder: Path) -> None:
        """Replace the last one, all at once."""
        part = folder / f"{FILE}.part"
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        torch.save({**values, "curve": [asdict(point) for point in self.curve]}, part)
        part.replace(folder / FILE)
