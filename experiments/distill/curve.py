"""The curve of a training: agreement and loss by steps, as JSON, CSV and a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.distill.checkpoint import Point
from harness.results.drawing import canvas, title
from harness.results.figures import save, style
from harness.results.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

SHOWN = {"bfcl, reference, compact": "-", "bfcl, compact, greedy": "--"}
"""Sources of held-out sequences that are drawn, and how; the tables have all."""
COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)


def write_curve(path: Path, points: Iterable[Point]) -> None:
    """The curves of all students: ``path.json``, ``path.csv``, ``path.svg`` and ``path.png``."""
    rows = [asdict(point) for point in points]
    Path(f"{path}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    table = pd.json_normalize(rows)
    table.to_csv(f"{path}.csv", index=False)
    save(draw(table), path)


def draw(curve: pd.DataFrame) -> Figure:
    """Agreement on held-out calls by training tokens: a colour for each student, solid on reference
    answers and dashed on the target's own outputs.

    Args:
        curve: a row per student and point, as the CSV file has it.
    """
    with style():
        figure, axes = canvas()
        by_student = curve.groupby("student", sort=False)
        for colour, (student, rows) in zip(cycle(COLOURS), by_student, strict=False):
            for source, line in SHOWN.items():
                if (column := f"held_out.{source}") in rows:
                    label = f"{student}, {source.removeprefix('bfcl, ')}"
                    axes.plot(rows.tokens / 1e6, rows[column], line, color=colour, label=label)
        axes.set_xlabel("training tokens, millions")
        axes.set_ylabel("share of equal best tokens")
        axes.legend(loc="lower right")
        title(axes, "Agreement with the target on held-out calls")
    return figure
