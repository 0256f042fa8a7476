"""A run whose requests are shared out over processes; from outside, a run like any other."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.config import Config
from harness.data_parallel.shard import Shard
from harness.data_parallel.throughput import Throughput, throughput_table, throughputs
from harness.data_parallel.worker import Finished
from harness.data_parallel.workers import Workers
from harness.results.journal import Entry
from harness.results.record import Recorder
from harness.results.table import Table
from harness.results.viewer.tokens import TokenTexts, used_ids
from harness.run import Progress


def merge(entry: Entry, shard: Shard, recorder: Recorder) -> None:
    """Record what a shard has finished. Its ticks become those that no other shard has: two shards
    share no forward."""
    for step in entry.steps:
        step.tick = step.tick * shard.count + shard.index
        recorder.step(step)
    recorder.finished(entry.request)


class DataParallelRun:
    """``Run`` over ``engine.dp`` processes, each of which has the whole pair.

    What is dealt out are the turns of a comparison, whole: each batch is then that of a run in one
    process, and so is every count. A strategy alone has one turn with everything in it (unless
    ``engine.turn`` makes more): then requests are dealt out, and only ``target_forwards`` and
    ``draft_forwards``, which count batches, are those of several engines.

    Args:
        config: what to run.
        recorder: where the rows go; theirs is the order of the strategies and the workload.
        progress: called as requests finish.

    Raises:
        HarnessError: something in the config cannot be served.
    """

    def __init__(self, config: Config, recorder: Recorder, progress: Progress) -> None:
        self._recorder, self._progress = recorder, progress
        self._workers = Workers(config, recorder.done)
        self._ready = self._workers.ready
        self._finished: list[Finished] = []

    @property
    def names(self) -> list[str]:
        """See ``Run``."""
        return self._ready[0].strategies

    @property
    def items(self) -> list[str]:
        """Ids of the workload, in its order."""
        return self._ready[0].items

    @property
    def workload(self) -> str:
        """See ``Run``."""
        return self._ready[0].workload

    def warm_up(self) -> None:
        """See ``Run``.

        Raises:
            ShardError: a process failed or died.
        """
        self._workers.do("warm_up")

    def go(self) -> None:
        """See ``Run``. Whatever the end, the processes end too.

        Raises:
            ShardError: a process failed or died, and the others have finished.
        """
        try:
            self._finished = self._workers.do("go", self._take)
            self._workers.close()
        finally:
            self._sort()

    def _take(self, index: int, entry: Entry) -> None:
        merge(entry, Shard(index, len(self._ready)), self._recorder)
        self._progress(entry.request.strategy)

    def _sort(self) -> None:
        """Out of the order in which shards happened to end; a request's steps stay in theirs."""
        strategy = {name: place for place, name in enumerate(self.names)}
        item = {name: place for place, name in enumerate(self.items)}
        for rows in (self._recorder.requests, self._recorder.steps):
            rows.sort(key=lambda row: (strategy[row.strategy], item[row.request]))

    def statistics(self) -> dict[str, dict[str, Any]]:
        """See ``Run``; none, since each process has counted as an engine of its own."""
        return {}

    def setup(self) -> dict[str, Any]:
        """See ``Run``."""
        return {**self._ready[0].setup, "dp": len(self._ready)}

    def facts(self) -> dict[str, Any]:
        """What all processes came to together, and what each did; see ``Throughput`` and ``Run``.
        Of a process that was cut short only what the rows tell."""
        together, names = self._throughputs(), self._workers.devices
        workers: list[dict[str, Any]] = [
            {
                "device": device,
                "items": len(ready.mine),
                "seconds": {name: each.seconds[index] for name, each in together.items()},
            }
            for index, (device, ready) in enumerate(zip(names, self._ready, strict=True))
        ]
        for worker, finished in zip(workers, self._finished, strict=False):
            worker |= {**finished.facts, "wall_s": finished.wall_s, "cpu_s": finished.cpu_s}
        tok_s = {name: each.tok_s for name, each in together.items()}
        return {"dp": len(workers), "tok_s": tok_s, "workers": workers}

    def tables(self) -> list[Table]:
        """See ``Run``: how fast all are together."""
        return [throughput_table(self._throughputs())]

    def token_texts(self, steps: pd.DataFrame) -> TokenTexts:
        """See ``Run``."""
        used = set(map(str, used_ids(steps)))
        return {
            kind: {token: text for token, text in texts.items() if token in used}
            for kind, texts in self._ready[0].texts.items()
        }

    def _throughputs(self) -> dict[str, Throughput]:
        shards = [ready.mine for ready in self._ready]
        return throughputs(self._recorder.steps, self._recorder.requests, shards)
