from __future__ import annotations

import re

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

from harness.results import figures
from harness.results.distributions import phases
from harness.results.drawing import ink_on
from harness.results.metrics import compare_with_plain, summarise
from harness.results.palette import FATES, INK, KINDS, LOOKS, PHASES, looks
from harness.results.record import Recorder
from strategies import registry
from tests.results import prefill, tiny_run, verify

OF_STEPS = [
    figures.acceptance_by_position,
    figures.time_split,
    figures.why_drafts_die,
    figures.rollback_depths,
    figures.fill_times,
]

OKABE_ITO = {
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
}


@pytest.fixture
def steps():
    return tiny_run()[0]


@pytest.fixture
def summary():
    steps, requests = tiny_run()
    return summarise(steps, compare_with_plain(requests))


def frame(*rows):
    recorder = Recorder()
    recorder.steps += rows
    return recorder.frames()[0]


def title(figure):
    return figure.get_suptitle() or figure.axes[0].get_title(loc="left")


def labels(figure):
    axes = figure.axes[0]
    return figure.get_supxlabel() or axes.get_xlabel(), figure.get_supylabel() or axes.get_ylabel()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (figures.acceptance_by_position, "vllm gets most drafts accepted: 1.00 per verify step"),
        (figures.time_split, "Grammar work on the host: at most 20 % of a token's time (plain)"),
        (figures.why_drafts_die, "vllm loses 67 % of its drafts"),
        (figures.rollback_depths, "vllm rolls back most often; the deepest rollback is 3 tokens"),
        (figures.fill_times, "One fill in a hundred takes 20 µs or more (plain)"),
    ],
)
def test_the_title_is_the_message_of_the_data(draw, message, steps):
    assert title(draw(steps)) == message


def test_best_and_worst_share_the_title_of_lost_drafts():
    rows = frame(verify("vllm", "a", 1, 1, (3, 0, 1, 0)), verify("trtllm", "a", 1, 1, (1, 0, 3, 0)))
    message = "vllm loses 25 % of its drafts, the fewest; trtllm loses most, 75 %"
    assert title(figures.why_drafts_die(rows)) == message


@pytest.mark.parametrize(
    ("draw", "x", "y"),
    [
        (figures.acceptance_by_position, "draft position", "(%)"),
        (figures.time_split, "(ms)", ""),
        (figures.why_drafts_die, "(%)", ""),
        (figures.rollback_depths, "(tokens)", "calls per 100 verify steps"),
        (figures.fill_times, "(µs, logarithmic)", ""),
    ],
)
def test_axes_name_their_units(draw, x, y, steps):
    found = labels(draw(steps))
    assert x in found[0]
    assert y in found[1]


@pytest.mark.parametrize("draw", OF_STEPS)
def test_what_a_run_lacks_is_said_in_the_figure(draw):
    (axes,) = draw(frame(prefill("plain", "a", 0))).axes
    assert axes.texts[0].get_text().startswith(("No ", "One "))


def test_a_summary_without_tokens_is_said_in_the_figure(summary):
    nothing = {name: {**each, "tok_s_ci": None} for name, each in summary.items()}
    (text,) = figures.speed_against_acceptance(nothing).axes[0].texts
    assert text.get_text().startswith("No strategy")


def test_bars_are_as_long_as_the_time_of_a_token(steps):
    axes = figures.time_split(steps).axes[0]
    ends = {}
    for container, phase in zip(axes.containers, PHASES, strict=True):
        for bar, name in zip(container, ("plain", "vllm"), strict=True):
            assert bar.get_width() == pytest.approx(phases(steps).loc[name, phase])
            ends[name] = bar.get_x() + bar.get_width()
    assert ends == pytest.approx({"plain": 0.100, "vllm": 0.050})


def test_bars_of_rollbacks_are_calls_per_100_verify_steps(steps):
    """vllm rolls back one preview in each of its 3 verify steps: once 1 token, twice 3."""
    (axes,) = (each for each in figures.rollback_depths(steps).axes if each.patches)
    heights = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in axes.patches}
    assert heights == pytest.approx({1: 100 / 3, 3: 200 / 3})


def test_very_deep_rollbacks_share_the_last_bar():
    rows = frame(
        *(
            verify("vllm", "a", at, at, rollback_preview_calls=1, rollback_preview_tokens=depth)
            for at, depth in enumerate((figures.DEEP, 50), start=1)
        )
    )
    figure = figures.rollback_depths(rows)
    axes = figure.axes[0]
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
    assert bars == [pytest.approx((figures.DEEP, 100))]
    assert axes.get_xticklabels()[-1].get_text() == "8+"
    assert title(figure).endswith("the deepest rollback is 50 tokens")


def test_the_summary_is_drawn_with_its_intervals(summary):
    axes = figures.speed_against_acceptance(summary).axes[0]
    points = {bar.get_label(): bar for bar in axes.containers}
    assert list(points) == ["plain", "vllm"]
    across, up = points["vllm"].lines[2]
    assert across.get_segments()[0][:, 0].tolist() == pytest.approx([1.5, 3.0])
    assert up.get_segments()[0][:, 1].tolist() == pytest.approx(summary["vllm"]["tok_s_ci"])


def test_a_dotted_line_shows_steps_as_cheap_as_those_of_plain(summary):
    line = figures.speed_against_acceptance(summary).axes[0].lines[0]
    assert line.get_xdata().tolist() == [1.0, 3.0]
    assert line.get_ydata().tolist() == pytest.approx([10_000, 30_000])


@pytest.mark.parametrize(
    ("speed", "length", "message"),
    [
        (90.0, 2.0, "vllm accepts most, but plain is fastest"),
        (110.0, 2.0, "vllm accepts most, and is fastest"),
    ],
)
def test_the_title_says_whether_acceptance_pays(summary, speed, length, message):
    plain = {**summary["plain"], "tok_s": 100.0}
    vllm = {**summary["vllm"], "tok_s": speed, "mean_accept_len": length}
    figure = figures.speed_against_acceptance({"plain": plain, "vllm": vllm})
    assert title(figure) == message


def test_one_strategy_alone_is_compared_with_nothing(summary):
    figure = figures.speed_against_acceptance({"plain": summary["plain"]})
    assert title(figure) == "plain makes 10000.0 tokens/s"


def test_ratios_of_several_runs_stand_below_each_other(summary):
    figure = figures.speed_ratios({"cpu": summary, "gpu": summary})
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu: vllm", "gpu: vllm"]
    assert title(figure) == "Best against plain: vllm with 1.45 times its speed (cpu)"


def test_every_strategy_has_one_colour_and_one_marker_of_its_own():
    assert set(LOOKS) == set(registry())
    for part in zip(*LOOKS.values(), strict=True):
        assert len(set(part)) == len(LOOKS)


def test_a_strategy_looks_the_same_whatever_runs_beside_it():
    for name, look in LOOKS.items():
        assert looks([name]) == {name: look}
    assert looks(["mine", "vllm"])["vllm"] == LOOKS["vllm"]


def test_strategies_of_a_user_are_told_apart_from_ours_and_from_each_other():
    found = looks([*LOOKS, *(f"mine{index}" for index in range(9))])
    assert len(set(found.values())) == len(found)


def test_colours_are_those_that_colour_blind_eyes_tell_apart():
    used = {look.colour for look in LOOKS.values()}
    assert used | {*FATES.values(), *PHASES.values(), *KINDS.values()} <= OKABE_ITO


def test_numbers_in_bars_are_readable():
    assert ink_on("#0072B2") == "white"
    assert ink_on("#E69F00") == "black"


def test_the_style_sheet_leaves_the_users_settings_alone(steps):
    with mpl.rc_context({"font.size": 33, "figure.figsize": (1, 1)}):
        figures.svg(figures.time_split(steps))
        assert mpl.rcParams["font.size"] == 33
        assert mpl.rcParams["figure.figsize"] == [1, 1]


def test_the_style_sheet_writes_in_the_ink_of_the_palette():
    with figures.style():
        for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"):
            assert to_hex(mpl.rcParams[name]) == INK


def test_a_figure_is_saved_as_svg_and_png(steps, tmp_path):
    figures.save(figures.time_split(steps), tmp_path / "figures" / "time.split")
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["time.split.png", "time.split.svg"]


def test_the_same_figure_gives_the_same_bytes(steps, tmp_path):
    for name in ("one", "two"):
        figures.save(figures.fill_times(steps), tmp_path / name)
    for kind in ("svg", "png"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_text_stays_text_in_svg(steps):
    found = re.findall(r"<text[^>]*>([^<]+)</text>", figures.svg(figures.time_split(steps)))
    assert "time per token, prefill excluded (ms)" in found
