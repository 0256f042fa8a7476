"""How a process becomes one of the ranks that ``torchrun`` has started."""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.distributed as dist

from harness.captures import reset_captures
from harness.errors import ConfigError
from harness.parallel.ranks import ALONE, Ranks, TensorParallelRanks


def launcher(tp: int) -> str:
    """What a command line begins with."""
    return f"torchrun --nproc-per-node {tp} -m harness" if tp > 1 else "python -m harness"


def join(tp: int, timeout_s: float, device: str) -> Ranks:
    """Meet the other ranks.

    Args:
        tp: ``engine.tp``, how many there should be.
        timeout_s: ``engine.tp_timeout_s``.
        device: ``pair.device``.

    Raises:
        ConfigError: this process was not started as one of ``tp``, or has no device of its own.
        LostRank: the others do not come.
    """
    started = started_ranks()
    if started != tp:
        remedy = f"set engine.tp={started}"
        if started == 1:
            remedy = f"start `{launcher(tp)} … engine.tp={tp}`"
        raise ConfigError(f"engine.tp: {tp} ranks asked for, {started} started; {remedy}")
    return _join(timeout_s, rank_device(device)) if tp > 1 else ALONE


def joined() -> bool:
    """Whether this process has met other ranks, and not left them."""
    return dist.is_initialized()


def leave() -> None:
    """Part from the other ranks, if there are any: all is done."""
    if joined():
        reset_captures()  # NCCL waits for the end of all graphs that hold its work
        dist.destroy_process_group()


def started_ranks() -> int:
    """How many ranks ``torchrun`` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def own_rank() -> int:
    """The rank that this process was started as; known before it has joined the others."""
    return int(os.environ.get("RANK", "0"))


def rank_device(name: str) -> torch.device:
    """The device of this rank: transformers gives each its own, on CUDA where there is any.

    Raises:
        ConfigError: ``pair.device`` asks for another one.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("auto", kind):
        remedy = "set auto" if kind == "cpu" or name != "cpu" else "set CUDA_VISIBLE_DEVICES="
        raise ConfigError(f"pair.device: ranks of engine.tp run on {kind}, not {name}; {remedy}")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if kind == "cuda" and local >= count:
        raise ConfigError(f"engine.tp: rank {local} of this machine has no GPU, {count} are here")
    return torch.device(kind, local) if kind == "cuda" else torch.device(kind)


@cache
def _join(timeout_s: float, device: torch.device) -> Ranks:
    """Once per process, whose jobs of a sweep share the groups."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return TensorParallelRanks(device, timeout_s)
