"""The processes of a tensor-parallel run, and the few words that they exchange.

Every rank runs the same loop over the same requests. Where the loop would act on something that
another rank may see differently (a token, a grammar's readiness), it acts on what is said here.
The model's own collectives run in the default process group, and so does what is decided on a
GPU; all else is said in a second one, over gloo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.clock import Clock
from harness.errors import HarnessError, LostRank, named
from harness.parallel.watchdog import Watchdog

T = TypeVar("T")

SET_UP_S = 1800.0
"""How long ranks wait for each other before anything is decoded: one may read its weights from
a cold disk, or convert them for all. A rank that dies meanwhile is noticed at once."""

LOST = re.compile(r"gloo|nccl|connection (closed|reset)|timed? ?out|broken pipe", re.IGNORECASE)
"""What torch.distributed says in a plain ``RuntimeError`` when a peer does not answer."""


class Ranks:
    """All ranks of a run as one of them sees them. This class is a run of one process.

    Attributes:
        rank: of this process; 0 decides, writes and prints.
        size: number of ranks, ``engine.tp``.
        now: what this rank is doing, for errors.
        clock: as ``agree``, what comparing behind a step takes, the wait for the others included.
    """

    rank, size = 0, 1

    def __init__(self) -> None:
        self.now = "the set-up"
        self.clock = Clock()

    def decided(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``values``, on every rank and where they are; of one shape on all. On a GPU
        only launched, so that a graph may hold it."""
        return values

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags are true on all ranks."""
        return list(flags)

    def alike(self, digest: int) -> bool:
        """Whether all ranks have this digest, a signed 64-bit number."""
        return True

    def gather(self, value: T) -> list[T]:
        """What each rank has for ``value``, by rank."""
        return [value]

    def meet(self) -> None:
        """Wait for all ranks, as long as a set-up may take: what they do next, they do together.

        Raises:
            HarnessError: one has failed before.
        """

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Rank 0 does the body first, then the others: what it writes, they find."""
        yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """The body succeeds on all ranks, or fails on all.

        Raises:
            HarnessError: it failed, here or elsewhere.
        """
        yield

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Do one step, called ``name``."""
        yield


ALONE = Ranks()


class TensorParallelRanks(Ranks):
    """Ranks that ``torchrun`` has started.

    Args:
        device: of this rank.
        timeout_s: how long it waits for another one.

    Raises:
        LostRank: (all methods) another rank is gone or does not answer.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__()
        # Not before the watchdog, which has something to say.
        limit = timedelta(seconds=timeout_s * (2 if device.type == "cuda" else 1))
        backend = "nccl" if device.type == "cuda" else "gloo"
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # which would take its time
        bound = device if device.type == "cuda" else None
        with self._answered():
            dist.init_process_group(backend, timeout=limit, device_id=bound)
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            if bound is not None:  # the first collective connects the GPUs: in no step's time
                dist.all_reduce(torch.zeros(1, device=bound))
                torch.cuda.synchronize(bound)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # A collective on the CPU raises by itself; a GPU that waits cannot be interrupted.
        self._watchdog = Watchdog(timeout_s) if device.type == "cuda" else None

    def decided(self, values: torch.Tensor) -> torch.Tensor:
        """See ``Ranks``."""
        shared = values.clone(memory_format=torch.contiguous_format)
        group = None if shared.is_cuda else self._group
        with self._answered():
            dist.broadcast(shared, src=0, group=group)
        return shared

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """See ``Ranks``."""
        if not flags:
            return []
        votes = torch.tensor(flags, dtype=torch.int32)
        with self._answered():
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return [vote == 1 for vote in votes.tolist()]

    def alike(self, digest: int) -> bool:
        """See ``Ranks``; one exchange, where ``gather`` takes several."""
        own = torch.tensor([digest])
        seen = [torch.empty_like(own) for _ in range(self.size)]
        with self._answered():
            dist.all_gather(seen, own, group=self._group)
        return all(torch.equal(each, own) for each in seen)

    def gather(self, value: T) -> list[T]:
        """See ``Ranks``."""
        values: list[Any] = [None] * self.size
        with self._answered():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def meet(self) -> None:
        """See ``Ranks``."""
        self._agree(None)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """See ``Ranks``."""
        if self.rank > 0:
            self._agree(None)
        yield  # if this fails on rank 0, ``together`` tells the others, who are waiting here
        if self.rank == 0:
            self._agree(None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """See ``Ranks``."""
        try:
            with self._answered():
                yield
        except _FailedSomewhere:
            raise
        except Exception as error:
            try:
                self._agree(_reason(error))
            except _FailedSomewhere:
                if isinstance(error, HarnessError):
                    raise  # with the reasons of all: this one may come of another's
            raise error
        self._agree(None)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """See ``Ranks``."""
        self.now = name
        if self._watchdog is not None:
            self._watchdog.arm(f"engine.tp: rank {self.rank} waits for another one in {name}")
        try:
            with self._answered():
                yield
        finally:
            if self._watchdog is not None:
                self._watchdog.disarm()

    def _agree(self, failure: str | None) -> None:
        """Wait for all ranks, as long as a set-up may take, and hear whether they go on.

        Raises:
            HarnessError: one does not.
        """
        with self._answered():
            dist.monitored_barrier(self._group, timedelta(seconds=SET_UP_S))
        reasons = self.gather(failure)
        if any(reasons):
            raise _FailedSomewhere(common_reason(reasons))

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Say in one line that another rank did not answer."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
                raise
            said = str(error).strip().splitlines()[0]
            raise LostRank(
                f"engine.tp: rank {self.rank} has lost another one in {self.now} ({said}); see "
                "what that one says, or raise engine.tp_timeout_s if it is merely slow"
            ) from None


class _FailedSomewhere(HarnessError):
    """All ranks know it."""


def common_reason(reasons: Sequence[str | None]) -> str:
    """Why something failed, if it did on any rank; where, if not on all alike or on rank 0."""
    if reasons[0] is not None and all(each in (None, reasons[0]) for each in reasons):
        return reasons[0]
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def _reason(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line if line and isinstance(error, HarnessError) else named(error)
