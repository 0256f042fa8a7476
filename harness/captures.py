"""CUDA graphs of work that is done again and again."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch

from harness.clock import Clock

WARM_UPS = 2
"""Runs before a capture: they allocate, choose kernels and compile."""

_alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


class Captures:
    """Turns device work into CUDA graphs, and counts them.

    Args:
        clock: takes the time of captures out of the step that needs them, as ``capture``.

    Attributes:
        graphs: captured so far (on a CPU: what would be).
        capture_s: time to warm up, compile and capture them, s.
    """

    def __init__(self, clock: Clock) -> None:
        self.graphs, self.capture_s = 0, 0.0
        self._clock = clock

    def graph(self, body: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Capture ``body`` and return its replay; without CUDA, ``body`` itself.

        Args:
            body: launches work on tensors that stay where they are. It is run before the
                capture, so running it more than once must do no harm.
            device: where the work runs.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was launched before is no part of the capture
        with self._clock.span("capture") as span:
            replay = _captured(body, device) if device.type == "cuda" else body
        self.graphs += 1
        self.capture_s += span.us / 1e6
        return replay


def _captured(body: Callable[[], None], device: torch.device) -> Callable[[], None]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            body()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads use the device meanwhile: NCCL's watchdog asks what has ended.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    _alive.add(graph)
    return graph.replay


def reset_captures() -> None:
    """Let go of all graphs; none may be replayed again."""
    for graph in list(_alive):
        graph.reset()
