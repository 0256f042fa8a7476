"""The records that a draft is trained on.

BFCL's ``train`` split and JSONSchemaBench, which has no splits; no record of BFCL's ``eval`` split
leaves ``read``. A seeded tenth of both is held out for the curve of the training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.errors import ConfigError
from harness.workloads.item import Item, derive_seed
from harness.workloads.loaders import WorkloadConfig, data_path
from harness.workloads.records import bfcl_item, jsonschemabench_item

Record = Mapping[str, Any]

CALLS, SCHEMAS = "bfcl", "jsonschemabench"
HELD_OUT_SEED = 20_261_130
HELD_OUT = 10
"""One record in so many is held out."""


def read(workload: str, split: str) -> list[Record]:
    """The records of one split of a workload; a workload without splits is all ``train``.

    Raises:
        ConfigError: the file is missing, or has no such record.
    """
    lines = data_path(WorkloadConfig(name=workload)).read_bytes().splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    chosen = [record for record in records if record.get("split", "train") == split]
    if not chosen:
        raise ConfigError(f"workload.path: {workload} has no record of split {split}")
    return chosen


def is_held_out(record: Record) -> bool:
    """Whether training leaves it out; the same for ever."""
    return derive_seed(HELD_OUT_SEED, record["id"]) % HELD_OUT == 0


def is_call(record: Record) -> bool:
    """It has functions to call: one of BFCL's."""
    return "functions" in record


def source(record: Record, made: str) -> str:
    """What a sequence came of: the workload of its record, and how its output was made."""
    return f"{CALLS if is_call(record) else SCHEMAS}, {made}"


def to_item(record: Record) -> Item:
    """The prompt and grammar that the harness makes of it."""
    return bfcl_item(record) if is_call(record) else jsonschemabench_item(record)


def answers(record: Record) -> list[Any]:
    """Its reference answers, as JSON values."""
    if is_call(record):
        return [record["instance"]] if "instance" in record else []
    return list(record["valid"])
