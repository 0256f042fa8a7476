"""``python -m harness`` and ``python -m harness.sweep`` on the tiny pair, in an empty folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cli import main
from harness.sweep.__main__ import main as sweep_main
from tests.tiny_pair import save_pair

ITEMS = [
    {"id": f"{kind}-{number}", "prompt": f"Number {number}?", **grammar}
    for number in range(3)
    for kind, grammar in {
        "digits": {"regex": "[0-9]{6,12}"},
        "choice": {"choice": ["a long way home", "a long way off"]},
    }.items()
]
"""Six short requests."""

Command = Callable[..., int]
"""Runs a command line; returns its exit status."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair and a workload."""
    folder = tmp_path_factory.mktemp("base")
    save_pair(folder)
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    return folder


def settings(base: Path) -> list[str]:
    """What every sweep of these tests is about."""
    return [
        f"pair.target={base / 'target'}",
        f"pair.draft={base / 'draft'}",
        "pair.device=cpu",
        "engine.threads=1",
        "workload=file",
        f"workload.path={base / 'items.jsonl'}",
        "workload.max_new_tokens=20",
        "name=tiny",
    ]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; handlers and variables that a command leaves are put back."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    signal.signal(signal.SIGINT, handler)


def status_of(command: Callable[[], int | None]) -> int:
    """How a command ends."""
    try:
        return command() or 0
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def sweep(base: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``python -m harness -m`` with the tiny pair."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["harness", "-m", *settings(base), *arguments])
        return status_of(main)

    return run


@pytest.fixture
def resume(here: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``python -m harness.sweep resume``."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [])
        return status_of(lambda: sweep_main(["resume", *arguments]))

    return run


def only_sweep(root: Path = Path()) -> Path:
    """The one folder in ``runs``."""
    (folder,) = (root / "runs").iterdir()
    return folder
