"""Which part of a run a process has, and which part of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from harness.config import Config
from harness.errors import ConfigError
from harness.models.pair import choose_device
from harness.results.manifest import cores

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` parts of a run; by default all of it."""

    index: int = 0
    count: int = 1

    def take(self, dealt: Sequence[T]) -> Sequence[T]:
        """What falls to this part when all is dealt out in turn, like cards."""
        return dealt[self.index :: self.count]


WHOLE = Shard()


def devices(name: str, count: int) -> list[str]:
    """The device of each process: on CUDA each has one to itself, a CPU is shared.

    Args:
        name: ``pair.device``.
        count: ``engine.dp``.

    Raises:
        ConfigError: there are fewer devices than processes.
    """
    device = choose_device(name)
    if device.type == "cpu" or count == 1:
        return [name] * count
    if device.index is not None:
        raise ConfigError(
            f"engine.dp: {count} processes need as many devices, pair.device={name} names one; "
            "set pair.device=cuda"
        )
    if (here := torch.cuda.device_count()) < count:
        raise ConfigError(
            f"engine.dp: {count} processes need as many CUDA devices, here are {here}; lower it, "
            "or set pair.device=cpu"
        )
    return [f"cuda:{index}" for index in range(count)]


def share_of(config: Config, device: str) -> Config:
    """The settings of one process: its device, and its part of the cores wherever the number of
    threads is left open. Each would take them all, and they would be in each other's way."""
    count, engine, grammar = config.engine.dp, config.engine, config.grammar
    if count > 1:
        engine = replace(engine, threads=engine.threads or max(1, cores() // count))
        compiling = max(1, cores() // (2 * count))  # half of its cores (V1.6a)
        grammar = replace(grammar, threads=grammar.threads or compiling)
    return replace(config, pair=replace(config.pair, device=device), engine=engine, grammar=grammar)
