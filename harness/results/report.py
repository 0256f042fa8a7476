"""A run's tables, printed and written.

    python -m harness.results.report runs/2026-11-30-quick
    python -m harness.results.report runs/a runs/b --out build/a-and-b
    python -m harness.results.report runs/2026-11-30-quick --latex >tables.tex
    python -m harness.results.report runs/2026-11-30-paper

Each run folder gets ``report.md``, ``report.csv`` (one tidy table, see ``tidy.py``) and
``page.html`` (the same with figures, in one file that needs no other). Several runs are set side
by side as well: printed, and with ``--out`` written as ``comparison.md``, ``.csv`` and ``.html``.
The folder of a sweep stands for all of its finished jobs; their comparison is written into it.
Runs that differ in their settings are also tables of strategies over one setting, a number each.
With ``--latex`` the comparison tables are printed for a paper instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, exit_status, writing
from harness.results.answer import answer
from harness.results.page import comparison_page, run_page
from harness.results.pivot import pivots
from harness.results.record import RunFolder
from harness.results.repeats import TOGETHER
from harness.results.sections import (
    IN_BRACKETS,
    describe_hardware,
    divergences,
    facts,
    failures,
    legend,
    step_tables,
)
from harness.results.side_by_side import (
    Runs,
    differences,
    labelled,
    settings_table,
    side_by_side,
    tidy_runs,
)
from harness.results.table import Table, comparison_tables, print_tables, to_latex, to_markdown
from harness.results.tidy import tidy
from harness.sweep.folder import SweepFolder, is_sweep, run_folders


def write_report(folder: RunFolder) -> str:
    """Write ``report.md`` from the other files of the run, and return its text. What the report
    command made of an earlier state, before a resume, goes."""
    for stale in (folder.csv_path, folder.page_path):
        stale.unlink(missing_ok=True)
    summary, requests = folder.strategies(), folder.requests()
    tables = [*comparison_tables(summary), *step_tables(folder.steps())]
    blocks = [
        f"# {folder.path.resolve().name}\n",
        " ".join(answer(summary)) + "\n",
        head(folder.manifest()),
        *map(to_markdown, tables),
        glossary(tables),
        "## Failed requests\n",
        _list(failures(requests)),
        "## Divergences from plain\n",
        f"{IN_BRACKETS}\n",
    ]
    for kind, lines in divergences(requests).items():
        blocks += [f"{kind}:\n", _list(lines)]
    text = "\n".join(blocks)
    folder.report_path.write_text(text, encoding="utf-8")
    return text


def head(manifest: Mapping[str, Any]) -> str:
    """What ran, where, and with which versions; Markdown."""
    known = facts(manifest)
    known["Command"] = f"`{known['Command']}`"
    return _list([f"{name}: {text}" for name, text in known.items()])


def glossary(tables: Sequence[Table]) -> str:
    """Every column of the tables, with its unit; Markdown."""
    return "## Legend\n\n" + _list([f"**{name}**: {doc}" for name, doc in legend(tables).items()])


def _list(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines) or "None.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, 2 for a folder that is no run."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder, or a sweep's"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the runs side by side into this folder"
    )
    parser.add_argument(
        "--latex", action="store_true", help="print the comparison tables in LaTeX (booktabs)"
    )
    given = parser.parse_args(arguments)
    return exit_status(lambda: _report(given.runs, given.out, given.latex))


def _report(paths: Sequence[Path], out: Path | None, latex: bool) -> int:
    read = [(path, run_folders(path)) for path in paths]
    folders = [folder for _, found in read for folder in found]
    sweeps = [path for path in paths if is_sweep(path)]
    if out is not None and len(folders) == 1:
        raise ConfigError("--out: there is nothing to set side by side; name a second run")
    for path, found in read:
        if path in sweeps:
            _warn_of_unfinished(path)
        else:
            _report_run(path, found[0], latex)
    if out is None and len(paths) == len(sweeps) == 1:
        (out,) = sweeps
    if sweeps or len(folders) > 1:
        show = _print_latex if latex else print_tables
        runs = labelled(folders)
        differing = differences(runs)
        figures = pivots(runs, differing)
        if out is not None:
            _write_side_by_side(runs, figures, side_by_side(runs, differing), out)
        # A terminal has no room for settings and numbers in one table; a file has.
        show([settings_table(differing), *(figures or [side_by_side(runs, differing[[]])])])
        if out is not None and not latex:
            print(f"{out}/comparison.md, comparison.csv, comparison.html")
    return 0


def _warn_of_unfinished(path: Path) -> None:
    sweep = SweepFolder.open(path)
    if len(sweep.finished) < len(sweep.jobs):
        print("\n".join(sweep.lines()[:-1]), file=sys.stderr)


def _report_run(path: Path, folder: RunFolder, latex: bool) -> None:
    """Write, then print: what is written is complete, whoever stops reading."""
    summary, steps = folder.strategies(), folder.steps()
    with writing(str(path), "report on a copy of it"):
        write_report(folder)
        tidy(summary, steps).to_csv(folder.csv_path, index=False)
        folder.page_path.write_text(run_page(folder), encoding="utf-8")
    if latex:
        _print_latex(comparison_tables(summary))
        return
    print(f"{path}: {describe_hardware(folder.manifest()['hardware'])}\n")
    print("\n".join(answer(summary)) + "\n")
    print_tables([*comparison_tables(summary), *step_tables(steps)])
    print(f"{folder.report_path}, {folder.csv_path.name}, {folder.page_path.name}\n")


def _print_latex(tables: Sequence[Table]) -> None:
    print("\n".join(to_latex(table) for table in tables))


def _shared_head(runs: Runs) -> str:
    """What all runs have alike, and the commands that made them; Markdown."""
    known = [facts(run.manifest()) for run in runs.values()]
    commands = ", ".join(dict.fromkeys(f"`{each.pop('Command')}`" for each in known))
    alike = [item for item in known[0].items() if all(item in each.items() for each in known)]
    return _list([f"{name}: {text}" for name, text in (*alike, ("Command", commands))])


def _write_side_by_side(runs: Runs, figures: Sequence[Table], table: Table, out: Path) -> None:
    blocks = [f"# {len(runs)} runs side by side\n", _shared_head(runs)]
    blocks += [*map(to_markdown, [*figures, table]), glossary([table])]
    if any(TOGETHER in doc for figure in figures for doc in figure.docs):
        blocks.append(f"A table of repeats shows the {TOGETHER}.\n")
    with writing(f"--out: {out}", "name another folder"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "comparison.md").write_text("\n".join(blocks), encoding="utf-8")
        tidy_runs(runs).to_csv(out / "comparison.csv", index=False)
        (out / "comparison.html").write_text(comparison_page(runs), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
