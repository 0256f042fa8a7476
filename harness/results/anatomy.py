"""One request step by step: what was drafted, what became of it, what the matcher did."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.core import PAD, ROLLBACK_KINDS, Fate
from harness.errors import ConfigError
from harness.results.answer import CEILING
from harness.results.palette import PHASES
from harness.results.table import Table

Row = Mapping[Hashable, Any]
"""One step row: value by column."""

VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "`": "ˋ"})
"""Characters of a token that a table would swallow."""


def rows_of(frame: pd.DataFrame, request: str) -> pd.DataFrame:
    """The rows of one request under each strategy that keeps to its grammar.

    Args:
        frame: the steps or the requests of a run.
        request: its id.

    Raises:
        ConfigError: there is no such request.
    """
    found = frame[(frame["request"] == request) & (frame["strategy"] != CEILING)]
    if found.empty:
        known = ", ".join(map(str, frame["request"].unique()))
        raise ConfigError(f"request: {request!r} is not in this run; name one of {known}")
    return found


def drafts_that(row: Row, fate: Fate) -> list[int]:
    """The drafts of a step that met with ``fate``."""
    pairs = zip(row["draft_ids"], row["fates"], strict=True)
    return [int(token) for token, letter in pairs if letter == fate]


def token_names(tokens: Mapping[str, Mapping[str, str]]) -> dict[int, str]:
    """The text of each token by id, for the eye: a byte that is no text by itself is ``�``.

    Args:
        tokens: ``tokens.json`` of a run, as ``RunFolder.tokens`` reads it.
    """
    named = {**tokens["special"], **tokens["texts"]}
    return {
        int(token): text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        for token, text in named.items()
    }


def own_token(row: Row) -> list[int]:
    """The target's own token behind the accepted drafts; none where a draft ended the output."""
    return list(row["emitted_ids"][int(row["accepted"]) :])


def step_table(steps: pd.DataFrame, strategy: str, texts: Mapping[int, str]) -> Table:
    """What happened in each step; columns in which nothing did are left out.

    Args:
        steps: step rows of one request.
        strategy: whose steps are shown.
        texts: from ``token_names``.
    """
    rows = steps[steps["strategy"] == strategy].sort_values("step")
    records = rows.to_dict("records")
    cells = {
        column.header: [column.cell(record, texts) for record in records] for column in _COLUMNS
    }
    shown = [column for column in _COLUMNS if any(cells[column.header])]
    return Table(
        strategy,
        tuple(column.header for column in shown),
        tuple(column.doc for column in shown),
        tuple(zip(*(cells[column.header] for column in shown), strict=True)),
    )


def in_code(tokens: Sequence[int], texts: Mapping[int, str]) -> str:
    """Tokens as Markdown code, white space visible; padding is left out."""
    shown = (texts[int(token)].translate(VISIBLE) for token in tokens if token != PAD)
    return " ".join(f"`{text}`" for text in shown)


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    doc: str
    cell: Callable[[Row, Mapping[int, str]], str]


def _fate(header: str, fate: Fate, doc: str) -> _Column:
    return _Column(header, doc, lambda row, texts: in_code(drafts_that(row, fate), texts))


def _ids(header: str, column: str, doc: str) -> _Column:
    return _Column(header, doc, lambda row, texts: in_code(row[column], texts))


def _count(header: str, column: str, doc: str) -> _Column:
    return _Column(header, doc, lambda row, _: str(row[column]) if row[column] else "")


def _rollbacks(row: Row, _: Mapping[int, str]) -> str:
    counts = ((kind, row[f"rollback_{kind}_tokens"]) for kind in ROLLBACK_KINDS)
    return ", ".join(f"{count} {kind}" for kind, count in counts if count)


_COLUMNS = (
    _Column("step", "0 is the prefill", lambda row, _: str(row["step"])),
    _ids("jumped", "jump_ids", "forced tokens inserted before the step"),
    _fate("accepted", Fate.ACCEPTED, "drafts that were emitted"),
    _fate("target disagreed", Fate.REJECTED_MODEL, "legal drafts at or behind the disagreement"),
    _fate("illegal", Fate.REJECTED_GRAMMAR, "drafts at or behind the first illegal one"),
    _fate("past the stop", Fate.PAST_STOP, "drafts behind the one that ended the output"),
    _ids("trimmed", "trimmed_ids", "drafts cut before the verification"),
    _Column("own token", "of the target", lambda row, texts: in_code(own_token(row), texts)),
    _count("advanced", "advanced", "tokens fed to the matcher, previews included"),
    _Column("rolled back", "tokens taken back, by kind", _rollbacks),
    _count("held", "held", "tokens the matcher holds after the step"),
    _Column("ms", "time of the step", lambda row, _: f"{step_ms(row):.2f}"),
)


def step_ms(row: Row) -> float:
    """Wall time of the step, ms: its phases exclude each other."""
    return sum(float(row[phase]) for phase in PHASES) / 1e3
