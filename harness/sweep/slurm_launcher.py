"""Slurm through submitit: ``hydra-submitit-launcher``, but one job that dies ends no sweep.

The published launcher raises what the first failed job raised, and the sweep would end while
others are still running or queued. Imported only where the extra ``slurm`` is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import submitit
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, SlurmQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf

from harness.errors import ConfigError


@dataclass
class SlurmConfig(SlurmQueueConf):  # type: ignore[misc]  # the base is untyped
    """The published launcher's settings (partition, account, setup, …), and where to submit.

    Attributes:
        cluster: ``slurm``; or ``local``, to run the jobs as processes of this machine.
        gpus_per_node: one, for a job alone.
        max_num_timeout: how often a job is queued again that its time limit has ended; it goes on
            where its journal ends. One that was preempted always is.
    """

    _target_: str = "hydra_plugins.harness.SlurmLauncher"
    cluster: str = "slurm"
    gpus_per_node: int | None = 1
    max_num_timeout: int = 10


def register() -> None:
    """Make ``hydra/launcher=slurm`` known to Hydra."""
    ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmConfig)


class SlurmLauncher(BaseSubmititLauncher):  # type: ignore[misc]
    """See the module; the arguments are the fields of ``SlurmConfig``."""

    def __init__(
        self, cluster: str, submitit_folder: str, max_num_timeout: int, **parameters: Any
    ) -> None:
        super().__init__(**parameters)
        self._cluster, self._folder = cluster, submitit_folder
        self._max_num_timeout = max_num_timeout

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit all jobs as one array, and wait for them. An interrupt cancels them: a resume
        would else find them in the queue still.

        Returns:
            What became of each; one whose process died has failed with submitit's reason.

        Raises:
            ConfigError: there is no Slurm here, or it does not take the jobs.
        """
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        calls = [
            (list(overrides), "hydra.sweep.dir", number, str(number), Singleton.get_state())
            for number, overrides in zip(numbers, job_overrides, strict=True)
        ]
        executor = self.executor()
        try:
            jobs = executor.map_array(self, *zip(*calls, strict=True))
        except submitit.core.utils.FailedJobError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"hydra/launcher: Slurm does not take the jobs ({reason})") from None
        try:
            return [_result(job) for job in jobs]
        except KeyboardInterrupt:
            for job in jobs:
                job.cancel(check=False)
            raise

    def executor(self) -> submitit.AutoExecutor:
        """Submitit's executor, with all parameters.

        Raises:
            ConfigError: there is no Slurm here.
        """
        timeouts = {"slurm_max_num_timeout": self._max_num_timeout}
        try:
            executor = submitit.AutoExecutor(self._folder, cluster=self._cluster, **timeouts)
        except RuntimeError:
            raise ConfigError(
                "hydra/launcher: there is no Slurm on this machine (no srun); submit from one that "
                "has, or choose another launcher"
            ) from None
        general = OmegaConf.structured(BaseQueueConf).keys()
        executor.update_parameters(
            **{
                name if name in general else f"slurm_{name}": value
                for name, value in self.params.items()
                if not name.startswith("_")
            }
        )
        return executor


def _result(job: submitit.Job[JobReturn]) -> JobReturn:
    try:
        result: JobReturn = job.results()[0]
    except submitit.core.utils.UncompletedJobError as error:
        result = JobReturn(status=JobStatus.FAILED)
        result.return_value = error
    return result
