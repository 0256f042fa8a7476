"""Go on with a sweep: ``python -m harness.sweep resume DIR``.

Runs the jobs that failed, were killed or never began, and no others: one that was killed goes on
where its journal ends. Everything is as in the first command, the launcher included; overrides
for Hydra change that:

    python -m harness.sweep resume runs/2026-11-30-paper
    python -m harness.sweep resume runs/2026-11-30-paper hydra/launcher=basic
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import cli
from harness.errors import ConfigError, exit_status
from harness.sweep.folder import SweepFolder
from harness.sweep.sweeper import quoted


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, or ends the process as a sweep does."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["resume"])
    parser.add_argument("sweep", type=Path, metavar="DIR", help="the folder of the sweep")
    parser.add_argument("overrides", nargs="*", help="for Hydra: hydra/launcher=…, hydra.….…=…")
    given = parser.parse_args(arguments)
    return exit_status(lambda: _resume(given.sweep, given.overrides))


def _resume(path: Path, overrides: Sequence[str]) -> int:
    sweep = SweepFolder.open(path)
    if others := [each for each in overrides if not each.startswith(("hydra/", "hydra."))]:
        raise ConfigError(f"resume: a sweep keeps its settings; leave out {' '.join(others)}")
    kept = without(sweep.arguments, overrides)
    resume = f"hydra.sweeper.resume={quoted(str(path))}"
    sys.argv = ["harness", "-m", *kept, *overrides, resume]  # Hydra reads it, and nothing else
    cli.main()
    return 0


def without(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The first overrides but for those that later ones replace: another launcher has settings
    of its own."""
    if any(each.startswith("hydra/launcher=") for each in overrides):
        arguments = [each for each in arguments if not each.startswith("hydra/launcher=")]
        arguments = [each for each in arguments if not each.startswith("hydra.launcher.")]
    return list(arguments)


if __name__ == "__main__":
    sys.exit(main())
