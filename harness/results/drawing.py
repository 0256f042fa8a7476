"""What several figures are drawn with; the figures themselves are in ``figures.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import matplotlib.colors
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_CHARACTER = 0.025
"""Width of a character, as a share of the longest bar: a segment that is narrower than its number
stays empty."""


def canvas(bars: int | None = None) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; with ``bars`` its height follows their number."""
    figure = Figure() if bars is None else Figure(figsize=(7.2, 1.5 + 0.34 * bars))
    return figure, figure.subplots()


def nothing(reason: str) -> Figure:
    """A figure of a run that has nothing to draw, and why."""
    figure, axes = canvas(bars=1)
    axes.set_axis_off()
    axes.text(0, 0.5, reason, fontweight="bold", fontsize=11, va="center")
    return figure


def bars(
    axes: Axes,
    parts: pd.DataFrame,
    colours: Mapping[str, str],
    labels: Mapping[str, str],
    number: Callable[[float], str],
) -> None:
    """Stacked horizontal bars, the first row on top, their legend above the axes.

    Args:
        axes: to draw in.
        parts: ``[bars, parts]``; the parts of a bar stand side by side.
        colours: by part, in the order of drawing.
        labels: by part, for the legend.
        number: how a value is written into its segment.
    """
    names = [str(name) for name in parts.index]
    longest = parts.sum(axis=1).max()
    left = pd.Series(0.0, index=parts.index)
    for part, colour in colours.items():
        values = parts[part]
        container = axes.barh(names, values, left=left, color=colour, label=labels[part])
        texts = [(value, number(value)) for value in values]
        shown = [text if value > _CHARACTER * len(text) * longest else "" for value, text in texts]
        axes.bar_label(container, shown, label_type="center", fontsize=9, color=ink_on(colour))
        left = left + values
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.legend(
        handles=patches({labels[part]: colour for part, colour in colours.items()}),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        borderpad=0,
        ncols=len(colours),
        handlelength=1,
        columnspacing=1.2,
    )


def patches(colours: Mapping[str, str]) -> list[Patch]:
    """What a legend needs to show colours by label."""
    return [Patch(color=colour, label=label) for label, colour in colours.items()]


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour (WCAG 2.2, contrast ratio)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in matplotlib.colors.to_rgb(colour)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "white"


def title(axes: Axes, message: str, *, above_legend: bool = False) -> None:
    """The message, flush with the left edge of the axes."""
    axes.set_title(message, pad=24 if above_legend else 8)


def percent(share: float) -> str:
    """``0.3 %``, ``12 %``: two digits are enough for a title."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def count(number: int, noun: str) -> str:
    """``1 token``, ``4 tokens``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
