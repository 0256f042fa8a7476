from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from harness.results.metrics import compare_with_plain, summarise
from harness.results.schema import COUNTERS
from harness.results.table import (
    NONE,
    WIDTH,
    Table,
    comparison_tables,
    print_tables,
    to_latex,
    to_markdown,
    to_rich,
)
from tests.results import tiny_run

NAMES = ("plain", "unguided", "vllm", "trtllm", "llamacpp", "sglang", "deepinfer", "my-strategy")


@pytest.fixture(scope="module")
def summary():
    steps, requests = tiny_run()
    return summarise(steps, compare_with_plain(requests))


@pytest.fixture
def wide(summary):
    """A long run on a fast machine, every cell at its widest."""
    metrics = {
        **summary["vllm"],
        **dict.fromkeys(COUNTERS, 99_999),
        "accept_rate": 0.8125,
        "accept_rate_ci": (0.8101, 0.9999),
        "mean_accept_len": 10.25,
        "mean_accept_len_ci": (10.01, 10.75),
        "accept_at": [1.0, 0.99, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2],
        "tok_s": 12345.6,
        "tok_s_ratio": 10.25,
        "tok_s_ratio_ci": (10.01, 10.75),
        "complete": 1.0,
        "valid": 1.0,
        "identical": 1.0,
        "failed": 10_000,
        "target_forwards": 99_999,
        "draft_forwards": 999_999,
        **dict.fromkeys(("draft_us", "verify_us", "grammar_us", "exposed_us", "host_us"), 99_999.0),
    }
    return dict.fromkeys(NAMES, metrics)


def rendered(table, width=WIDTH):
    console = Console(file=io.StringIO(), width=width)
    console.print(to_rich(table))
    return console.file.getvalue()


def cells(tables):
    return {
        (row[0], header): cell
        for table in tables
        for row in table.rows
        for header, cell in zip(table.headers, row, strict=True)
    }


def test_every_cell_stands_whole_in_one_line_at_120_columns(wide):
    for table in comparison_tables(wide):
        lines = rendered(table).splitlines()
        assert max(map(len, lines)) <= WIDTH
        body = lines[-len(NAMES) :]
        for row, line in zip(table.rows, body, strict=True):
            assert line.split() == " ".join(row).split()


def test_headers_are_never_cut(wide):
    for table in comparison_tables(wide):
        words = rendered(table).split()
        assert {word for header in table.headers for word in header.split()} <= set(words)


def test_a_narrow_terminal_folds_and_cuts_nothing(wide):
    for table in comparison_tables(wide):
        assert rendered(table, width=60).count("…") == " ".join(table.headers).count("…")


def test_a_run_without_a_strategy_has_empty_tables():
    for table in comparison_tables({}):
        assert table.rows == ()
        assert "strategy" in rendered(table)


def test_markup_in_a_strategy_name_is_text(summary):
    table = comparison_tables({"[red]x[/red]|y": summary["vllm"]})[0]
    assert "[red]x[/red]|y" in "".join(rendered(table).split())
    assert "| [red]x[/red]\\|y |" in to_markdown(table)


def test_both_renderings_have_the_same_cells(summary):
    for table in comparison_tables(summary):
        markdown = to_markdown(table).splitlines()[-len(table.rows) :]
        for row, line in zip(table.rows, markdown, strict=True):
            assert line == f"| {' | '.join(row)} |"


def test_cells_have_the_units_of_their_legend(summary):
    cell = cells(comparison_tables(summary))
    assert cell["vllm", "accept rate"].startswith("42.9 (")
    assert cell["vllm", "mean accepted length"].startswith("2.00 (")
    assert cell["vllm", "accepted at 1, 2, …"] == "67 33"
    assert cell["vllm", "grammar"] == "11.1"
    assert cell["vllm", "trimmed"] == "22.2"
    assert cell["vllm", "preview rollbacks"] == "3/7"
    assert cell["plain", "tok/s to plain"] == "1.00 (1.00–1.00)"
    assert cell["vllm", "valid"] == "100.0"
    assert cell["vllm", "failed"] == "1"


def test_what_does_not_exist_is_a_dash_and_not_a_zero(summary):
    cell = cells(comparison_tables(summary))
    for header in ("accept rate", "accepted at 1, 2, …", "grammar", "trimmed"):
        assert cell["plain", header] == NONE


@pytest.mark.parametrize(
    ("count", "text"),
    [(99_999, "99999"), (100_000, "100k"), (999_999, "1.0M"), (12_345_678, "12.3M")],
)
def test_large_counts_are_shortened(summary, count, text):
    metrics = {**summary["vllm"], "drafted": count}
    assert cells(comparison_tables({"vllm": metrics}))["vllm", "drafted"] == text


def test_every_column_is_explained(summary):
    for table in comparison_tables(summary):
        assert len(table.docs) == len(table.headers)
        assert all(table.docs)


def test_output_to_a_pipe_is_120_columns_wide(wide, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_tables(comparison_tables(wide))
    assert 100 < max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH


GOLDEN = """\
## Acceptance

| strategy | drafted | accept rate | mean accepted length | accepted at 1, 2, … | grammar | model \
| past stop | trimmed |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| plain | 0 | – | 1.00 (1.00–1.00) | – | – | – | – | – |
| vllm | 7 | 42.9 (25.0–66.7) | 2.00 (1.50–3.00) | 67 33 | 11.1 | 11.1 | 22.2 | 22.2 |
"""


def test_the_markdown_of_a_tiny_summary_is_as_written_by_hand(summary):
    assert to_markdown(comparison_tables(summary)[0]) == GOLDEN


def latex_body(text):
    """Cells by row between the rules of a booktabs table: headers, then rows."""
    inside = re.search(r"\\toprule\n(.*)\\midrule\n(.*)\\bottomrule\n", text, re.DOTALL)
    return [
        [line.removesuffix(r" \\").split(" & ") for line in part.splitlines()]
        for part in inside.groups()
    ]


GOLDEN_LATEX = r"""% strategy: strategy that ran
% share [a]: of 100_000 (%)
% time: of a step
\begin{table}
\centering
\caption{Cost \& speed}
\begin{tabular}{lrr}
\toprule
 & share &  \\
strategy & {[}a] & time \\
 & (\%) &  \\
\midrule
a\_b & 50 & – \\
{[}c] & 7.5 & {*} \\
\bottomrule
\end{tabular}
\end{table}
"""


def test_the_latex_of_a_table_is_as_written_by_hand():
    table = Table(
        "Cost & speed",
        ("strategy", "share [a]", "time"),
        ("strategy that ran", "of 100_000 (%)", "of a step"),
        (("a_b", "50", NONE), ("[c]", "7.5", "*")),
        ("", "%", ""),
    )
    assert to_latex(table) == GOLDEN_LATEX


def test_latex_environments_are_balanced_and_rows_have_as_many_cells_as_columns(summary):
    for table in comparison_tables(summary):
        open_environments = []
        for what, name in re.findall(r"\\(begin|end)\{(\w+)\}", to_latex(table)):
            if what == "begin":
                open_environments.append(name)
            else:
                assert open_environments.pop() == name
        assert not open_environments
        columns = re.search(r"\\begin\{tabular\}\{(l r*)\}", to_latex(table), re.VERBOSE)[1]
        for cells in [*latex_body(to_latex(table))[0], *latex_body(to_latex(table))[1]]:
            assert len(cells) == len(columns) == len(table.headers)


def test_latex_has_the_units_below_the_headers_and_the_cells_of_the_other_renderings(summary):
    table = comparison_tables(summary)[0]
    heads, body = latex_body(to_latex(table))
    assert body == [list(row) for row in table.rows]
    assert dict(zip(table.headers, heads[-1], strict=True)) == {
        "strategy": "",
        "drafted": "",
        "accept rate": r"(\%)",
        "mean accepted length": "(tokens)",
        "accepted at 1, 2, …": r"(\%, the first 8)",
        "grammar": r"(\% of proposed)",
        "model": r"(\% of proposed)",
        "past stop": r"(\% of proposed)",
        "trimmed": r"(\% of proposed)",
    }
    wrapped = zip(*heads[:-1], strict=True)
    assert [" ".join(filter(None, lines)) for lines in wrapped] == list(table.headers)


@pytest.mark.parametrize(
    ("character", "printed"),
    [
        *((special, f"\\{special}") for special in "&%$#_{}"),
        ("\\", r"\textbackslash{}"),
        ("~", r"\textasciitilde{}"),
        ("^", r"\textasciicircum{}"),
        ("<", r"\textless{}"),
        (">", r"\textgreater{}"),
        ("|", r"\textbar{}"),
        ("µ", "µ"),
    ],
)
def test_what_latex_would_not_print_is_escaped(character, printed):
    text = to_latex(Table(f"t{character}", ("h",), ("a doc",), ((f"x{character}y",),)))
    assert f"\\caption{{t{printed}}}" in text
    assert latex_body(text)[1] == [[f"x{printed}y"]]


def test_a_table_without_units_has_no_line_for_them():
    heads, _ = latex_body(to_latex(Table("t", ("one", "two"), ("", ""), ())))
    assert heads == [["one", "two"]]
