"""One request through each strategy, drawn: the drafts of each step, and its time.

Args of both figures are the step rows of one request. The panels share their axes, so that what
is wider took more steps or longer, and what is higher brought more.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.results.distributions import verify_steps
from harness.results.drawing import canvas, count, patches, title
from harness.results.figures import style
from harness.results.palette import FATES, INK, PHASES, SKY, YELLOW

GAINS = {"jump_tokens": YELLOW, "accepted": FATES["accepted"], "own": SKY}
"""What a step adds to the output, in the order of drawing."""

LOSSES = {fate: colour for fate, colour in FATES.items() if fate != "accepted"}
"""What becomes of its other drafts."""

NAMES = {
    "jump_tokens": "forced tokens inserted",
    "accepted": "draft accepted",
    "own": "target's own token",
    "rejected_model": "target disagreed",
    "rejected_grammar": "illegal",
    "trimmed": "trimmed before verify",
    "past_stop": "past the stop",
}
"""Of the bars, for the legend."""

_PHASES = {phase.removesuffix("_us"): colour for phase, colour in PHASES.items()}


@style()
def drafts_by_step(steps: pd.DataFrame) -> Figure:
    """Per strategy and verify step: tokens gained upward, drafts that died downward."""
    rows = verify_steps(steps).assign(own=lambda each: each["emitted"] - each["accepted"])
    names = list(rows["strategy"].unique())
    figure = Figure(figsize=(7.2, 1.5 + 0.95 * len(names)))
    panels = figure.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        part = rows[rows["strategy"] == name]
        _stack(axes, part, GAINS, 1)
        _stack(axes, part, LOSSES, -1)
        axes.axhline(0, color=INK, linewidth=0.8)
        gained = part[list(GAINS)].to_numpy().sum()
        heading = f"{name}: {count(gained, 'token')} in {count(len(part), 'step')}"
        axes.set_title(heading, fontsize=10, fontweight="normal")
    panels[0].yaxis.set_major_locator(MaxNLocator(4, integer=True))
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("verify step")
    figure.supylabel("tokens (↑ gained, ↓ drafts lost)")
    taken = rows.groupby("strategy").size()
    figure.suptitle(
        f"{taken.idxmin()} takes fewest steps: {taken.min()}, {taken.idxmax()} takes {taken.max()}",
        x=0.01,
        ha="left",
    )
    used = {NAMES[name]: colour for name, colour in (GAINS | LOSSES).items() if rows[name].any()}
    figure.legend(handles=patches(used), loc="outside lower left", ncols=4)
    return figure


@style()
def steps_on_a_clock(steps: pd.DataFrame) -> Figure:
    """Per strategy a lane of time after the prefill: each step's phases one after another.

    The phases of a step are drawn in the order of ``PHASES``; each is the sum of its parts.
    """
    rows = verify_steps(steps)
    names = list(rows["strategy"].unique())
    figure, axes = canvas(len(names))
    for lane, name in enumerate(names):
        _lane(axes, lane, rows[rows["strategy"] == name])
    spent = rows.groupby("strategy")[list(PHASES)].sum().sum(axis=1) / 1e3
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * spent.max())
    axes.grid(False, axis="y")
    axes.set_xlabel("time after the prefill (ms); a line ends each step")
    figure.legend(handles=patches(_PHASES), loc="outside lower left", ncols=len(PHASES))
    message = f"{spent.idxmin()} is done first: {spent.min():.1f} ms, {spent.idxmax()} last"
    title(axes, message)
    return figure


def _lane(axes: Axes, lane: int, rows: pd.DataFrame) -> None:
    """The phases of one strategy's steps, one behind the other."""
    spans = rows[list(PHASES)].to_numpy() / 1e3  # [steps, phases], ms
    ends = spans.cumsum().reshape(spans.shape)
    for phase, colour in enumerate(PHASES.values()):
        widths = spans[:, phase]
        starts = ends[:, phase] - widths
        axes.broken_barh(list(zip(starts, widths, strict=True)), (lane - 0.3, 0.6), color=colour)
    axes.vlines(ends[:, -1], lane - 0.4, lane + 0.4, color=INK, linewidth=0.6)
    tokens = rows[["emitted", "jump_tokens"]].to_numpy().sum()
    note = f"  {ends[-1, -1]:.1f} ms, {count(tokens, 'token')}"
    axes.text(ends[-1, -1], lane, note, va="center", fontsize=9)


def _stack(axes: Axes, rows: pd.DataFrame, colours: dict[str, str], sign: int) -> None:
    base = pd.Series(0, rows.index)
    for column, colour in colours.items():
        height = sign * rows[column]
        axes.bar(rows["step"], height, bottom=base, color=colour)
        base = base + height
