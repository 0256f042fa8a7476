"""Two ranks of one run, as ``torchrun`` would start them, and what tests ask of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from textwrap import dedent

import pandas as pd

from harness.cli import main
from tests.test_durability import SPAWN, Process, on_gpu

ITEMS = [
    {"id": "choice", "prompt": "A way?", "choice": ["a long way home", "a long way off"]},
    {"id": "digits", "prompt": "A number?", "regex": "[0-9]{6,9}"},
    {"id": "bad", "prompt": "?", "regex": "(a"},
    {"id": "free", "prompt": "Say something."},
    {"id": "pet", "prompt": "A pet?", "json_schema": {"enum": [{"cat": True, "age": 10}, [1]]}},
]

GIVEN_UP_S = 30
"""How soon behind a fault no rank may run any more."""

STEP = """
    import os, signal, time
    from pathlib import Path
    from harness.loop import DecodeLoop
    step = DecodeLoop._step
    def warmed_up():
        (journal,) = Path().glob("runs/*/journal.jsonl")
        return len(journal.read_bytes().splitlines()) > 1
    def dying(self, *given):
        if self._tick == 12 and warmed_up():
            open("fault", "w").close()
            ACTION
        return step(self, *given)
    DecodeLoop._step = dying
"""

TIMES = ("_us", "_ms")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "harness.cli",
        "harness.results.report",
        "torch.distributed.tensor",
        "transformers.models.llama.modeling_llama",
    ]
)
"""Its processes have imported everything when they begin."""


class Rank:
    """``python -m harness`` in ``folder`` as one rank, with ``script`` run before it."""

    def __init__(
        self, folder: Path, number: int, port: int, arguments: Sequence[str], script: str
    ) -> None:
        self._out = folder / f"printed-{number}.txt"
        environment = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        context: BaseContext = SPAWN
        if not on_gpu(arguments):
            environment["CUDA_VISIBLE_DEVICES"] = ""  # else ranks run on GPUs only
            context = SERVER
        given = folder, self._out, environment, script, arguments
        self.inner = context.Process(target=_run, args=given, daemon=True)
        self.inner.start()

    def wait(self, timeout_s: float = 120) -> int | None:
        """The exit status; of a signal, its number below 0; None if it runs still."""
        self.inner.join(timeout_s)
        return self.inner.exitcode

    @property
    def printed(self) -> str:
        return self._out.read_text()

    @property
    def error(self) -> str:
        """Its one line."""
        (line,) = [each for each in self.printed.splitlines() if each.startswith("error: ")]
        assert "Traceback" not in self.printed
        return line


def start(folder: Path, *arguments: str, scripts: Sequence[str] = ("", "")) -> list[Rank]:
    """Start both ranks in ``folder``, each after its script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Rank(folder, number, port, arguments, script) for number, script in enumerate(scripts)]


def run(folder: Path, *arguments: str, scripts: Sequence[str] = ("", "")) -> Path:
    """Run both ranks to their good end; returns the run folder."""
    ranks = start(folder, *arguments, scripts=scripts)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.printed for rank in ranks]
    return run_folder(folder)


def alone(base: Path, folder: Path, *arguments: str, device: str = "cpu") -> Path:
    """The same run in one process."""
    folder.mkdir()
    process = Process(folder, *settings(base, tp=1, device=device), *arguments)
    assert process.wait() == 0, process.printed
    return run_folder(folder)


def run_folder(folder: Path) -> Path:
    (path,) = (folder / "runs").iterdir()
    return path


def settings(base: Path, tp: int = 2, device: str = "cpu") -> list[str]:
    """What tests may override behind it."""
    return [
        f"engine.tp={tp}",
        f"pair.target={base / 'target'}",
        f"pair.draft={base / 'draft'}",
        f"pair.device={device}",
        "workload=file",
        f"workload.path={base / 'items.jsonl'}",
        "workload.max_new_tokens=14",
        "engine.slots=2",
        "engine.threads=1",
    ]


def write_items(base: Path) -> None:
    (base / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))


def table(folder: Path, name: str) -> pd.DataFrame:
    """Every count and output of a table, without what a clock or a rounding has a say in."""
    frame = pd.read_parquet(folder / f"{name}.parquet")
    rounded = [each for each in frame if each.endswith(TIMES) or "gap" in each]
    return frame.drop(columns=rounded).map(str)


def assert_same(left: Path, right: Path) -> None:
    for name in ("steps", "requests"):
        pd.testing.assert_frame_equal(table(left, name), table(right, name))


def until_fault(folder: Path) -> float:
    deadline = time.monotonic() + 60
    while not (folder / "fault").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return time.monotonic()


def assert_given_up(rank: Rank, fault: float) -> None:
    assert rank.wait(GIVEN_UP_S) == 2, rank.printed
    assert time.monotonic() - fault < GIVEN_UP_S


def script(text: str, action: str = "") -> str:
    """One of the scripts, with what is done at its ``ACTION``."""
    return dedent(text).replace("ACTION", action)


def _run(
    folder: Path, out: Path, environment: dict[str, str], script: str, arguments: Sequence[str]
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    printed = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.argv = ["harness", *arguments]
    exec(script, {})
    main()
