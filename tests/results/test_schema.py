from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from harness.core import RequestTrace, StepTrace, columns
from harness.results import schema as schema_module
from harness.results.metrics import compare_with_plain, summarise
from harness.results.record import RunFolder
from harness.results.schema import (
    COUNTERS,
    METRICS,
    document,
    metric_type,
    request_schema,
    step_schema,
    unit,
)
from tests.results import tiny_run


@pytest.mark.parametrize(
    ("schema", "trace"), [(step_schema, StepTrace), (request_schema, RequestTrace)]
)
def test_every_trace_field_is_a_documented_column(schema, trace):
    docs = {field.name: field.metadata[b"doc"].decode() for field in schema()}
    assert docs == columns(trace)
    assert list(docs) == list(columns(trace))


def test_columns_have_the_types_of_the_fields():
    assert step_schema().field("tick").type == pa.int64()
    assert step_schema().field("prefill").type == pa.bool_()
    assert step_schema().field("fill_us").type == pa.list_(pa.float64())
    assert step_schema().field("emitted_ids").type == pa.list_(pa.int64())


def test_only_optional_fields_are_nullable():
    nullable = [field.name for field in (*step_schema(), *request_schema()) if field.nullable]
    assert nullable == ["valid", "identical", "divergence_gap"]


def test_every_metric_is_documented_and_every_documented_metric_is_computed():
    steps, requests = tiny_run()
    for metrics in summarise(steps, compare_with_plain(requests)).values():
        assert set(metrics) == set(METRICS)


def test_every_counter_is_a_step_column():
    assert set(COUNTERS) <= set(columns(StepTrace))


def test_rollbacks_of_all_four_kinds_are_counted():
    rollbacks = [name for name in COUNTERS if name.startswith("rollback_")]
    assert rollbacks == [name for name in columns(StepTrace) if name.startswith("rollback_")]
    assert len(rollbacks) == 8


def test_the_written_document_is_that_of_the_code():
    written = Path(schema_module.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert written == document(), "stale: run `python -m harness.results.schema`"


def test_the_document_has_every_column_and_metric_once_and_in_order():
    sections = document().split("\n## ")[1:]
    named = {part.split()[0]: re.findall(r"^\| `(\w+)` \|", part, re.M) for part in sections}
    assert named == {
        "steps.parquet": list(columns(StepTrace)),
        "requests.parquet": list(columns(RequestTrace)),
        "summary.json": list(METRICS),
    }


def test_a_line_of_the_document_says_type_unit_and_meaning():
    text = document()
    assert "| `fill_us` | list of double | µs | each mask fill of this sequence, µs |" in text
    assert "| `identical` | bool or null |  | output ids equal plain's; null" in text
    assert "| `accept_rate_ci` | [low, high] or null |  | its 95 % interval, bootstrap" in text
    assert "| `retokenized` | int | tokens | emitted ids changed by re-encoding |" in text


def test_the_example_of_the_document_runs_and_gives_the_metrics(tmp_path, monkeypatch, capsys):
    steps, requests = tiny_run()
    summary = summarise(steps, compare_with_plain(requests))
    folder = RunFolder.create(tmp_path / "runs" / "2025-01-02-quick")
    folder.write_frames(steps, requests)
    folder.write_summary(summary)
    monkeypatch.chdir(tmp_path)
    example = re.search("```python\n(.*?)```", document(), re.DOTALL)[1]
    names = {}
    exec(example, names)
    assert names["summary"].loc["accept_rate", "vllm"] == summary["vllm"]["accept_rate"]
    assert "vllm     0.428571" in capsys.readouterr().out


UNITS_IN_DOCS = re.compile(r", (µs|ms)\b")


def test_a_unit_that_the_meaning_ends_with_is_the_unit_of_the_name():
    docs = {**columns(StepTrace), **columns(RequestTrace), **METRICS}
    for name, doc in docs.items():
        said = UNITS_IN_DOCS.search(doc)
        assert (unit(name) in {"µs", "ms"}) == bool(said), name
        if said:
            assert unit(name) == said[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tok_s", "tokens/s"),
        ("tok_s_ci", "tokens/s"),
        ("tok_s_ratio_ci", ""),
        ("emitted_ids", "token ids"),
        ("emitted_p", "probability"),
        ("emitted", "tokens"),
        ("rollback_rejected_calls", "calls"),
        ("rejected_model", "drafts"),
        ("accept_rate", ""),
    ],
)
def test_the_name_tells_the_unit(name, expected):
    assert unit(name) == expected


JSON_TYPES = {
    "int": int,
    "float": float,
    "list of int": list,
    "list of float": list,
    "[low, high]": tuple,
    "null": type(None),
}


def test_metrics_have_the_types_of_the_document():
    steps, requests = tiny_run()
    runs = [tiny_run(), (steps[steps.strategy == ""], requests[requests.error != ""])]
    for rows, finished in runs:
        for metrics in summarise(rows, compare_with_plain(finished)).values():
            for name, value in metrics.items():
                allowed = tuple(JSON_TYPES[kind] for kind in metric_type(name).split(" or "))
                assert type(value) in allowed, name
