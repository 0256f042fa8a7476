"""A GPU is given to one job at a time, also by launchers that know nothing of GPUs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from weakref import ref

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from harness.config import schema
from harness.errors import ConfigError
from harness.sweep import plugins
from harness.sweep.gpus import gives_none, own_gpus


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs; a list of those that jobs have chosen."""
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    return used


def begun_behind(body: Callable[[], None]) -> tuple[Thread, Event]:
    """A thread that waits for something, and whether it has it."""
    has = Event()

    def wait() -> None:
        body()
        has.set()

    thread = Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    return thread, has


def test_jobs_beside_each_other_take_a_gpu_each_and_a_third_one_waits(
    two: list[int], tmp_path: Path
) -> None:
    def third() -> None:
        with own_gpus(tmp_path, "auto", 1):
            pass

    with own_gpus(tmp_path, "cuda", 1):
        with own_gpus(tmp_path, "auto", 1):
            thread, has = begun_behind(third)
            assert not has.is_set()
        assert has.wait(5)
    thread.join()
    assert two == [0, 1, 1]


@pytest.mark.parametrize(("device", "dp"), [("cuda:1", 1), ("auto", 2)])
def test_a_job_waits_for_just_those_that_it_asks_for(
    device: str, dp: int, two: list[int], tmp_path: Path
) -> None:
    def asking() -> None:
        with own_gpus(tmp_path, device, dp):
            pass

    with own_gpus(tmp_path, "cuda:1", 1):
        thread, has = begun_behind(asking)
        assert not has.is_set()
        with own_gpus(tmp_path, "cuda:0", 1):  # one that waits holds no other
            pass
    assert has.wait(5)
    thread.join()


class Model:
    """Refers to itself, as a captured one does."""

    def __init__(self) -> None:
        self.itself = self


def test_a_gpu_is_given_on_without_what_a_job_had_there(
    two: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a pool lives on, and its next job may get another GPU."""
    given_on: list[object] = []
    with own_gpus(tmp_path, "auto", 1):
        model = ref(Model())
        gc.freeze()
        assert model() is not None
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_on.append(model()))
    assert given_on == [None]


def test_jobs_on_cpus_wait_for_nothing(two: list[int], tmp_path: Path) -> None:
    with own_gpus(tmp_path, "cpu", 3), own_gpus(tmp_path, "cpu", 1):
        assert two == []


def test_more_gpus_than_there_are_cannot_be_waited_for(two: list[int], tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"engine.dp: 3 processes need"),
        own_gpus(tmp_path, "auto", 3),
    ):
        pass


@pytest.mark.parametrize(
    ("launcher", "none"),
    [
        (["hydra/launcher=joblib"], True),
        (["hydra/launcher=slurm", "hydra.launcher.cluster=local"], True),
        (["hydra/launcher=submitit_local"], True),
        (["hydra/launcher=slurm"], False),
        (["hydra/launcher=ray"], False),
        ([], False),
    ],
)
def test_ray_and_slurm_give_gpus_out_by_themselves(launcher: list[str], none: bool) -> None:
    for extra in ("joblib", "submitit"):
        pytest.importorskip(f"hydra_plugins.hydra_{extra}_launcher")
    plugins.register()
    ConfigStore.instance().store(name="schema", node=schema())
    with initialize_config_module("configs", version_base="1.3"):
        composed = compose("config", ["strategy=plain", *launcher], return_hydra_config=True)
    assert gives_none(composed.hydra.launcher) is none
