"""Killed, interrupted, or out of disk: what has finished is kept, and the run can go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from harness.cli import main
from harness.errors import ConfigError
from harness.results.journal import Journal
from harness.results.record import MIN_FREE_MIB, RunFolder
from harness.results.schema import METRICS, metric_type
from tests.tiny_pair import save_pair

ITEMS = [
    {"id": f"{kind}-{number}", "prompt": f"Number {number}?", **grammar}
    for number in range(4)
    for kind, grammar in {
        "digits": {"regex": "[0-9]{12,20}"},
        "choice": {"choice": ["a long way home", "a long way off"]},
        "free": {},
    }.items()
]
ITEMS.insert(1, {"id": "bad", "prompt": "?", "regex": "(a"})
STRATEGIES = ("plain", "vllm", "llamacpp")

COUNTS = [
    name
    for name in METRICS
    if metric_type(name).removeprefix("list of ") == "int"
    or name.removesuffix("_ci") in ("accept_rate", "mean_accept_len", "accept_at")
]
OF_BATCHES = ("target_forwards", "draft_forwards")
"""Counts of whole batches, which are others where a batch was torn."""

Harness = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair and a workload."""
    folder = tmp_path_factory.mktemp("base")
    save_pair(folder)
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    return folder


def settings(base: Path, slots: int) -> list[str]:
    return [
        f"pair.target={base / 'target'}",
        f"pair.draft={base / 'draft'}",
        "pair.device=cpu",
        "workload=file",
        f"workload.path={base / 'items.jsonl'}",
        "workload.max_new_tokens=20",
        f"compare=[{','.join(STRATEGIES)}]",
        f"engine.slots={slots}",
        "engine.turn=3",
    ]


@pytest.fixture
def harness(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """``python -m harness`` in this process and an empty folder; returns the newest run folder."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)

    def run(*arguments: str, slots: int = 1) -> Path:
        resumed = any(argument.startswith("resume=") for argument in arguments)
        given = [] if resumed else settings(base, slots)
        monkeypatch.setattr(sys, "argv", ["harness", *given, *arguments])
        main()
        return max((tmp_path / "runs").iterdir(), key=os.path.getmtime)

    yield run
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of slots, the folder of a run that nobody has disturbed."""
    folders = {}
    for slots in (1, 3):
        root = tmp_path_factory.mktemp("whole")
        Process(root, *settings(base, slots)).wait()
        (folders[slots],) = (root / "runs").iterdir()
    return folders


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["harness.cli", "harness.results.report"])
"""Its processes have imported everything when they begin."""
SPAWN = multiprocessing.get_context("spawn")
"""For GPUs: one of those imports asks for them, and CUDA serves no fork of a process that did."""


class Process:
    """``python -m harness`` in ``folder``, with ``script`` run before it."""

    def __init__(self, folder: Path, *arguments: str, script: str = "") -> None:
        self.out = folder / "printed.txt"
        given = folder, self.out, script, arguments
        self.inner = (SPAWN if on_gpu(arguments) else SERVER).Process(target=_run, args=given)
        self.inner.start()

    def wait(self) -> int:
        """The exit status; of a signal, its number below 0."""
        self.inner.join(120)
        assert self.inner.exitcode is not None
        return self.inner.exitcode

    @property
    def printed(self) -> str:
        return self.out.read_text()


def on_gpu(arguments: Sequence[str]) -> bool:
    """Whether a run with these arguments takes a GPU."""
    return torch.cuda.is_available() and "pair.device=cpu" not in arguments


def _run(folder: Path, out: Path, script: str, arguments: Sequence[str]) -> None:
    os.chdir(folder)
    printed = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.argv = ["harness", *arguments]
    # A shell's background jobs ignore it, and so would their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(script, {})
    main()


STOPS: dict[str, str] = {
    "between two requests": """
        append = Journal.append
        def dying(self, request, steps):
            append(self, request, steps)
            dying.left -= 1
            if not dying.left: os.kill(os.getpid(), SIGNAL)
        dying.left = 10
        Journal.append = dying
    """,
    "in the middle of a step": """
        step = DecodeLoop._step
        def dying(self, *given):
            dying.left -= 1
            if not dying.left: os.kill(os.getpid(), SIGNAL)
            return step(self, *given)
        dying.left = 60
        DecodeLoop._step = dying
    """,
    "in the middle of a line of the journal": """
        write = Journal._write
        def dying(self, record):
            dying.left -= 1
            if not dying.left:
                self._file.write(json.dumps(record).encode()[:1000])
                os.kill(os.getpid(), SIGNAL)
            write(self, record)
        dying.left = 8
        Journal._write = dying
    """,
    "while the tables are written": """
        write = pyarrow.parquet.write_table
        def dying(table, path):
            write(table.slice(0, 2), path)
            os.kill(os.getpid(), SIGNAL)
        pyarrow.parquet.write_table = dying
    """,
}


def stop(where: str, sent: str) -> str:
    """A script that makes its process send itself a signal."""
    body = "\n".join(line.removeprefix(" " * 8) for line in STOPS[where].splitlines())
    head = "import json, os, signal, pyarrow.parquet\nfrom harness.loop import DecodeLoop\n"
    head += "from harness.results.journal import Journal\n"
    return head + body.replace("SIGNAL", f"signal.{sent}")


def counts(folder: Path, *without: str) -> dict[str, Any]:
    return {
        name: {key: metrics[key] for key in COUNTS if key not in without}
        for name, metrics in RunFolder.open(folder).strategies().items()
    }


def outputs(folder: Path) -> pd.DataFrame:
    """What was written and why it ended, in an order of its own."""
    names = ["strategy", "request", "finish", "error", "valid", "identical", "text"]
    requests = RunFolder.open(folder).requests()
    return requests[names].sort_values(names[:2], ignore_index=True)


@pytest.mark.parametrize(
    ("where", "slots"), [*((where, 1) for where in STOPS), ("in the middle of a step", 3)]
)
def test_a_killed_run_goes_on_to_the_summary_of_a_whole_one(
    where: str, slots: int, base: Path, whole: dict[int, Path], harness: Harness, tmp_path: Path
) -> None:
    script = stop(where, "SIGKILL")
    process = Process(tmp_path, *settings(base, slots), script=script)
    assert process.wait() == -signal.SIGKILL
    (folder,) = (tmp_path / "runs").iterdir()
    with pytest.raises(ConfigError, match=f"resume={folder}"):
        RunFolder.open(folder)
    journal = Journal(RunFolder.unfinished(folder).journal_path)
    kept = {(each.strategy, each.request) for each, _ in journal.entries}
    journal.close()
    assert len(kept) >= 5
    started = started_requests(harness, f"resume={folder}")
    assert not kept & started
    assert len(kept | started) == len(STRATEGIES) * len(ITEMS)
    torn = OF_BATCHES if slots > 1 else ()
    assert counts(folder, *torn) == counts(whole[slots], *torn)
    pd.testing.assert_frame_equal(outputs(folder), outputs(whole[slots]))
    assert not RunFolder(folder).journal_path.exists()
    manifest = RunFolder(folder).manifest()
    assert manifest["state"] == "finished"
    assert len(manifest["resumed"]) == 1


def started_requests(harness: Harness, *arguments: str) -> set[tuple[str, str]]:
    """Run, and tell what was written to the journal meanwhile."""
    written, append = set(), Journal.append

    def watched(self: Journal, request: Any, steps: Any) -> None:
        written.add((request.strategy, request.request))
        append(self, request, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", watched)
        harness(*arguments)
    return written


@pytest.mark.parametrize("where", ["between two requests", "in the middle of a step"])
def test_an_interrupted_run_is_readable_and_goes_on(
    where: str, base: Path, whole: dict[int, Path], harness: Harness, tmp_path: Path
) -> None:
    script = stop(where, "SIGINT")
    process = Process(tmp_path, *settings(base, 1), script=script)
    assert process.wait() == 130
    (folder,) = (tmp_path / "runs").iterdir()
    printed = process.printed
    run = RunFolder.open(folder)
    assert run.manifest()["state"] == "interrupted"
    assert (folder / "report.md").is_file()
    kept, steps = run.requests(), run.steps()
    assert 5 <= len(kept) < len(STRATEGIES) * len(ITEMS)
    (line,) = [each for each in printed.splitlines() if each.startswith("interrupted: ")]
    assert f"{len(kept)} finished requests are kept" in line
    assert f"resume=runs/{folder.name}" in line
    assert "Traceback" not in printed
    assert set(zip(steps.strategy, steps.request, strict=True)) <= set(
        zip(kept.strategy, kept.request, strict=True)
    )
    harness(f"resume={folder}")
    assert counts(folder) == counts(whole[1])


def test_the_full_checks_find_nothing_in_a_sound_run(
    whole: dict[int, Path], harness: Harness
) -> None:
    folder = harness("engine.paranoid=true", "engine.detail=true")
    assert counts(folder) == counts(whole[1])
    pd.testing.assert_frame_equal(outputs(folder), outputs(whole[1]))


def test_a_second_interrupt_ends_at_once(base: Path, tmp_path: Path) -> None:
    script = stop("between two requests", "SIGINT") + (
        "\nimport time, harness.cli"
        "\ndef slow(*_):"
        "\n    os.rename('runs', 'writing')"
        "\n    time.sleep(60)"
        "\nharness.cli.write_results = slow"
    )
    process = Process(tmp_path, *settings(base, 1), script=script)
    deadline = time.monotonic() + 60
    while not (tmp_path / "writing").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = time.monotonic()
    os.kill(process.inner.pid, signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert time.monotonic() - before < 10


def test_an_interrupt_before_anything_has_finished_leaves_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.run.load_pair", interrupt)
    with pytest.raises(SystemExit) as exit_:
        harness()
    assert exit_.value.code == 130
    assert "interrupted: no request had finished" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    (line,) = [each for each in printed.splitlines() if each.startswith("error: ")]
    return line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_disk_that_fills_up_ends_in_one_line_and_the_run_goes_on(
    whole: dict[int, Path],
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    append = Journal.append

    def filling(self: Journal, request: Any, steps: Any) -> None:
        if len(self._path.read_bytes().splitlines()) > 7:
            self._file.write(b'{"request": ["pl')  # what fits
            self._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        append(self, request, steps)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", filling)
        with pytest.raises(SystemExit) as exit_:
            harness()
    assert exit_.value.code == 2
    (folder,) = Path("runs").iterdir()
    line = last_error(capsys)
    assert "No space left on device" in line
    assert f"7 finished requests are kept; continue with `python -m harness resume={folder}" in line
    harness(f"resume={folder}")
    assert counts(folder) == counts(whole[1])


def test_too_little_disk_is_refused_before_the_models_load(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    free = (MIN_FREE_MIB << 20) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, free))
    monkeypatch.setattr("harness.run.load_pair", lambda *_: pytest.fail("too late"))
    with pytest.raises(SystemExit) as exit_:
        harness()
    assert exit_.value.code == 2
    assert f"{MIN_FREE_MIB - 1} MiB are free there and {MIN_FREE_MIB} needed" in last_error(capsys)
    assert not list(Path().glob("runs/*"))


def killed(base: Path, tmp_path: Path) -> Path:
    script = stop("between two requests", "SIGKILL")
    Process(tmp_path, *settings(base, 1), script=script).wait()
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def refused(harness: Harness, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        harness(*arguments)
    assert exit_.value.code == 2
    return last_error(capsys)


def test_what_cannot_be_resumed_is_refused_in_one_line_and_loses_nothing(
    base: Path,
    whole: dict[int, Path],
    harness: Harness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "is no unfinished run" in refused(harness, capsys, f"resume={whole[1]}")
    assert "is no unfinished run" in refused(harness, capsys, "resume=nowhere")
    folder = killed(base, tmp_path)
    resume = f"resume={folder}"
    before = RunFolder(folder).journal_path.read_bytes()
    line = refused(harness, capsys, resume, "engine.slots=3")
    assert "resume: a run keeps its settings; leave out engine.slots=3" in line
    running = Journal(RunFolder(folder).journal_path)
    assert "is still running" in refused(harness, capsys, resume)
    running.close()
    items = base / "items.jsonl"
    text = items.read_text()
    items.write_text(text.replace("Number 3", "Number 4"))
    assert "the workload has changed" in refused(harness, capsys, resume)
    items.write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr("harness.results.journal._COLUMNS", {"steps": ["tick"], "requests": []})
        assert "is of another version" in refused(harness, capsys, resume)
    assert RunFolder(folder).journal_path.read_bytes() == before
    harness(resume)
    assert counts(folder) == counts(whole[1])
