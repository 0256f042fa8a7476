"""A timeline of the first steps, for Perfetto or ``chrome://tracing`` (``engine.profile``)."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable, Sequence as SequenceOf
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from harness.core import Request, Sequence, StepTrace
from harness.loop import DecodeLoop, Times

TIMELINE = "timeline.json.gz"
"""Its name in the run folder. Both viewers open it as it is."""

STEPS = 10
"""Iterations of the loop per strategy, prefills included. An eager step of a 30-layer model has
thousands of operators, about 2.5 MB of JSON: viewers choke on much more."""


class Unrecorded:
    """An ``Observer`` that writes nothing down."""

    def step(self, trace: StepTrace) -> None:
        """See ``Observer``."""

    def finished(self, sequence: Sequence, times: Times) -> None:
        """See ``Observer``."""


def write_timeline(
    path: Path, loops: Iterable[DecodeLoop], requests: SequenceOf[Request], steps: int = STEPS
) -> None:
    """Decode the first requests again under ``torch.profiler``, strategy after strategy.

    The trace has one span per strategy, of its name, and inside it those of ``Clock``: each
    ``step`` with its ``draft``, ``verify`` and ``grammar``. A profiler stretches what it watches.
    So it watches a repetition, after everything has been recorded: no result is distorted, and
    nothing is captured or compiled any more.

    Args:
        path: where the compressed Chrome trace goes.
        loops: idle, and of no use afterwards: they are left unobserved, in midst of the requests.
        requests: those of the run, in its order.
        steps: the most iterations of each loop.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # Mask rows may be filled in other threads: what hides behind the forward is the point.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        for loop in loops:
            loop.observer, loop.clock.annotate = Unrecorded(), True
            loop.submit(requests)
            with record_function(loop.strategy.name):
                for _ in range(steps):
                    loop.advance()
    _export(profiler, path)


def _export(profiler: profile, path: Path) -> None:
    """Write the trace. torch compresses by the line, which takes ten times as long."""
    with TemporaryDirectory() as folder:
        plain = Path(folder, "timeline.json")
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
