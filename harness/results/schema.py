"""Every column and every metric of a run, each with one line of documentation.

The columns of the two parquet tables are the fields of ``StepTrace`` and ``RequestTrace``;
nothing is listed twice. The metrics of ``summary.json`` are the keys of ``METRICS``.
``python -m harness.results.schema`` writes them all down, as the ``README.md`` of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import pyarrow as pa

from harness.core import ROLLBACK_KINDS, RequestTrace, StepTrace, columns

SCHEMA_VERSION = 1
"""Raised whenever a name or a meaning in ``summary.json`` changes."""

Metrics = Mapping[str, Any]
"""One strategy's metrics, by the names of ``METRICS``."""

_ARROW_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    list[int]: pa.list_(pa.int64()),
    list[float]: pa.list_(pa.float64()),
}


def step_schema() -> pa.Schema:
    """Schema of ``steps.parquet``: one row per step and sequence."""
    return _schema(StepTrace)


def request_schema() -> pa.Schema:
    """Schema of ``requests.parquet``: one row per request and strategy."""
    return _schema(RequestTrace)


def _schema(trace: type) -> pa.Schema:
    hints = get_type_hints(trace)
    return pa.schema([_field(name, hints[name], doc) for name, doc in columns(trace).items()])


def _field(name: str, hint: Any, doc: str) -> pa.Field:
    """A column; only a type that includes None is nullable."""
    nullable = isinstance(hint, UnionType)
    if nullable:
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    return pa.field(name, _ARROW_TYPES[hint], nullable=nullable, metadata={"doc": doc})


ROLLBACKS: dict[str, str] = {
    name: doc
    for name, doc in columns(StepTrace).items()
    if name
    in {f"rollback_{kind}_{what}" for kind in ROLLBACK_KINDS for what in ("calls", "tokens")}
}
"""The step columns that count rollbacks by kind."""

COUNTERS: dict[str, str] = {
    "drafted_raw": "drafts proposed, before anything was cut",
    "drafted": "drafts put before the target, after trimming",
    "accepted": "verified drafts that were emitted",
    "rejected_grammar": "dead drafts at or behind the first illegal one",
    "rejected_model": "legal drafts at or behind the target's disagreement",
    "past_stop": "drafts behind the draft that ended the output",
    "trimmed": "drafts cut before the verification",
    "wasted_rows": "target rows that decided no emitted token",
    "mask_rows": "mask rows filled, by drafting and verification",
    "jump_tokens": "forced tokens inserted without a forward",
    "retokenized": "emitted ids changed by re-encoding",
    **ROLLBACKS,
}
"""Metrics that are the sum of the step column of their name, over all steps."""

METRICS: dict[str, str] = {
    **COUNTERS,
    "rollback_calls": "rollbacks of all kinds",
    "rollback_tokens": "tokens rolled back, all kinds",
    "verify_steps": "steps of single sequences that verified; prefill is none",
    "emitted": "tokens emitted by verify steps, the target's own included",
    "accept_rate": "accepted / drafted; null without drafts",
    "accept_rate_ci": "its 95 % interval, bootstrap over requests",
    "mean_accept_len": "emitted / verify_steps, the target's own token included",
    "mean_accept_len_ci": "its 95 % interval, bootstrap over requests",
    "accept_hist": "verify steps with exactly i accepted drafts, i = 0, 1, …",
    "accept_at": "share of verify steps with more than i accepted drafts, i = 0, 1, …",
    "target_forwards": "forwards of the target, whatever their batch; prefill included",
    "draft_forwards": "forwards of the draft model, whatever their batch",
    "compile_ms": "grammar compilations of all requests, ms",
    "fill_us_p50": "median of single mask fills, µs",
    "fill_us_p99": "99th percentile of single mask fills, µs",
    "draft_us": "draft forwards and draft sampling, µs per verify step",
    "verify_us": "target forward, mask application and verification, µs per verify step",
    "grammar_us": "grammar work on the CPU, µs per verify step",
    "exposed_us": "the part of grammar_us that the device waited for, µs per verify step",
    "host_us": "everything else, µs per verify step",
    "tok_s": "output tokens / (draft, verify, grammar and host time, prefill included), 1/s; with "
    "engine.dp the rate of one process, on average",
    "tok_s_ci": "its 95 % interval, bootstrap over requests",
    "tok_s_ratio": "tok_s / plain's tok_s, over the requests that both ran",
    "tok_s_ratio_ci": "its 95 % interval, bootstrap over requests, paired with plain",
    "ttft_ms": "admission to first token, mean over requests with output, ms",
    "tpot_ms": "time after the first token / tokens after the first, ms",
    "requests": "requests that were run",
    "complete": "share of requests that ended by themselves",
    "valid": "share of complete outputs with a verdict that the independent validator passes",
    "failed": "requests that failed",
    "canonical_share": "share of output tokens equal to the canonical encoding of their text",
    "identical": "share of outputs equal to plain's, among those compared",
    "first_divergence": "outputs that have a first divergence from plain's",
    "near_ties": "of these, those where plain's logit lead was below 1e-2",
    "divergence_gap": "largest finite logit lead of plain at a first divergence (greedy)",
}
"""Every metric of a strategy in ``summary.json``."""

_METRIC_TYPES: dict[str, str] = {
    **dict.fromkeys((*COUNTERS, "rollback_calls", "rollback_tokens"), "int"),
    **dict.fromkeys(("verify_steps", "emitted", "target_forwards", "draft_forwards"), "int"),
    **dict.fromkeys(("requests", "failed", "first_divergence", "near_ties"), "int"),
    "accept_hist": "list of int",
    "accept_at": "list of float",
    "compile_ms": "float",
}
"""Of the metrics that are neither intervals nor ratios, which have no value over nothing."""

_UNITS = {
    "us": "µs",
    "ms": "ms",
    "ids": "token ids",
    "p": "probability",
    "q": "probability",
    "calls": "calls",
    "tokens": "tokens",
    "rows": "rows",
    "steps": "steps",
    "forwards": "forwards",
    "gap": "logits",
    "gaps": "logits",
    "drafted": "drafts",
    "accepted": "drafts",
    "rejected": "drafts",
    "trimmed": "drafts",
    "emitted": "tokens",
    "past": "drafts",
    "held": "tokens",
    "advanced": "tokens",
    "retokenized": "tokens",
    "legal": "tokens",
    "len": "tokens",
    "hist": "steps",
    "batch": "sequences",
    "requests": "requests",
    "failed": "requests",
}
"""Unit by the word of a name that tells it. Of several the first here: ids before drafts."""


def unit(name: str) -> str:
    """The unit of a column or metric, which its name tells; empty = it has none."""
    if name.startswith("tok_s"):
        return "" if "ratio" in name else "tokens/s"
    words = name.split("_")
    return next((told for word, told in _UNITS.items() if word in words), "")


def metric_type(name: str) -> str:
    """The JSON type of a metric."""
    if name.endswith("_ci"):
        return "[low, high] or null"
    return _METRIC_TYPES.get(name, "float or null")


_PREFACE = """\
# The files of a run

Written by `python -m harness.results.schema` from the code; a test fails when it is stale.

| file | what |
| --- | --- |
| `steps.parquet` | one row per step and sequence |
| `requests.parquet` | one row per request and strategy |
| `summary.json` | `{"schema_version": VERSION, "strategies": {NAME: {metric: value}}}` |
| `manifest.json` | versions, hardware, commit, date, command, and the set-up as it was resolved; \
`state`: running, interrupted or finished; `resumed`: the same of each process that went on |
| `config.yaml` | the composed configuration |
| `tokens.json` | the texts of the token ids |
| `journal.jsonl` | finished requests with their steps, one a line, until the run is finished; \
`python -m harness resume=RUN` goes on behind them |
| `report.md`, `report.csv`, `page.html` | for reading, see `python -m harness.results.report` |

```python
import json
from pathlib import Path

import pandas as pd

run = Path("runs/2025-01-02-quick")
steps = pd.read_parquet(run / "steps.parquet")
requests = pd.read_parquet(run / "requests.parquet")
summary = pd.DataFrame(json.loads((run / "summary.json").read_text())["strategies"])

verified = steps[~steps["prefill"]].groupby("strategy")[["accepted", "drafted", "emitted"]].sum()
print(verified["accepted"] / verified["drafted"])  # a ratio of sums: summary.loc["accept_rate"]
print(requests.pivot(index="request", columns="strategy", values="tpot_ms").describe())
```

Ratios are ratios of sums. Times of a step are this sequence's share of its batch (batch time /
sequences in the batch), so sums over rows are sums over time. Metrics that a strategy counts as
its engine would are under `own`, beside the others.
"""


def document() -> str:
    """Every column and metric with its type, unit and meaning, as Markdown."""
    sections = {
        "steps.parquet": _column_rows(step_schema()),
        "requests.parquet": _column_rows(request_schema()),
        "summary.json": [(name, metric_type(name), doc) for name, doc in METRICS.items()],
    }
    text = _PREFACE.replace("VERSION", str(SCHEMA_VERSION))
    for file, rows in sections.items():
        text += f"\n## {file}\n\n| name | type | unit | meaning |\n| --- | --- | --- | --- |\n"
        text += "".join(
            f"| `{name}` | {kind} | {unit(name)} | {doc} |\n" for name, kind, doc in rows
        )
    return text


def _column_rows(schema: pa.Schema) -> Sequence[tuple[str, str, str]]:
    """Name, type and documentation of each column."""
    return [(field.name, _type_name(field), field.metadata[b"doc"].decode()) for field in schema]


def _type_name(field: pa.Field) -> str:
    inner = field.type.value_type if pa.types.is_list(field.type) else field.type
    listed = "list of " if inner is not field.type else ""
    return f"{listed}{inner}{' or null' if field.nullable else ''}"


if __name__ == "__main__":
    Path(__file__).with_name("README.md").write_text(document(), encoding="utf-8")
