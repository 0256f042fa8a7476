"""One GPU for one job: where a launcher gives none out, jobs take them by themselves."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from harness.data_parallel.shard import devices
from harness.garbage import release
from harness.lock import lock

POLL_S = 0.2


def gives_none(launcher: Mapping[str, Any]) -> bool:
    """Whether a launcher with these settings, ``hydra.launcher``, runs jobs beside each other that
    all see the same GPUs. Ray and Slurm let each see its own, and ``basic`` runs one at a time."""
    here = str(launcher.get("_target_")).endswith((".JoblibLauncher", ".LocalLauncher"))
    return here or launcher.get("cluster") == "local"


@contextmanager
def own_gpus(sweep: Path, device: str, processes: int) -> Iterator[None]:
    """Decode on GPUs that no other job of the sweep has, on this machine; wait for them.

    A job that names its GPU takes that one, one of ``engine.dp`` processes takes the first ones,
    and any other the first that is free. A job whose process dies has none any more, and one that
    has come to its end leaves no memory taken there: its process may go on with another GPU.

    Args:
        sweep: its folder.
        device: of the job, ``pair.device``.
        processes: of the job, ``engine.dp``.

    Raises:
        ConfigError: there are not as many.
    """
    names = devices(device, processes)
    wanted = [torch.device("cuda" if name == "auto" else name) for name in names]
    if wanted[0].type == "cpu" or not torch.cuda.is_available():
        yield
        return
    named = [each.index for each in wanted if each.index is not None]
    choices = [named] if named else [[index] for index in range(torch.cuda.device_count())]
    with _first_free(sweep, choices) as (first, *_):
        if not named:
            torch.cuda.set_device(first)
        yield
        release()
        torch.cuda.empty_cache()


@contextmanager
def _first_free(sweep: Path, choices: list[list[int]]) -> Iterator[list[int]]:
    while True:
        for choice in choices:
            with ExitStack() as locks:
                if all(locks.enter_context(_lock(sweep, index)) for index in choice):
                    yield choice
                    return
        time.sleep(POLL_S)


@contextmanager
def _lock(sweep: Path, index: int) -> Iterator[bool]:
    """Hold a GPU, or learn that another job does."""
    with (sweep / f".gpu-{socket.gethostname()}-{index}").open("w") as file:
        yield lock(file)
