"""The main job killed at a random moment, then resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from experiments.faults.cases import (
    CHANGED,
    CRASH,
    HANG,
    ISOLATED,
    LOST,
    OTHER,
    SERVED,
    Case,
    Outcome,
)
from harness.results.journal import Journal
from harness.results.record import RunFolder
from tests.test_durability import ITEMS, OF_BATCHES, STRATEGIES, Process, counts, outputs, settings
from tests.tiny_pair import save_pair

SLOTS = (1, 3)

LIMIT_S = 300.0
"""How long the main job may take: seconds on a quiet machine."""


@cache
def base() -> Path:
    """A folder with a pair and a workload, and with a whole run by number of slots."""
    folder = Path(mkdtemp(prefix="faults-"))
    save_pair(folder)
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    return folder


@cache
def whole(slots: int) -> tuple[Path, float]:
    """The folder of a run that nobody has disturbed, and the seconds that it took."""
    folder, began = base() / f"whole-{slots}", time.monotonic()
    folder.mkdir()
    if _run(folder, slots) != 0:
        raise RuntimeError((folder / "printed.txt").read_text()[-500:])
    return _only(folder / "runs"), time.monotonic() - began


def run(case: Case) -> Outcome:
    """Kill it once or twice, resume it, and compare with the whole run."""
    random = case.random()
    slots = random.choice(SLOTS)
    undisturbed, took_s = whole(slots)
    outcome = Outcome(str(case), f"{', '.join(STRATEGIES)}; {slots} slots")
    with TemporaryDirectory(prefix="faults-") as name:
        folder, finished, ended = Path(name), 0, False
        for _ in range(random.randint(1, 2)):
            after_s = random.uniform(0.1, 1.0) * took_s
            outcome.setting += f"; killed after {after_s / took_s:.0%} of its time"
            process = Process(folder, *_arguments(folder, slots))
            if ended := not _kill(process.inner, after_s):
                break
            finished = _check_kept(folder, finished, outcome)
        if ended:
            status: int | None = 0
        else:
            status = _run(folder, slots)
        if status != 0:
            sort, end = (HANG, "no end") if status is None else (CRASH, f"exit status {status}")
            outcome.violations[sort] = f"{end} of the resumed run"
            return outcome
        _compare(_only(folder / "runs"), undisturbed, slots, outcome)
    outcome.ending = ISOLATED if finished else SERVED
    outcome.reason = f"{finished} finished requests were kept" if finished else ""
    return outcome


def _run(folder: Path, slots: int) -> int | None:
    """Run the job, or the rest of it; its exit status, None if it does not end."""
    process = Process(folder, *_arguments(folder, slots)).inner
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        return None
    return process.exitcode


def _arguments(folder: Path, slots: int) -> Sequence[str]:
    """Of the run to resume, if one is there."""
    left = _unfinished(folder)
    return [f"resume={left}"] if left else settings(base(), slots)


def _unfinished(folder: Path) -> Path | None:
    """The run that can be resumed; one that was killed before its journal began cannot."""
    for path in (folder / "runs").glob("*"):
        journal = RunFolder(path).journal_path
        if journal.is_file() and journal.stat().st_size:
            return path
    return None


def _kill(process: BaseProcess, after_s: float) -> bool:
    """Kill it then; False if it had ended."""
    process.join(after_s)
    if process.exitcode is not None or process.pid is None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return True


def _check_kept(folder: Path, before: int, outcome: Outcome) -> int:
    """How many requests the journal has; never fewer than there were."""
    left = _unfinished(folder)
    if left is None:
        return before
    journal = Journal(RunFolder(left).journal_path)
    journal.close()
    if len(journal.entries) < before:
        outcome.violations[LOST] = f"{before} requests were kept, now {len(journal.entries)}"
    return len(journal.entries)


def _compare(resumed: Path, undisturbed: Path, slots: int, outcome: Outcome) -> None:
    torn = OF_BATCHES if slots > 1 else ()
    wanted, found = outputs(undisturbed), outputs(resumed)
    if len(found) < len(wanted):
        outcome.violations[LOST] = f"{len(found)} of {len(wanted)} requests are in the results"
    elif not found.equals(wanted):
        outcome.violations[CHANGED] = "the outputs are not those of the whole run"
    if different := _differences(counts(undisturbed, *torn), counts(resumed, *torn)):
        outcome.violations[OTHER] = f"other counts: {', '.join(different)}"


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{strategy}.{name}"
        for strategy, metrics in one.items()
        for name, value in metrics.items()
        if other.get(strategy, {}).get(name) != value
    ]


def _only(folder: Path) -> Path:
    """The newest run there: one that died before its journal began leaves an empty one behind."""
    return max(folder.iterdir(), key=lambda path: path.name)
