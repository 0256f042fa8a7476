from __future__ import annotations

import pyarrow as pa
import pytest

from harness.core import RequestTrace, StepTrace, columns
from harness.results.metrics import compare_with_plain, summarise
from harness.results.schema import COUNTERS, METRICS, request_schema, step_schema
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
