"""The figures: pure functions from recorded frames to matplotlib figures.

Each has one message, its title, worked out from the data. ``steps`` is the frame of
``steps.parquet``. Whatever a run lacks (drafts, rollbacks, fills) is said in the figure's place.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from harness.results import distributions
from harness.results.drawing import bars, canvas, count, nothing, patches, percent, title
from harness.results.metrics import PLAIN
from harness.results.palette import FATES, INK, KINDS, PHASES, looks
from harness.results.schema import Metrics

STYLE = Path(__file__).with_name("harness.mplstyle")

DEEP = 8
"""Rollbacks of this depth and beyond share one bar."""

_FATES = {
    "accepted": "accepted",
    "rejected_model": "target disagreed",
    "rejected_grammar": "illegal",
    "trimmed": "trimmed before verify",
    "past_stop": "past the stop",
}


@contextmanager
def style() -> Iterator[None]:
    """The one style of all figures."""
    with matplotlib.style.context(STYLE):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write ``path.svg`` and ``path.png``; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.svg").write_text(svg(figure), encoding="utf-8")
    with style():
        figure.savefig(Path(f"{path}.png"))


def svg(figure: Figure) -> str:
    """The figure as SVG on a transparent ground, its text as text."""
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


@style()
def acceptance_by_position(steps: pd.DataFrame) -> Figure:
    """How far into the drafts the target follows: one line a strategy."""
    shares = distributions.acceptance(steps)
    if shares.empty:
        return nothing("No strategy drafted.")
    figure, axes = canvas()
    for name, look in looks(shares.index).items():
        axes.plot(
            shares.columns,
            100 * shares.loc[name],
            color=look.colour,
            marker=look.marker,
            label=name,
        )
    mean = shares.sum(axis=1)
    best = str(mean.idxmax())
    title(axes, f"{best} gets most drafts accepted: {mean[best]:.2f} per verify step")
    axes.set(xlabel="draft position i", ylabel="verify steps that accept\nat least i drafts (%)")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside right upper")
    return figure


@style()
def time_split(steps: pd.DataFrame) -> Figure:
    """Where the time of a token goes: one stacked bar a strategy."""
    split = distributions.phases(steps)
    if split.empty:
        return nothing("No request came beyond its prefill.")
    total = split.sum(axis=1)
    grammar = split["grammar_us"] / total
    figure, axes = canvas(len(split))
    labels = {name: name.removesuffix("_us") for name in PHASES}
    bars(axes, split, PHASES, labels, "{:.3g}".format)
    for place, name in enumerate(split.index):
        note, end = f"{total[name]:.3g} ms, grammar {percent(grammar[name])}", (total[name], place)
        axes.annotate(note, end, (4, 0), textcoords="offset points", va="center", fontsize=9)
    most = str(grammar.idxmax())
    title(
        axes,
        f"Grammar work on the host: at most {percent(grammar[most])} of a token's time ({most})",
        above_legend=True,
    )
    axes.set_xlabel("time per token, prefill excluded (ms)")
    axes.set_xlim(0, 1.35 * total.max())
    return figure


@style()
def why_drafts_die(steps: pd.DataFrame) -> Figure:
    """What becomes of the drafts: one stacked bar a strategy."""
    shares = distributions.fates(steps)
    if shares.empty:
        return nothing("No strategy drafted.")
    figure, axes = canvas(len(shares))
    bars(axes, 100 * shares, FATES, _FATES, "{:.0f}".format)
    lost = 1 - shares["accepted"]
    message = f"{lost.idxmin()} loses {percent(lost.min())} of its drafts"
    if len(lost) > 1:
        message += f", the fewest; {lost.idxmax()} loses most, {percent(lost.max())}"
    title(axes, message, above_legend=True)
    axes.set_xlabel("drafts, before trimming (%)")
    axes.set_xlim(0, 100)
    return figure


@style()
def rollback_depths(steps: pd.DataFrame) -> Figure:
    """How far matchers are rolled back: one histogram a strategy, stacked by kind."""
    calls = distributions.depths(steps)
    if calls.empty:
        return nothing("No matcher was rolled back.")
    names = list(calls["strategy"].unique())
    verified = distributions.verify_steps(steps)["strategy"].value_counts()
    across = min(4, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(7.2, 1.6 + 1.6 * down))
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=False):
        rows = calls[calls["strategy"] == name]
        _histogram(axes, rows.assign(calls=100 * rows["calls"] / verified[name]))
        axes.set_title(name, fontsize=10, fontweight="normal")
    for axes in panels.flat[len(names) - across : len(names)]:
        axes.tick_params(labelbottom=True)  # nothing is below it
    for axes in panels.flat[len(names) :]:
        axes.set_axis_off()
    _depth_ticks(panels[0, 0], min(DEEP, calls["depth"].max()))
    used = {kind: colour for kind, colour in KINDS.items() if kind in set(calls["kind"])}
    figure.legend(handles=patches(used), loc="outside right upper")
    most = (calls.groupby("strategy")["calls"].sum() / verified).idxmax()
    deepest = calls["depth"].max()
    figure.suptitle(
        f"{most} rolls back most often; the deepest rollback is {count(deepest, 'token')}",
        x=0.01,
        horizontalalignment="left",
    )
    figure.supxlabel("depth of a rollback (tokens)")
    figure.supylabel("calls per 100 verify steps")
    return figure


def _histogram(axes: Axes, rows: pd.DataFrame) -> None:
    """Bars at depths 1 … ``DEEP``, the kinds on top of each other."""
    bottom = np.zeros(DEEP)
    for kind, colour in KINDS.items():
        own = rows[rows["kind"] == kind]
        place = own["depth"].clip(1, DEEP) - 1
        heights = np.bincount(place, weights=own["calls"], minlength=DEEP)
        shown = heights > 0  # a bar without height is a path all the same
        axes.bar(np.arange(1, DEEP + 1)[shown], heights[shown], bottom=bottom[shown], color=colour)
        bottom += heights
    axes.grid(False, axis="x")


def _depth_ticks(axes: Axes, deepest: int) -> None:
    depths = range(1, deepest + 1)
    axes.set_xticks(depths, [f"{depth}+" if depth == DEEP else str(depth) for depth in depths])
    axes.set_xlim(0.4, deepest + 0.6)


@style()
def fill_times(steps: pd.DataFrame) -> Figure:
    """How long one mask fill takes: median, 90th and 99th percentile of each strategy."""
    percentiles = distributions.fill_percentiles(steps)
    if percentiles.empty:
        return nothing("No mask was filled.")
    figure, axes = canvas(len(percentiles))
    marks = dict(zip(percentiles.columns, ("o", "D", ">"), strict=True))
    for place, (name, look) in enumerate(looks(percentiles.index).items()):
        row = percentiles.loc[name]
        axes.plot(row, [place] * len(row), color=look.colour, zorder=1)
        for at, marker in marks.items():
            axes.scatter(row[at], place, color=look.colour, marker=marker, s=42, zorder=2)
    axes.set_yticks(range(len(percentiles)), percentiles.index)
    axes.set_ylim(len(percentiles) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("one mask row filled (µs, logarithmic)")
    slowest = percentiles[99].idxmax()
    title(axes, f"One fill in a hundred takes {percentiles[99].max():.0f} µs or more ({slowest})")
    handles = [
        axes.scatter([], [], color=INK, marker=marker, label=f"p{at}")
        for at, marker in marks.items()
    ]
    figure.legend(handles=handles, loc="outside right upper")
    return figure


@style()
def speed_against_acceptance(summary: Mapping[str, Metrics]) -> Figure:
    """Whether acceptance pays: tokens per second over tokens per verify step, with intervals.

    Args:
        summary: metrics by strategy name. With ``plain`` among them a line shows the speed
            that its own steps would give at each acceptance length.
    """
    timed = {name: metrics for name, metrics in summary.items() if _has_point(metrics)}
    if not timed:
        return nothing("No strategy emitted a token behind its prefill.")
    figure, axes = canvas()
    longest = max(metrics["mean_accept_len_ci"][1] for metrics in timed.values())
    if PLAIN in timed:
        ideal = np.array([1.0, longest])
        axes.plot(ideal, timed[PLAIN]["tok_s"] * ideal, color=INK, linestyle=":", linewidth=1.2)
        axes.lines[-1].set_label("steps as cheap\nas plain's")
    for name, look in looks(timed).items():
        metrics = timed[name]
        x, y = metrics["mean_accept_len"], metrics["tok_s"]
        axes.errorbar(
            x,
            y,
            xerr=_arms(x, metrics["mean_accept_len_ci"]),
            yerr=_arms(y, metrics["tok_s_ci"]),
            color=look.colour,
            marker=look.marker,
            label=name,
            linewidth=1.2,
        )
    title(axes, _speed_message(timed))
    axes.set(xlabel="tokens per verify step (95 % interval)", ylabel="tokens/s (95 % interval)")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    return figure


def _has_point(metrics: Metrics) -> bool:
    return metrics["mean_accept_len_ci"] is not None and metrics["tok_s_ci"] is not None


def _arms(value: float, interval: tuple[float, float]) -> list[list[float]]:
    """Lengths of an error bar below and above, which rounding must not make negative."""
    return [[max(0.0, value - interval[0])], [max(0.0, interval[1] - value)]]


def _speed_message(timed: Mapping[str, Metrics]) -> str:
    fastest = max(timed, key=lambda name: timed[name]["tok_s"])
    longest = max(timed, key=lambda name: timed[name]["mean_accept_len"])
    if len(timed) == 1:
        return f"{fastest} makes {timed[fastest]['tok_s']:.1f} tokens/s"
    if fastest == longest:
        return f"{fastest} accepts most, and is fastest"
    return f"{longest} accepts most, but {fastest} is fastest"


@style()
def speed_ratios(runs: Mapping[str, Mapping[str, Metrics]]) -> Figure:
    """Tokens per second to plain's, with intervals: strategies below each other, run by run.

    Args:
        runs: by label of the run, metrics by strategy name.
    """
    measured = [
        (run, name, metrics)
        for run, summary in runs.items()
        for name, metrics in summary.items()
        if name != PLAIN and metrics["tok_s_ratio_ci"] is not None
    ]
    if not measured:
        return nothing("No run has both plain and another strategy.")
    figure, axes = canvas(len(measured))
    look = looks(name for _, name, _ in measured)
    for place, (_, name, metrics) in enumerate(measured):
        ratio = metrics["tok_s_ratio"]
        arms = _arms(ratio, metrics["tok_s_ratio_ci"])
        axes.errorbar(ratio, place, xerr=arms, color=look[name].colour, marker=look[name].marker)
    axes.axvline(1, color=INK, linestyle=":", linewidth=1.2)
    axes.set_yticks(range(len(measured)), [f"{run}: {name}" for run, name, _ in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens/s as a multiple of plain's in the same run (95 % interval)")
    run, name, metrics = max(measured, key=lambda each: float(each[2]["tok_s_ratio"]))
    best = metrics["tok_s_ratio"]
    title(axes, f"Best against plain: {name} with {best:.2f} times its speed ({run})")
    return figure
