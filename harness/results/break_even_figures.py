"""The break-even map, drawn."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.results.break_even import Spot, verdict
from harness.results.costs import GUIDED
from harness.results.drawing import canvas, patches, percent, title
from harness.results.figures import style
from harness.results.palette import INK, looks

RATIO = "draft forward / target forward"
ROUND_TRIP = "round trip to the host (µs)"


@style()
def where_guiding_pays(limits: pd.DataFrame, spot: Spot) -> Figure:
    """Guided drafting pays below all lines: one line for each strategy that it has to beat.

    Args:
        limits: from ``break_even_limits``, µs; ``spot.ratio`` is one of its columns.
        spot: the pair that was run.
    """
    figure, axes = canvas()
    lowest = limits.min()
    shade = to_rgba(looks([GUIDED])[GUIDED].colour, 0.25)
    axes.fill_between(limits.columns, 0, lowest, lowest > 0, interpolate=True, color=shade)
    top = 1.6 * max(lowest.max(), spot.sync_us, 1.0)
    for name, look in looks(limits.index).items():
        line = limits.loc[name]
        above = "\n(above the top)" if line.min() > top else ""
        axes.plot(line.index, line, color=look.colour, label=f"as fast as {name}{above}")
    _mark(axes, spot)
    axes.margins(x=0)
    axes.set_ylim(0, top)
    axes.set(xlabel=RATIO, ylabel=ROUND_TRIP)
    title(axes, verdict(limits, spot))
    lines, _ = axes.get_legend_handles_labels()
    region = Patch(color=shade, label=f"{GUIDED} is faster\nthan all of these")
    figure.legend(handles=[*lines, region], loc="outside right center")
    return figure


@style()
def fastest_map(winners: pd.DataFrame, spot: Spot) -> Figure:
    """Which strategy is the fastest where.

    Args:
        winners: from ``fastest_by_round_trip``.
        spot: the pair that was run.
    """
    fastest = dict.fromkeys(map(str, winners.to_numpy().ravel()))
    colours = {name: look.colour for name, look in looks(fastest).items()}
    places = {name: place for place, name in enumerate(colours)}
    figure, axes = canvas()
    axes.pcolormesh(
        winners.columns,
        winners.index,
        winners.map(places.__getitem__).to_numpy(),
        cmap=ListedColormap(list(colours.values())),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        shading="nearest",
    )
    _mark(axes, spot)
    axes.grid(False)
    axes.set(xlabel=RATIO, ylabel=ROUND_TRIP)
    share = (winners == GUIDED).to_numpy().mean()
    title(axes, f"{GUIDED} is the fastest on {percent(share)} of this map")
    figure.legend(handles=patches(colours), loc="outside right center")
    return figure


def _mark(axes: Axes, spot: Spot) -> None:
    axes.plot(*spot, "*", color=INK, markersize=14, markeredgecolor="white", zorder=3)
    axes.lines[-1].set(label="_", clip_on=False)
    axes.annotate("this run", spot, (9, 7), textcoords="offset points", fontweight="bold")
