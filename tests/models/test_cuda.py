"""On a GPU: no step waits where it need not, and nothing grows."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import strategies
from harness.core import Request
from harness.models.sampling import Sampling
from tests.bench import Bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOTS, REQUESTS = 3, 40
GRAMMARS: tuple[dict[str, object], ...] = (
    {"regex": "[0-9]{2,30}"},
    {"choice": ["yes", "no", "neither of the two"]},
    {},
    {"json_schema": {"type": "array", "items": {"enum": [1, 2, 10]}, "minItems": 3}},
)


class MixedBench(Bench):
    """Requests with all kinds of grammars, of several lengths."""

    def __init__(self, folder: Path, device: str, sampling: Sampling) -> None:
        items = [
            {"id": f"{i}", "prompt": f"Item {i}?" * (1 + i % 5), **GRAMMARS[i % len(GRAMMARS)]}
            for i in range(REQUESTS)
        ]
        super().__init__(folder, items, 24, SLOTS, device, sampling)

    def graphs(self) -> int:
        """Graphs captured so far."""
        return int(self.run.facts()["graphs"])

    def round(self, strategy: str, requests: SequenceOf[Request]) -> None:
        """Decode the requests in all the shapes that they come in.

        A slot that becomes free is the next to be given away, so one run after the other
        permutes the slots, always in the same way. A permutation of three things is undone by
        repeating it two or three times: the runs after a round bring no new shape.
        """
        for _ in range(SLOTS):
            self.loop(strategy).run(requests)

    def errors(self, strategy: str) -> list[str]:
        """Why requests failed. What is raised on behalf of one sequence ends only that one, so
        it has to be looked for here."""
        return [
            trace.error
            for trace in self.recorder.requests
            if trace.strategy == strategy and trace.error
        ]


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """CUDA's synchronising calls raise. Waiting for an event does not count as one."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(
    scope="module",
    params=[Sampling(), Sampling(temperature=1.0), Sampling(0.8, top_k=20, top_p=0.9)],
    ids=["greedy", "temperature", "truncated"],
)
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> MixedBench:
    return MixedBench(tmp_path_factory.mktemp("pair"), "cuda", request.param)


def test_waiting_for_an_event_is_no_hidden_wait_but_reading_a_tensor_is() -> None:
    """What the next test relies on."""
    on_device = torch.ones(4, device="cuda")
    on_host = torch.empty(4, pin_memory=True)
    done = torch.cuda.Event()
    with waits_are_errors():
        on_host.copy_(on_device, non_blocking=True)
        done.record()
        done.synchronize()
        assert on_host.tolist() == [1.0] * 4
        with pytest.raises(RuntimeError, match="synchronizing"):
            on_device.tolist()


@pytest.mark.parametrize("strategy", strategies.registry())
def test_no_decode_step_hides_a_wait(bench: MixedBench, strategy: str) -> None:
    batch, loop = bench.run.requests[:SLOTS], bench.loop(strategy)
    bench.round(strategy, batch)
    graphs = bench.graphs()
    loop.submit(batch)
    assert loop.advance()  # the prefill
    with waits_are_errors():
        while loop.advance():
            pass
    assert bench.errors(strategy) == []
    assert bench.graphs() == graphs


@pytest.mark.parametrize("strategy", strategies.registry())
def test_neither_memory_nor_graphs_grow_with_the_requests(bench: MixedBench, strategy: str) -> None:
    bench.round(strategy, bench.run.requests)
    peaks, graphs = [], []
    for _ in range(2):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        bench.round(strategy, bench.run.requests)
        peaks.append(torch.cuda.max_memory_allocated())
        graphs.append(bench.graphs())
    assert bench.errors(strategy) == []
    assert peaks[0] == peaks[1]
    assert graphs[0] == graphs[1]
