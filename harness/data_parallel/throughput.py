"""How fast several processes are together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.core import RequestTrace, StepTrace
from harness.results.metrics import TIMES
from harness.results.table import Table


@dataclass(slots=True)
class Throughput:
    """What one strategy came to on all shards.

    Attributes:
        seconds: by shard, the time of its steps.
        tokens: of all outputs.
    """

    seconds: list[float]
    tokens: int = field(default=0)

    @property
    def tok_s(self) -> float | None:
        """Output tokens over the time of the slowest shard, 1/s: as if all began together, and
        each waited for nobody. ``tok_s`` of the summary divides by the sum of their times instead:
        it is the rate of one process, and what a step costs in it does not depend on how many there
        are (but where they are in each other's way)."""
        slowest = max(self.seconds)
        return self.tokens / slowest if slowest else None

    @property
    def balance(self) -> float | None:
        """Mean time of the shards over that of the slowest; 1 = all end together."""
        slowest = max(self.seconds)
        return sum(self.seconds) / len(self.seconds) / slowest if slowest else None


def throughputs(
    steps: Iterable[StepTrace], requests: Iterable[RequestTrace], shards: Sequence[Iterable[str]]
) -> dict[str, Throughput]:
    """By strategy, in the order of the requests.

    Args:
        steps: step rows.
        requests: request rows.
        shards: ids of the items of each shard.
    """
    shard = {name: index for index, ids in enumerate(shards) for name in ids}
    found: dict[str, Throughput] = {}
    for request in requests:
        mine = found.setdefault(request.strategy, Throughput([0.0] * len(shards)))
        mine.tokens += request.output_tokens
    for step in steps:
        if step.strategy in found:
            spent_us = sum(getattr(step, name) for name in TIMES)
            found[step.strategy].seconds[shard[step.request]] += spent_us / 1e6
    return found


def throughput_table(found: Mapping[str, Throughput]) -> Table:
    """One row per strategy."""
    count = max((len(each.seconds) for each in found.values()), default=0)
    return Table(
        f"{count} processes together",
        ("strategy", "tok/s", "slowest", "balance"),
        (
            "strategy that ran",
            "output tokens of all / time of the slowest process",
            "time of the slowest process's steps",
            "mean time of the processes / that of the slowest",
        ),
        tuple(
            (name, f"{each.tok_s or 0:.0f}", f"{max(each.seconds):.2f}", f"{each.balance or 1:.2f}")
            for name, each in found.items()
        ),
        ("", "1/s", "s", ""),
    )
