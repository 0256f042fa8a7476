"""The notebooks: what they read is committed, and what they show is what they compute.

``pytest --nbmake notebooks`` runs them; here their committed outputs are held against a fresh
execution. Figures are left out: another matplotlib draws them with other bytes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.results.metrics import check_identities
from harness.results.record import RunFolder

nbformat = pytest.importorskip("nbformat", reason="needs the extra `test`: nbmake")
execute = pytest.importorskip("notebooks.execute", reason="needs the extra `test`: nbmake")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(execute.FOLDER.glob("*.ipynb"))
RUNS = sorted((ROOT / "experiments" / "results" / "runs").iterdir())
MOST_BYTES = 1_500_000
"""Of the notebooks and the runs that they read, together: a checkout stays small."""

ABSOLUTE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|mnt|opt|usr|var|Users)/")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_run = pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)


def read(path):
    return nbformat.read(path, as_version=4)


def sources(path):
    return "\n".join(cell.source for cell in read(path).cells)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook):
    """By code cell, its printed and displayed text; the HTML of a table is the same once more."""
    shown = {}
    for cell in code_cells(notebook):
        data = [output.get("data", {"text/plain": output.get("text")}) for output in cell.outputs]
        shown[cell.id] = [each.get("text/markdown", each.get("text/plain")) for each in data]
    return shown


@each_notebook
def test_everything_that_is_read_is_committed(path):
    names = re.findall(r'"(\.\./[^"]+)"', sources(path))
    assert names
    files = [(path.parent / name).resolve() for name in names]
    assert all(file.is_relative_to(ROOT) and file.exists() for file in files)
    ignored = subprocess.run(
        ["git", "check-ignore", *files], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert ignored.stdout == ""


@each_notebook
def test_no_path_of_one_machine_is_in_it(path):
    assert ABSOLUTE.search(f"{sources(path)} {texts(read(path))}") is None


@each_notebook
def test_it_ran_from_top_to_bottom_without_an_error(path):
    notebook = read(path)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    kinds = {output.output_type for cell in code_cells(notebook) for output in cell.outputs}
    assert kinds <= {"display_data", "execute_result"}


@each_notebook
def test_it_says_nothing_of_the_machine_that_executed_it(path):
    notebook = read(path)
    assert notebook.metadata == execute.METADATA
    assert not any(cell.metadata for cell in notebook.cells)


@each_notebook
def test_its_own_text_states_no_measured_number(path):
    """Numbers with a fraction or a unit are computed in a cell, or they would go stale."""
    prose = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    measured = re.compile(r"\d+\.\d|\d\s?(?:µs|ms|tok/s|×|times)")
    assert [found for text in prose if (found := measured.search(text))] == []


@each_notebook
def test_it_shows_what_it_computes(path):
    assert texts(execute.executed(path)) == texts(read(path))


@each_run
def test_a_committed_run_is_whole(path):
    run = RunFolder.open(path)
    check_identities(run.strategies(), run.steps())
    assert run.tokens()["texts"]


@each_run
def test_a_committed_run_names_no_path_of_one_machine(path):
    for name in ("manifest.json", "config.yaml", "report.md"):
        assert ABSOLUTE.search((path / name).read_text(encoding="utf-8")) is None


def test_all_of_it_is_small():
    files = [file for folder in RUNS for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in [*files, *NOTEBOOKS]) < MOST_BYTES
