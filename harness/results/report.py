"""``python -m harness.results.report RUN…``: print a run's tables and write its ``report.md``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core import Finish
from harness.errors import exit_status
from harness.results.metrics import NEAR_TIE
from harness.results.record import RunFolder
from harness.results.table import Table, comparison_tables, print_tables, to_markdown

LISTED = 20
"""Divergences that are listed by strategy and kind; ``requests.parquet`` has all."""


def write_report(folder: RunFolder) -> str:
    """Write ``report.md`` from the other files of the run, and return its text."""
    tables = comparison_tables(folder.strategies())
    requests = folder.requests()
    sections = [
        head(folder.path.resolve().name, folder.manifest()),
        *map(to_markdown, tables),
        legend(tables),
        failures(requests),
        divergences(requests),
    ]
    text = "\n".join(sections)
    folder.report_path.write_text(text, encoding="utf-8")
    return text


def head(name: str, manifest: Mapping[str, Any]) -> str:
    """What ran, where, and with which versions."""
    hardware, git = manifest["hardware"], manifest["git"]
    versions = ", ".join(
        f"{package} {version}" for package, version in manifest["versions"].items() if version
    )
    commit = git["commit"] or "none (not a checkout)"
    setup = ", ".join(f"{name} {value}" for name, value in manifest.get("setup", {}).items())
    lines = [
        *([f"- Setup: {setup}"] if setup else []),
        f"- Hardware: {describe_hardware(hardware)}",
        f"- Versions: {versions}",
        f"- Command: `{shlex.join(manifest['command'])}`",
        f"- Date: {manifest['date']}",
        f"- Commit: {commit}{', with uncommitted changes' if git['dirty'] else ''}",
    ]
    return "\n".join([f"# {name}", "", *lines, ""])


def describe_hardware(hardware: Mapping[str, Any]) -> str:
    """One line: processor, cores, memory, and the GPUs with their driver."""
    line = f"{hardware['cpu']}, {hardware['cores']} cores"
    if hardware["memory_gib"] is not None:
        line += f", {hardware['memory_gib']} GiB"
    gpu = hardware["gpu"]
    return (
        line if gpu is None else f"{line}; {gpu['count']} × {gpu['name']}, driver {gpu['driver']}"
    )


def legend(tables: Sequence[Table]) -> str:
    """Every column of the tables, with its unit."""
    docs = {
        header: doc
        for table in tables
        for header, doc in zip(table.headers, table.docs, strict=True)
    }
    lines = [f"- **{header}**: {doc}" for header, doc in docs.items()]
    return "\n".join(["## Legend", "", *lines, ""])


def failures(requests: pd.DataFrame) -> str:
    """The failed requests and why they failed."""
    failed = requests[requests["finish"] == Finish.FAILED.value]
    lines = [
        f"- {strategy}, request {request}: {' '.join(error.split())}"
        for strategy, request, error in zip(
            failed["strategy"], failed["request"], failed["error"], strict=True
        )
    ]
    return "\n".join(["## Failed requests", "", *(lines or ["None."]), ""])


def divergences(requests: pd.DataFrame) -> str:
    """Outputs that differ from plain's: near ties apart from the real ones.

    At a near tie plain's logit lead is below ``NEAR_TIE``: another width of the forward may
    flip it. Everything else is real, also what has no gap (sampling, an output cut short).
    """
    diverged = requests[requests["first_divergence"] >= 0]
    near = diverged["divergence_gap"] < NEAR_TIE
    return "\n".join(
        [
            "## Divergences from plain",
            "",
            "In brackets plain's logit lead there; inf: its grammar allowed no second token.",
            "",
            f"Near ties (plain's logit lead below {NEAR_TIE:g}):",
            "",
            *_divergence_lines(diverged[near]),
            "",
            "Real ones:",
            "",
            *_divergence_lines(diverged[~near]),
            "",
        ]
    )


def _divergence_lines(diverged: pd.DataFrame) -> Iterator[str]:
    """One line by strategy: ``request@index (gap)``, the first ``LISTED`` of them."""
    if diverged.empty:
        yield "None."
    for strategy, rows in diverged.groupby("strategy", sort=False):
        listed = rows.head(LISTED)
        places = [
            f"{request}@{index}" + ("" if pd.isna(gap) else f" ({gap:.2g})")
            for request, index, gap in zip(
                listed["request"],
                listed["first_divergence"],
                listed["divergence_gap"],
                strict=True,
            )
        ]
        more = f", and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
        yield f"- {strategy}, {len(rows)}: {', '.join(places)}{more}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, 2 for a folder that is no run."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.report", description="Print and write the report of runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    paths: list[Path] = parser.parse_args(arguments).runs
    return exit_status(lambda: _report(paths))


def _report(paths: Sequence[Path]) -> int:
    for path in paths:
        folder = RunFolder.open(path)
        print(f"{path}: {describe_hardware(folder.manifest()['hardware'])}\n")
        print_tables(comparison_tables(folder.strategies()))
        write_report(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
