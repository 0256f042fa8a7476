"""Execute the notebooks and keep their outputs.

    python -m notebooks.execute                       # all of them, in place
    python -m notebooks.execute notebooks/break_even.ipynb

What is written depends on the notebook and on what it reads alone: it has no times and no versions,
so that a diff shows what has changed in the results.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent

METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}

TIMEOUT_S = 300
"""Of one cell."""


def executed(path: Path) -> Any:
    """A notebook with fresh outputs; it runs in its own folder, on the code of this checkout.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    )
    client.execute(env=environment)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
    return notebook


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        nbformat.write(executed(path), path)
        print(path)


if __name__ == "__main__":
    main()
