"""Compare a run with a baseline: ``python -m harness.results.regress BASELINE RUN…``.

Prints Markdown, the verdict first. Counts, and ratios of counts, have to be equal.
``baseline.BETTER`` says in which direction each is better: a worse one is a regression; a better
one, or one that is neither, is a change that does not fail, since an improved strategy moves many
neutral counts at once. Either way the verdict asks to renew the baseline. Times are compared as
multiples of ``plain`` in the same run, and fail only with ``--gate-times``: the noise of a ratio
is its bootstrap interval, stretched over all repeats where several RUNs of one commit are given,
and a strategy is slower when its whole interval lies below the baseline's.

BASELINE is a run folder, or the one file that ``--renew BASELINE RUN`` writes: settings, versions
and counts, sorted, no times, so that a review sees in its diff what changed and nothing else.

Two sweeps are compared group by group: the jobs that differ in nothing but the strategy are one
run, and stand against those that were asked for the same.

Exit status: 0 fine; 1 a regression; 2 when the two cannot be compared, with the reason in one
line: bad files, other settings (pair, workload, seed, …), other strategies, no ``plain``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, exit_status
from harness.results.baseline import BETTER, Better, Snapshot, check_comparable
from harness.results.metrics import PLAIN, Interval
from harness.results.schema import METRICS
from harness.results.table import NONE, Table, to_markdown
from harness.sweep.folder import is_sweep
from harness.sweep.snapshots import snapshots

EXIT_REGRESSION = 1


class Finding(StrEnum):
    """What became of one value, the most urgent first."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Difference:
    """A count that is not what it was."""

    strategy: str
    metric: str
    before: Any
    after: Any

    @property
    def finding(self) -> Finding:
        """A value that is gone (no draft left, nothing to judge) is worse, wherever one matters."""
        better = BETTER[self.metric]
        if better is Better.NEITHER or self.before is None:
            return Finding.CHANGE
        if self.after is None or (self.after > self.before) != (better is Better.HIGHER):
            return Finding.REGRESSION
        return Finding.IMPROVEMENT


def differences(baseline: Snapshot, run: Snapshot) -> list[Difference]:
    """Every count that is not equal, regressions first.

    Raises:
        ConfigError: they cannot be compared.
    """
    check_comparable(baseline, run)
    order = list(Finding)
    found = [
        Difference(strategy, metric, before[metric], after[metric])
        for strategy, after in run.strategies.items()
        for before in [baseline.strategies[strategy]]
        for metric in BETTER
        if not _equal(before[metric], after[metric])
    ]
    return sorted(found, key=lambda each: order.index(each.finding))


def _equal(before: Any, after: Any) -> bool:
    """Exactly, but for the last bits of a ratio: processors add floats up in different orders."""
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=1e-12)
    return bool(before == after)


@dataclass(frozen=True, slots=True)
class Speed:
    """A strategy's tokens per second as multiples of plain's, and their 95 % intervals."""

    strategy: str
    before: Interval
    after: Interval

    @property
    def slower(self) -> bool:
        return self.after[1] < self.before[0]

    @property
    def verdict(self) -> str:
        return "slower" if self.slower else "faster" if self.after[0] > self.before[1] else "noise"


def speeds(baseline: Snapshot, runs: Sequence[Snapshot]) -> list[Speed]:
    """The strategies whose times both sides have, without ``plain`` itself.

    Args:
        baseline: what is compared with.
        runs: repeats of one commit; their intervals are merged into the range of all.
    """
    found = []
    for strategy, metrics in baseline.strategies.items():
        before = metrics.get("tok_s_ratio_ci")
        after = [run.strategies[strategy].get("tok_s_ratio_ci") for run in runs]
        if strategy != PLAIN and before and all(after):
            lows, highs = zip(*after, strict=True)
            found.append(Speed(strategy, tuple(before), (min(lows), max(highs))))
    return found


def repeats(paths: Sequence[Path]) -> list[Snapshot]:
    """Runs of one commit.

    Raises:
        ConfigError: one is no run folder, or its counts are not those of the first.
    """
    runs = [Snapshot.read(path) for path in paths]
    check_repeats(paths, runs)
    return runs


def check_repeats(paths: Sequence[Path], runs: Sequence[Snapshot]) -> None:
    """The counts of all have to be those of the first.

    Raises:
        ConfigError: they are not.
    """
    for path, run in zip(paths[1:], runs[1:], strict=True):
        for each in differences(runs[0], run):
            raise ConfigError(
                f"{path} is no repeat of {paths[0]}: {each.metric} of {each.strategy} is "
                f"{each.after}, not {each.before}; give runs of one commit"
            )


def report(
    baseline: Snapshot,
    run: Snapshot,
    found: Sequence[Difference],
    times: Sequence[Speed],
    gate: bool,
) -> str:
    """The verdict, the counts that differ with their meaning, and the times; Markdown.

    Args:
        baseline: what is compared with.
        run: the run.
        found: counts that differ, from ``differences``.
        times: from ``speeds``.
        gate: whether being slower is a regression.
    """
    slower = [each.strategy for each in times if gate and each.slower]
    sections = [_verdict(len(run.strategies), found, slower)]
    if found:
        listed = dict.fromkeys(each.metric for each in found)
        legend = [f"- {name}: {METRICS[name]}; {BETTER[name]}" for name in listed]
        sections += [*_advice(baseline, run), to_markdown(_counts(found)), "\n".join(legend)]
    if times:
        sections.append(to_markdown(_times(times)))
    return "\n\n".join(section.rstrip() for section in sections)


def _verdict(strategies: int, found: Sequence[Difference], slower: Sequence[str]) -> str:
    number = Counter(each.finding for each in found)
    parts = [f"{number[kind]} × {kind}" for kind in Finding if number[kind]]
    parts += [f"slower: {', '.join(slower)}"] if slower else []
    if number[Finding.REGRESSION] or slower:
        return f"# Regression: {', '.join(parts)}"
    if found:
        return f"# No regression, but renew the baseline: {', '.join(parts)}"
    return f"# No regression: {len(BETTER)} counts of {strategies} strategies are equal"


def _advice(baseline: Snapshot, run: Snapshot) -> Iterator[str]:
    yield (
        "Where the differences are meant, renew the baseline (`make baseline` for the committed "
        "one) and let the review see them."
    )
    moved = [
        f"{name} {before} → {run.made_with.get(name)}"
        for name, before in baseline.made_with.items()
        if run.made_with.get(name) != before
    ]
    if moved:
        yield (
            f"The baseline was made elsewhere: {', '.join(moved)}. That alone can turn a near tie "
            "of two logits; if the baseline's own commit now differs too, renew it."
        )


def _counts(found: Sequence[Difference]) -> Table:
    return Table(
        "Counts",
        ("strategy", "metric", "baseline", "run", "finding"),
        ("strategy that ran", "name in summary.json", "value there", "value here", "what it means"),
        tuple(
            (each.strategy, each.metric, _cell(each.before), _cell(each.after), each.finding)
            for each in found
        ),
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value)) or NONE
    return NONE if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _times(times: Sequence[Speed]) -> Table:
    return Table(
        "Tokens per second, as multiples of plain",
        ("strategy", "baseline", "run", "finding"),
        ("strategy that ran", "95 % interval there", "95 % interval here", "what it means"),
        tuple(
            (each.strategy, _range(each.before), _range(each.after), each.verdict) for each in times
        ),
    )


def _range(interval: Interval) -> str:
    return "–".join(f"{bound:.2f}" for bound in interval)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.regress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("baseline", type=Path, help="a run folder, a sweep's or a file")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="repeats of one commit")
    parser.add_argument("--gate-times", action="store_true", help="fail where one is slower, too")
    parser.add_argument("--renew", action="store_true", help="write BASELINE from RUN")
    given = parser.parse_args(arguments)
    return exit_status(lambda: _compare(given))


def _compare(given: argparse.Namespace) -> int:
    if is_sweep(given.baseline) or any(map(is_sweep, given.runs)):
        return _compare_sweeps(given)
    runs = repeats(given.runs)
    if given.renew:
        runs[0].write(given.baseline)
        return 0
    text, worse = judge(given.baseline, Snapshot.read(given.baseline), runs, given.gate_times)
    print(text)
    return EXIT_REGRESSION if worse else 0


def _compare_sweeps(given: argparse.Namespace) -> int:
    if given.renew:
        raise ConfigError("--renew: a sweep has no file for its baseline; keep its folder")
    baseline, runs = snapshots(given.baseline), [snapshots(path) for path in given.runs]
    for path, run in zip(given.runs, runs, strict=True):
        if unlike := sorted(baseline.keys() ^ run.keys()):
            raise ConfigError(
                f"not comparable: only one of {given.baseline} and {path} has {unlike[0]}; compare "
                "sweeps over the same settings"
            )
    judged = {}
    for group, before in baseline.items():
        repeated = [run[group] for run in runs]
        check_repeats(given.runs, repeated)
        judged[group] = judge(given.baseline, before, repeated, given.gate_times)
    worse = [group for group, (_, regression) in judged.items() if regression]
    sections = [f"# {len(worse)} of {len(judged)} groups of the sweep are worse"]
    sections += [f"## {group}\n\n##{text}" for group, (text, _) in judged.items()]
    print("\n\n".join(sections))
    return EXIT_REGRESSION if worse else 0


def judge(path: Path, baseline: Snapshot, runs: Sequence[Snapshot], gate: bool) -> tuple[str, bool]:
    """The report on repeats of a run, and whether there is a regression.

    Args:
        path: where the baseline is from.
        baseline: what is compared with.
        runs: repeats of one commit.
        gate: whether being slower is a regression.

    Raises:
        ConfigError: they cannot be compared.
    """
    found = differences(baseline, runs[0])
    times = speeds(baseline, runs)
    if gate and not times:
        raise ConfigError(f"--gate-times: {path} has no times; name a run folder")
    worse = any(each.finding is Finding.REGRESSION for each in found)
    slower = gate and any(each.slower for each in times)
    return report(baseline, runs[0], found, times, gate), worse or slower


if __name__ == "__main__":
    sys.exit(main())
