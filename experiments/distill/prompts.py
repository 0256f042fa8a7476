"""The records that a draft is trained on, and new prompts made from them.

BFCL's ``train`` split and JSONSchemaBench, which has no splits; no record of BFCL's ``eval`` split
leaves ``read``. A seeded tenth of both is held out for the curve of the training.

More prompts without more data: a record keeps its question, schema and reference answer, and gets
functions of other records beside its own, in another order (``with_distractors``); or it
gets another record's question, and loses its reference answer (``with_question``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
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
MOST_DISTRACTORS = 2


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
    """Its reference answers, as JSON values; none for a question that is not its own."""
    if is_call(record):
        return [record["instance"]] if "instance" in record else []
    return list(record["valid"])


def with_distractors(record: Record, others: Sequence[Record], random: Random) -> Record:
    """Up to ``MOST_DISTRACTORS`` functions of other records beside its own, all in a new order."""
    own = list(record["functions"])
    names = {function["name"] for function in own}
    for other in random.sample(others, min(len(others), random.randint(0, MOST_DISTRACTORS))):
        function = random.choice(other["functions"])
        if function["name"] not in names:
            own.append(function)
            names.add(function["name"])
    random.shuffle(own)
    return {**record, "functions": own}


def with_question(record: Record, others: Sequence[Record], random: Random) -> Record:
    """Another record's question over its own functions; there is no reference answer to that."""
    kept = {name: value for name, value in record.items() if name != "instance"}
    return {**kept, "messages": random.choice(others)["messages"]}


def distracted(records: Sequence[Record], variant: int, seed: int) -> list[Record]:
    """A variant of each record by ``with_distractors``; variant 0 is the record itself.

    Args:
        records: those that are mixed: of the training, none other.
        variant: each one is another draw.
        seed: of the draws.
    """
    return _mix(records, variant, seed, with_distractors)


def requestioned(records: Sequence[Record], variant: int, seed: int) -> list[Record]:
    """The same by ``with_question``."""
    return _mix(records, variant, seed, with_question)


def _mix(
    records: Sequence[Record],
    variant: int,
    seed: int,
    mix: Callable[[Record, Sequence[Record], Random], Record],
) -> list[Record]:
    calls = [record for record in records if is_call(record)]

    def one(record: Record) -> Record:
        if variant == 0 or not is_call(record):
            return record
        return mix(record, calls, Random(derive_seed(seed, f"{variant}/{record['id']}")))

    return [one(record) for record in records]
