"""One HTML page for a run, and one for several side by side. A page needs no other file, no
server and no network; it is light or dark as the reader's system is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from harness.results import figures
from harness.results.answer import answer, fastest
from harness.results.palette import INK
from harness.results.record import RunFolder
from harness.results.sections import (
    IN_BRACKETS,
    divergences,
    facts,
    failures,
    legend,
    step_tables,
)
from harness.results.side_by_side import Runs, differences, side_by_side
from harness.results.table import comparison_tables
from harness.results.viewer import fragment

TEMPLATES = Path(__file__).with_name("templates")

_OF_STEPS: tuple[Callable[[pd.DataFrame], Figure], ...] = (
    figures.time_split,
    figures.acceptance_by_position,
    figures.why_drafts_die,
    figures.rollback_depths,
    figures.fill_times,
)


def run_page(folder: RunFolder) -> str:
    """The page of a run: the answer, where it holds, the tables, the figures, every request."""
    summary, steps, requests = folder.strategies(), folder.steps(), folder.requests()
    comparison, distributions = comparison_tables(summary), step_tables(steps)
    drawn = [figures.speed_against_acceptance(summary), *(draw(steps) for draw in _OF_STEPS)]
    return _render(
        "run.html",
        title=folder.path.resolve().name,
        answer=answer(summary),
        facts=facts(folder.manifest()),
        comparison=comparison,
        marked=fastest(summary),
        figures=[inline(figure, f"figure{place}") for place, figure in enumerate(drawn)],
        distributions=distributions,
        legend=legend([*comparison, *distributions]),
        viewer=Markup(fragment([folder])),
        failures=failures(requests),
        divergences=divergences(requests),
        in_brackets=IN_BRACKETS,
    )


def comparison_page(runs: Runs) -> str:
    """The page of several runs: the answer of each, and one table of them all."""
    summaries = {name: run.strategies() for name, run in runs.items()}
    table = side_by_side(runs, differences(runs))
    return _render(
        "comparison.html",
        title=f"{len(runs)} runs side by side",
        answers={name: answer(summary) for name, summary in summaries.items()},
        figure=inline(figures.speed_ratios(summaries), "ratios"),
        table=table,
        words=table.headers.index("strategy") + 1,
        legend=legend([table]),
    )


def inline(figure: Figure, name: str) -> Markup:
    """The figure as an ``svg`` element of a page, in the page's font and text colour.

    Args:
        figure: to draw.
        name: unique in the page; it begins the ids, which several figures would share otherwise.
    """
    text = figures.svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would style the whole page
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # HTML knows them
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return Markup(text.replace(INK, "currentColor"))


def _render(template: str, **content: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["zip"] = zip
    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(style=style, **content)
