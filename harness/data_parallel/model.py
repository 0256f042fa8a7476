"""How a run grows over processes, as far as its own rows and the cores of the machine tell.

Shards exchange nothing. So the costs of the run that was measured (``harness.results.fit``) are
laid on the rows of each shard, and the slowest one counts. The work of the CPU takes longer where
the processes together want more cores than there are::

    stretch(n) = max(1, n · cores that one process keeps busy / cores of the machine)

Left out: memory bandwidth and clock rates that they share, and all else that runs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import pandas as pd

from harness.data_parallel.shard import Shard
from harness.results.costs import Costs
from harness.results.predict import predict


@dataclass(frozen=True)
class ScalingModel:
    """What the rows of a run come to when they are shared out.

    Attributes:
        costs: of the work.
        steps: step rows, each request's in the order of its steps.
        turns: ids of the requests of each turn, which are dealt out whole.
        cores: of the machine.
        cores_per_process: that one process keeps busy.
        fitted_at: processes that ran side by side when the costs were measured.
    """

    costs: Costs
    steps: pd.DataFrame
    turns: Sequence[Sequence[str]]
    cores: int
    cores_per_process: float
    fitted_at: int = 1

    def stretch(self, count: int) -> float:
        """How much longer the work of the CPU takes where ``count`` processes share the cores."""
        return max(1.0, count * self.cores_per_process / self.cores)

    def tok_s(self, count: int) -> dict[str, float]:
        """By strategy: all output tokens over the time of the slowest of ``count`` shards, 1/s."""
        costs = stretched(self.costs, self.stretch(count) / self.stretch(self.fitted_at))
        shards = [predict(rows, costs) for rows in self._shards(count)]
        tokens = pd.concat([shard["tokens"] for shard in shards], axis=1)
        seconds = pd.concat([shard["tokens"] / shard["tok_s"] for shard in shards], axis=1)
        speeds = tokens.sum(axis=1) / seconds.max(axis=1)
        return {str(name): float(speed) for name, speed in speeds.items()}

    def _shards(self, count: int) -> Iterator[pd.DataFrame]:
        for index in range(min(count, len(self.turns))):
            mine = [name for turn in Shard(index, count).take(self.turns) for name in turn]
            yield self.steps[self.steps["request"].isin(mine)]


def stretched(costs: Costs, factor: float) -> Costs:
    """The costs with all work of the CPU ``factor`` times as long: the grammar's and the host's,
    and the forwards too where no accelerator computes them."""
    names = ["mask_us", "accept_us", "rollback_us", "jump_us", "host_us"]
    if not costs.overlap:
        names = [name for name in asdict(costs) if name.endswith("_us")]
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})
