"""Where a run took place and with what: enough to repeat it, nothing private."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import harness

_PACKAGES = ("torch", "transformers", "xgrammar", "llguidance", "triton")


def manifest(command: Sequence[str]) -> dict[str, Any]:
    """Versions, hardware, commit, date and command of this process, ready for JSON.

    Args:
        command: the command line; ``sys.argv`` will do.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _as_typed(command),
        "versions": {
            "python": platform.python_version(),
            "harness": harness.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "hardware": {
            "cpu": _cpu_model(),
            "cores": cores(),
            "memory_gib": _memory_gib(),
            "gpu": _gpu(),
        },
        "git": _git_state(Path(harness.__file__).parent),
    }


def _as_typed(command: Sequence[str]) -> list[str]:
    """The command without the machine's paths in its first word.

    ``python -m package`` leaves the path of the module's file in ``sys.argv[0]``.
    """
    if not command:
        return []
    program, *arguments = command
    if program.endswith("__main__.py"):
        return ["python", "-m", Path(program).parent.name, *arguments]
    return [Path(program).name, *arguments]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use, which a container or ``taskset`` can make fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such names on this system
        return None
    return round(size / 2**30, 1)


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "driver": drivers.splitlines()[0] if drivers else None,
        "cuda": torch.version.cuda,
    }


def _git_state(package: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that ``package`` is tracked in; nulls outside one.

    A package that was installed somewhere below a foreign checkout is not tracked by it.
    """
    git = ("git", "-C", str(package))
    if _output(*git, "ls-files", "__init__.py"):
        commit = _output(*git, "rev-parse", "HEAD")
        changes = _output(*git, "status", "--porcelain")
        if commit and changes is not None:
            return {"commit": commit, "dirty": bool(changes)}
    return {"commit": None, "dirty": None}


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, by dotted name; lists stay."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[name] = value
    return found
