"""The comparison tables: their cells are built once, for a terminal, as Markdown or as LaTeX."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.core import ROLLBACK_KINDS
from harness.results.schema import METRICS, Metrics

WIDTH = 120
"""Columns of a terminal in which every table fits without cutting a word."""

NONE = "–"
"""A cell without a value."""

_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{character: f"{{{character}}}" for character in "[*"},  # options of a row's end
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",  # this one, the next and a bar are other characters in old fonts
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)
"""What LaTeX would not print as it stands."""

POSITIONS = 8
"""Draft positions that are shown; ``summary.json`` has all."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        title: one or two words.
        headers: one a column; the first column names the strategy.
        docs: one a column, what it shows and in which unit.
        rows: ``[strategies][columns]``.
        units: one a column, empty where there is none or the header says it; or no units at all.
    """

    title: str
    headers: tuple[str, ...]
    docs: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    units: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    unit: str
    metrics: tuple[str, ...]
    cell: Callable[[Metrics], str]

    @property
    def doc(self) -> str:
        meaning = "; ".join(METRICS[name] for name in self.metrics)
        return f"{meaning} ({self.unit})" if self.unit else meaning


def comparison_tables(summary: Mapping[str, Metrics]) -> list[Table]:
    """The tables that compare strategies.

    Args:
        summary: metrics by strategy name; one row each, in this order.
    """
    return [
        Table(
            title,
            ("strategy", *(column.header for column in columns)),
            ("strategy that ran", *(column.doc for column in columns)),
            tuple(
                (name, *(column.cell(metrics) for column in columns))
                for name, metrics in summary.items()
            ),
            ("", *(column.unit for column in columns)),
        )
        for title, columns in _TABLES.items()
    ]


def to_rich(table: Table) -> RichTable:
    """The table for a terminal of ``WIDTH`` columns; what is too long is folded, never cut.

    Headers are wrapped to their cells here, because rich would rather fold the cells.
    """
    rendered = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        min_width=len(table.title),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for header, *cells in zip(table.headers, *table.rows, strict=True):
        head = Text("\n".join(_wrap(header, cells)))
        rendered.add_column(head, justify="right", vertical="bottom", overflow="fold")
    rendered.columns[0].justify = "left"
    for row in table.rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return rendered


def to_markdown(table: Table) -> str:
    """The table in GitHub's Markdown, title included."""
    lines = [table.headers, ("---", *("---:" for _ in table.headers[1:])), *table.rows]
    body = "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)
    return f"## {table.title}\n\n{body}\n"


def to_latex(table: Table) -> str:
    """The table for a paper; it needs the packages booktabs and, before LaTeX of 2020, textcomp.

    Headers are wrapped to their cells, units stand below them; comments say what a column means.
    """
    units = [f"({unit})" if unit else "" for unit in table.units or ("",) * len(table.headers)]
    heads = [
        _wrap(header, cells)
        for header, *cells in zip(table.headers, units, *table.rows, strict=True)
    ]
    height = max(map(len, heads))
    stacked = zip(*([""] * (height - len(head)) + head for head in heads), strict=True)
    lines = [
        *(f"% {header}: {doc}" for header, doc in zip(table.headers, table.docs, strict=True)),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{table.title.translate(_LATEX)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.headers) - 1)}}}",
        r"\toprule",
        *map(_latex_row, stacked),
        *([_latex_row(units)] if any(units) else []),
        r"\midrule",
        *map(_latex_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def print_tables(tables: Sequence[Table]) -> None:
    """Print to standard output, ``WIDTH`` columns wide where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables:
        console.print(to_rich(table), end="\n\n")


def _wrap(header: str, cells: Sequence[str]) -> list[str]:
    """The lines of a header that is no wider than its widest cell, or its longest word."""
    width = max(map(len, cells), default=0) or max(1, len(header))
    return textwrap.wrap(header, width, break_long_words=False)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}"


def _count(value: int) -> str:
    """Exact below 100 000, in thousands or millions above, so that widths stay bounded."""
    if value < 100_000:
        return str(value)
    return f"{value / 1e3:.0f}k" if value < 999_500 else f"{value / 1e6:.1f}M"


def _counter(header: str, metric: str) -> _Column:
    return _Column(header, "", (metric,), lambda metrics: _count(metrics[metric]))


def _value(header: str, metric: str) -> _Column:
    return _Column(header, "", (metric,), lambda metrics: _number(metrics[metric]))


def _share(header: str, metric: str) -> _Column:
    return _Column(header, "%", (metric,), lambda metrics: _percent(metrics[metric]))


def _estimate(header: str, metric: str, unit: str, show: Callable[[float], str]) -> _Column:
    """A ratio and its interval: ``value (low–high)``."""

    def cell(metrics: Metrics) -> str:
        value, interval = metrics[metric], metrics[f"{metric}_ci"]
        if value is None or interval is None:
            return NONE
        return f"{show(value)} ({'–'.join(map(show, interval))})"

    return _Column(header, unit, (metric, f"{metric}_ci"), cell)


def _fate(header: str, metric: str) -> _Column:
    """One way for drafts to die, as a share of all that were proposed."""

    def cell(metrics: Metrics) -> str:
        raw = metrics["drafted_raw"]
        return _percent(metrics[metric] / raw if raw else None)

    return _Column(header, "% of proposed", (metric,), cell)


def _rollbacks(kind: str) -> _Column:
    calls, tokens = f"rollback_{kind}_calls", f"rollback_{kind}_tokens"
    return _Column(
        f"{kind} rollbacks",
        "calls/tokens",
        (calls, tokens),
        lambda metrics: f"{_count(metrics[calls])}/{_count(metrics[tokens])}",
    )


def _positions(metrics: Metrics) -> str:
    shares = metrics["accept_at"][:POSITIONS]
    return " ".join(f"{100 * share:.0f}" for share in shares) or NONE


_TABLES: dict[str, tuple[_Column, ...]] = {
    "Acceptance": (
        _counter("drafted", "drafted"),
        _estimate("accept rate", "accept_rate", "%", _percent),
        _estimate("mean accepted length", "mean_accept_len", "tokens", "{:.2f}".format),
        _Column("accepted at 1, 2, …", f"%, the first {POSITIONS}", ("accept_at",), _positions),
        _fate("grammar", "rejected_grammar"),
        _fate("model", "rejected_model"),
        _fate("past stop", "past_stop"),
        _fate("trimmed", "trimmed"),
    ),
    "Work": (
        *map(_rollbacks, ROLLBACK_KINDS),
        _counter("rolled back", "rollback_tokens"),
        _counter("jump tokens", "jump_tokens"),
        _counter("wasted rows", "wasted_rows"),
        _counter("mask rows", "mask_rows"),
        _counter("target forwards", "target_forwards"),
        _counter("draft forwards", "draft_forwards"),
    ),
    "Time and outputs": (
        _value("tok/s", "tok_s"),
        _estimate("tok/s to plain", "tok_s_ratio", "ratio", "{:.2f}".format),
        _value("draft µs", "draft_us"),
        _value("verify µs", "verify_us"),
        _value("grammar µs", "grammar_us"),
        _value("exposed µs", "exposed_us"),
        _value("host µs", "host_us"),
        _share("complete", "complete"),
        _share("valid", "valid"),
        _share("identical", "identical"),
        _counter("failed", "failed"),
    ),
}
