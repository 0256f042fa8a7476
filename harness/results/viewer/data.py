"""The recorded steps as the page embeds them: columns as JSON, compressed, in base64.

One blob per strategy of a run, so that a browser decodes what is looked at and nothing else. In
a blob a column is one flat list over all steps of all requests; ``drafts``, ``trimmed`` and
``jumps`` say how many entries belong to each step. What can be derived is left out: accepted
drafts are not repeated as emitted tokens, so ``own_id`` holds only the target's own.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from harness.core import PAD, ROLLBACK_KINDS

DIGITS = 3
"""Significant digits of probabilities and times."""

TIMES = ("draft_us", "verify_us", "grammar_us", "exposed_us", "host_us")
ROLLBACKS = tuple(
    f"rollback_{kind}_{what}" for kind in ROLLBACK_KINDS for what in ("calls", "tokens")
)

Columns = dict[str, Any]
"""One strategy's steps, by the names that the module's docstring and ``viewer.js`` use."""


def viewable(steps: pd.DataFrame) -> bool:
    """False for a run of a version that did not record what became of each draft."""
    return "fates" in steps.columns


def detailed(steps: pd.DataFrame) -> bool:
    """True if the run has recorded p, q and legal tokens (``engine.detail``)."""
    return "legal" in steps.columns and bool((steps["legal"].str.len() > 0).any())


def strategy_columns(
    steps: pd.DataFrame, requests: pd.DataFrame, order: Mapping[str, int]
) -> Columns:
    """The embedded columns of one strategy.

    Args:
        steps: its rows of ``steps.parquet``.
        requests: its rows of ``requests.parquet``.
        order: each request's number in the run.
    """
    rows = steps.sort_values(["request", "step"], kind="stable")
    counts = rows.groupby("request", sort=False).size()
    said = requests.set_index("request")
    columns: Columns = {
        "request": [order[name] for name in counts.index],
        "steps": counts.tolist(),
        "finish": {order[name]: said["finish"][name] for name in said.index},
        "error": {order[name]: said["error"][name] for name in said.index if said["error"][name]},
        "batch": rows["batch"].tolist(),
        "drafts": _lengths(rows["draft_ids"]),
        "draft_ids": _flat(rows["draft_ids"]),
        "fates": "".join(rows["fates"]),
        "parents": _flat(rows["draft_parents"]),
        "trees": _lengths(rows["draft_parents"]),
        "trimmed": rows["trimmed"].tolist(),
        "trimmed_ids": _flat(rows["trimmed_ids"]),
        "jumps": _lengths(rows["jump_ids"]),
        "jump_ids": _flat(rows["jump_ids"]),
        "retokenized": rows["retokenized"].tolist(),
        "own_id": list(map(_own, rows["emitted_ids"], rows["accepted"])),
        **{name: rows[name].tolist() for name in ROLLBACKS if rows[name].any()},
        **{name: _rounded(rows[name]) for name in TIMES},
    }
    if detailed(rows):
        columns["p"] = _rounded(_flat(rows["draft_p"]))
        q = _rounded(_flat(rows["draft_q"]))
        columns["q"] = q if any(value is not None for value in q) else []
        own_p = map(_own, rows["emitted_p"], rows["accepted"])
        columns["own_p"] = [None if p == PAD else p for p in _rounded(own_p)]
        columns["legal"] = _flat(rows["legal"])
    return columns


def pack(value: Any) -> str:
    """JSON, gzip, base64. The same value always gives the same text."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def unpack(text: str) -> Any:
    """The inverse of ``pack``, as the page does it."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def _own(emitted: NDArray[Any], accepted: int) -> Any:
    """What a step emitted behind its accepted drafts; ``PAD`` if it ended with one of these."""
    return emitted[accepted].item() if len(emitted) > accepted else PAD


def _lengths(lists: pd.Series) -> list[int]:
    return [len(each) for each in lists]


def _flat(lists: Iterable[Any]) -> list[Any]:
    return [*chain(*(each.tolist() for each in lists))]


def _rounded(values: Iterable[float]) -> list[float | int | None]:
    """Three significant digits; whole numbers without a point, nan as null."""
    return [None if math.isnan(value) else _short(float(f"{value:.{DIGITS}g}")) for value in values]


def _short(value: float) -> float | int:
    return int(value) if value.is_integer() else value
