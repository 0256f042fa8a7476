"""The trace viewer: a fragment of HTML in which recorded steps can be walked through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.results.record import RunFolder
from harness.results.viewer.data import detailed, pack, strategy_columns, viewable

HERE = Path(__file__).parent


def fragment(folders: Sequence[RunFolder]) -> str:
    """HTML of the viewer over these runs: style, markup, data and script, nothing external.

    A page holds it once. It brings its own colours, for light and dark, and inherits the font.
    """
    blobs: list[str] = []
    runs = [_run(folder, blobs) for folder in folders]
    data = [
        f'<script type="application/json" id="trace-index">{_inline({"runs": runs})}</script>',
        *(
            f'<script type="application/gzip" id="trace-{number}">{blob}</script>'
            for number, blob in enumerate(blobs)
        ),
    ]
    style, markup, steps, viewer = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("viewer.css", "viewer.html", "steps.js", "viewer.js")
    )
    script = f'<script>\n(() => {{\n"use strict";\n{steps}\n{viewer}}})();\n</script>'
    return "\n".join([f"<style>\n{style}</style>", markup, *data, script, ""])


def _run(folder: RunFolder, blobs: list[str]) -> dict[str, Any]:
    """The index entry of one run; its blobs are appended, and named by their number."""

    def add(value: Any) -> int:
        blobs.append(pack(value))
        return len(blobs) - 1

    steps, requests = folder.steps(), folder.requests()
    kinds = dict(zip(requests["request"], requests["kind"], strict=True))
    entry: dict[str, Any] = {"name": folder.path.resolve().name, "viewable": viewable(steps)}
    if not entry["viewable"]:
        return entry
    order = {name: number for number, name in enumerate(kinds)}
    by_strategy = steps.groupby("strategy")
    return {
        **entry,
        "detail": detailed(steps),
        "requests": list(kinds.items()),
        "tokens": add(folder.tokens()),
        "strategies": {
            name: add(
                strategy_columns(
                    by_strategy.get_group(name) if name in by_strategy.groups else steps.iloc[:0],
                    rows,
                    order,
                )
            )
            for name, rows in requests.groupby("strategy", sort=False)
        },
    }


def _inline(value: Any) -> str:
    """JSON that no HTML parser takes for markup."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
