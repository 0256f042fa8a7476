"""A Hydra launcher on Ray: one task a job, on whatever machines a cluster has.

The published ``hydra-ray-launcher`` wants ``cloudpickle<3`` and the AWS client, waits for the first
job that fails and no further, and gives no job a GPU of its own; hence this one.

Ray gives a GPU to one task at a time, by ``CUDA_VISIBLE_DEVICES``. A task whose process or machine
dies is sent to another one, where the run goes on in its folder. So the folder of the sweep, the
code and the files that the overrides name have to be on all machines, under the same paths.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from harness.errors import ConfigError

CONNECT_S = 10
"""How long a cluster may take to answer, in seconds."""


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """A job as it travels to the machine that runs it."""

    context: HydraContext
    config: DictConfig
    task: TaskFunction
    singletons: Any
    folder: str

    def run(self) -> JobReturn:
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise RuntimeError(
                f"{self.folder} is not on this machine ({error.strerror}); a sweep needs a folder "
                "that all machines share"
            ) from None
        setup_globals()
        Singleton.set_state(self.singletons)
        HydraConfig.instance().set_config(self.config)
        return run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )


class RayLauncher(Launcher):
    """See the module.

    Args:
        address: of a running cluster, as ``ray.init`` takes it (``auto``, ``HOST:PORT``,
            ``ray://…``); None = ``$RAY_ADDRESS``, or else a cluster of this machine alone, for the
            time of the sweep.
        num_cpus: cores that a job gets, which is also how many threads it computes with.
        num_gpus: GPUs that a job gets; None = one where ``pair.device`` is CUDA, or ``auto`` and
            the cluster has any.
        max_retries: how often a job is sent again whose process or machine died.
    """

    def __init__(
        self, address: str | None, num_cpus: float, num_gpus: float | None, max_retries: int
    ) -> None:
        for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus or 0)):
            if value < 0:
                raise ConfigError(f"hydra.launcher.{name}: {value} is below 0; give 0 or more")
        self._address, self._num_cpus, self._num_gpus = address, num_cpus, num_gpus
        self._max_retries = max_retries

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See ``hydra.plugins.launcher.Launcher``."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run all jobs, as many at a time as the cluster has room for.

        Returns:
            What became of each; one whose process died for good has failed with Ray's reason.

        Raises:
            ConfigError: Ray is not installed, no cluster answers, or none of its machines has what
                a job needs.
        """
        with self._cluster() as ray:
            sent = {}
            for place, overrides in enumerate(job_overrides):
                job = self._remote_job(overrides, initial_job_idx + place)
                task = ray.remote(
                    num_cpus=self._num_cpus,
                    num_gpus=self._gpus(ray, job.config.pair.device),
                    max_retries=self._max_retries,
                    max_calls=1,  # a process for each job: none finds another's memory on its GPU
                )(RemoteJob.run)
                sent[task.remote(job)] = job.config.hydra.sweep.subdir
            waiting = list(sent)
            while waiting:
                (done,), waiting = ray.wait(waiting)
                ended = f"{len(sent) - len(waiting)} of {len(sent)} jobs"
                print(f"{ended} have ended: {sent[done]}", file=sys.stderr)
            return [_result(ray, task) for task in sent]

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        """Ray, connected."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        try:
            import ray  # noqa: PLC0415 (an extra)
        except ImportError:
            raise ConfigError(
                "hydra/launcher: ray is not installed; pip install 'grammar-draft-harness[ray]'"
            ) from None
        address = self._address or os.environ.get("RAY_ADDRESS")
        try:
            _check_answers(address)
            ray.init(
                address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="warning",
                runtime_env={
                    "env_vars": {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
                },
            )
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"hydra.launcher.address: no Ray cluster answers at {address} ({reason}); "
                "start one by `ray start --head`, or leave the address out"
            ) from None
        try:
            self._check_room(ray)
            yield ray
        finally:
            ray.shutdown()

    def _check_room(self, ray: Any) -> None:
        """Ray itself would wait for a machine that is large enough, forever."""
        largest = max(each["Resources"].get("CPU", 0) for each in ray.nodes() if each["Alive"])
        if self._num_cpus > largest:
            raise ConfigError(
                f"hydra.launcher.num_cpus: no machine of the Ray cluster has {self._num_cpus} "
                f"cores, the largest {largest:g}; ask for fewer"
            )

    def _gpus(self, ray: Any, device: str) -> float:
        """GPUs for a job on this device; those that no machine has, Ray would wait for forever."""
        there = ray.cluster_resources().get("GPU", 0)
        wanted = self._num_gpus
        if wanted is None:
            wanted = int(device.startswith("cuda") or (device == "auto" and there > 0))
        if wanted > there:
            raise ConfigError(
                f"hydra.launcher.num_gpus: a job on pair.device={device} needs {wanted:g}, the Ray "
                f"cluster has {there:g}; set pair.device=cpu, or num_gpus"
            )
        machines = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        if wanted and not any(
            each.get("GPU", 0) >= wanted and each.get("CPU", 0) >= self._num_cpus
            for each in machines
        ):
            raise ConfigError(
                f"hydra.launcher.num_gpus: no machine of the Ray cluster has {wanted:g} GPUs and "
                f"{self._num_cpus:g} cores; ask for fewer"
            )
        return wanted

    def _remote_job(self, overrides: Sequence[str], number: int) -> RemoteJob:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        return RemoteJob(self._context, config, self._task, Singleton.get_state(), os.getcwd())


def _check_answers(address: str | None) -> None:
    """Ray itself would go on trying, for many minutes.

    Raises:
        OSError: nobody listens at ``HOST:PORT``.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def _result(ray: Any, task: Any) -> JobReturn:
    try:
        result: JobReturn = ray.get(task)
    except ray.exceptions.RayError as error:
        result = JobReturn(status=JobStatus.FAILED)
        result.return_value = getattr(error, "cause", None) or error
    return result
