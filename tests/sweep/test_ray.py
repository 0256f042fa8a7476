"""A sweep on a real Ray cluster of two machines, both of them this one."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.errors import ConfigError
from harness.sweep.folder import State, SweepFolder
from harness.sweep.ray_launcher import RayLauncher
from tests.sweep.conftest import Command, only_sweep

LONG = [{"id": f"free-{number}", "prompt": f"Number {number}?"} for number in range(60)]
"""Work for some seconds: a machine must have time to die in the middle of it."""


@pytest.fixture
def cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Two machines with a core each; the cluster, and the second one."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (an extra)

    quick_to_notice = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 300,
        "health_check_failure_threshold": 3,
    }
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    head = {"num_cpus": 1, "_system_config": quick_to_notice, **small}
    found = Cluster(initialize_head=True, head_node_args=head)
    yield found, found.add_node(num_cpus=1, object_store_memory=80 << 20)
    found.shutdown()


def test_a_machine_that_dies_loses_nothing_and_nothing_counts_twice(
    cluster: tuple[Any, Any], sweep: Command, tmp_path: Path
) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("\n".join(map(json.dumps, LONG)))
    machines, doomed = cluster
    killed = threading.Event()

    def kill_once_both_work() -> None:
        while len([path for path in Path("runs").glob("*/*/journal.jsonl") if lines(path) > 2]) < 2:
            time.sleep(0.02)
        machines.remove_node(doomed, allow_graceful=False)
        killed.set()

    threading.Thread(target=kill_once_both_work, daemon=True).start()
    status = sweep(
        "+strategy=plain",
        "seed=0,1",
        f"workload.path={items}",
        "workload.max_new_tokens=60",
        "hydra/launcher=ray",
        f"hydra.launcher.address={machines.address}",
    )
    assert status == 0
    assert killed.is_set()
    jobs = SweepFolder.open(only_sweep()).jobs
    assert [job.state for job in jobs] == [State.FINISHED] * 2
    continued = [job for job in jobs if "resumed" in job.folder.manifest()]
    assert len(continued) == 1  # it ran on the machine that died
    rows = pd.read_parquet(only_sweep() / "requests")
    assert len(rows) == 2 * len(LONG)
    assert not rows.duplicated(["job", "request"]).any()
    assert not rows.error.any()


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def test_without_ray_the_extra_is_named(
    sweep: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert sweep("+strategy=plain", "hydra/launcher=ray") == 2
    assert "pip install 'grammar-draft-harness[ray]'" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


def test_a_cluster_that_does_not_answer_is_one_line(
    sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    address = "hydra.launcher.address=127.0.0.1:1"
    assert sweep("+strategy=plain", "hydra/launcher=ray", address) == 2
    assert "no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


class Resources:
    """As much of Ray as says what a cluster has."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def cluster_resources(self) -> dict[str, float]:
        names = {name for node in self._nodes for name in node}
        return {name: sum(node.get(name, 0) for node in self._nodes) for name in names}


GPUS = Resources({"CPU": 8, "GPU": 2}, {"CPU": 4})
NO_GPUS = Resources({"CPU": 8}, {"CPU": 4})


@pytest.mark.parametrize(
    ("there", "device", "gpus"),
    [(GPUS, "auto", 1), (GPUS, "cuda", 1), (GPUS, "cpu", 0), (NO_GPUS, "auto", 0)],
)
def test_a_job_gets_a_gpu_where_it_runs_on_one(there: Resources, device: str, gpus: int) -> None:
    launcher = RayLauncher(address=None, num_cpus=1, num_gpus=None, max_retries=3)
    assert launcher._gpus(there, device) == gpus


def test_what_no_machine_has_is_refused_instead_of_waited_for() -> None:
    launcher = RayLauncher(address=None, num_cpus=9, num_gpus=None, max_retries=3)
    with pytest.raises(ConfigError, match=r"hydra.launcher.num_cpus: .* the largest 8"):
        launcher._check_room(GPUS)
    with pytest.raises(ConfigError, match=r"pair.device=cuda needs 1, the Ray cluster has 0"):
        launcher._gpus(NO_GPUS, "cuda")
    apart = Resources({"CPU": 9, "GPU": 1}, {"CPU": 4, "GPU": 2})
    with pytest.raises(ConfigError, match=r"no machine of the Ray cluster has 2 GPUs and 9 cores"):
        RayLauncher(address=None, num_cpus=9, num_gpus=2, max_retries=3)._gpus(apart, "cuda")
    with pytest.raises(ConfigError, match=r"hydra.launcher.num_gpus"):
        RayLauncher(address=None, num_cpus=1, num_gpus=-1, max_retries=3)
