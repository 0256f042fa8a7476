"""Every schema of JSONSchemaBench under both engines."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from experiments.faults import text
from experiments.faults.cases import SERVED, Case, Outcome, draw
from experiments.faults.scene import Scene, play
from harness.grammar.spec import GrammarSpec
from harness.workloads.loaders import WorkloadConfig, data_path
from tests.toys import ENGINES

STRIDE = 617
"""Has no divisor in common with the number of cases, so that a slice is a sample."""

MAX_TOKENS = 120
"""Of an output: the rows of a table model are short."""


@cache
def records() -> list[dict[str, Any]]:
    """The data set, in its order."""
    path = data_path(WorkloadConfig("jsonschemabench"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(case: Case) -> Outcome:
    """The pair writes a valid instance of the schema, as far as the grammar lets it."""
    random = case.random()
    number = case.seed * STRIDE % (len(ENGINES) * len(records()))
    record, engine = records()[number // len(ENGINES)], ENGINES[number % len(ENGINES)]
    settings = replace(draw(random, constrained=True), engine=engine)
    instance = json.dumps(random.choice(record["valid"]), ensure_ascii=False)
    wanted = [*text.codec().encode(instance), text.vocabulary().eos_id][:MAX_TOKENS]
    requests = text.among(random, GrammarSpec.json_schema(record["schema"]), 1 + len(wanted))
    scene = Scene(settings, text.toy(settings, random, wanted), requests, record["id"])
    outcome, victims = play(case, scene)
    if outcome.ending == SERVED and list(victims[0].output_ids) == wanted:
        outcome.reason = "wrote the instance"
    return text.judge(outcome, victims)
