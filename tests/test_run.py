"""A process that makes several runs keeps nothing of the earlier ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.config import Config
from harness.engine import EngineConfig
from harness.garbage import forget_set_up
from harness.models.pair import PairConfig
from harness.results.record import Recorder
from harness.run import Run
from harness.workloads.loaders import WorkloadConfig
from tests.tiny_pair import save_pair


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def decoded(folder: Path, pair: PairConfig) -> weakref.ref[object]:
    """The target of a run that has been made and is over."""
    config = Config(
        strategy="vllm",
        pair=pair,
        workload=WorkloadConfig("file", str(folder / "items.jsonl"), max_new_tokens=4),
        engine=EngineConfig(slots=1, mode="graphs"),
    )
    run = Run(config, Recorder(), lambda _: None)
    run.warm_up()
    run.go()
    return weakref.ref(run.loops[0].target)


@pytest.mark.usefixtures("thawed")
def test_the_models_of_a_sweep_s_earlier_jobs_are_gone(tmp_path: Path) -> None:
    """Compiled and captured models lie in reference cycles, which a frozen heap never loses."""
    target, draft = save_pair(tmp_path)
    (tmp_path / "items.jsonl").write_text('{"id": "a", "prompt": "A number?", "regex": "[0-9]{9}"}')
    pair = PairConfig(str(target), str(draft), "float32", "cpu")
    first, second = (decoded(tmp_path, pair) for _ in range(2))
    forget_set_up()
    assert first() is None
    assert second() is None


@pytest.mark.usefixtures("thawed")
def test_a_collection_walks_nothing_of_the_set_up() -> None:
    forget_set_up()
    assert len(gc.get_objects()) < 1000
