"""Whether each strategy samples from the law that it should, and by how much the biased ones miss.

    python -m experiments.losslessness

No model of the pair runs: two tables of logits over five tokens do, under a grammar whose text has
several tokenisations. The law that counts is the locally projected one, ``p`` restricted to legal
tokens at every position. The first table is exact: the real loop runs in every cell of the
space of its random draws, and the cells' volumes add up to the law of its outputs
(``tests/exact/draws.py``). The second tests the draws themselves: the real generator, enough of
them that any law at a total variation of ``variation`` is caught with a probability of ``power``,
at a false alarm rate of ``false_alarm`` for all of them together (``tests/exact/gtest.py``).
Prints both and writes ``losslessness.json`` (and the tables as Markdown) below ``out``; exits 1 if
a strategy is biased that should not be, or a bias has not the size that its rule gives it. Settings
(``name=value``): ``limit`` (tokens of an output), ``samplings``, ``engines``, ``variation``,
``power``, ``false_alarm``, ``processes``, ``out``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from multiprocessing import get_context
from typing import Any

import torch

from experiments.study import Study, run_study
from harness.results.table import NONE, Table, print_tables
from tests.exact.cases import (
    AS_EXPECTED,
    BIASED,
    CASES,
    CONTROLS,
    LOSSLESS,
    SAMPLINGS,
    VERDICTS,
    find,
)
from tests.exact.gtest import draws_needed, g_test
from tests.exact.laws import outcome_law, total_variation
from tests.toys import ENGINES

Result = dict[str, Any]
"""What was found about one case."""
OFF = "largest total variation between its law and the one that its options promise (fp32)"

DEFAULTS = {
    "limit": "4",
    "samplings": ",".join(SAMPLINGS),
    "engines": ",".join(ENGINES),
    "variation": "0.02",
    "power": "0.99",
    "false_alarm": "1e-6",
    "processes": str(os.cpu_count()),
}
CHUNK = 4096
"""Requests of one run of the loop."""
EXACT = {
    "strategy": "and its options",
    "drafts": "the draft model's argmax (one-hot q), or sampled from its law (true q)",
    "grammar": "engine",
    "cells": "of the space of random draws, all samplings; the loop ran twice in each",
}
SAMPLED = {
    "strategy": "and its options",
    "draws": "requests, each with a seed of its own",
    "G": "statistic against the projected law; none if an outcome is impossible",
    "freedom": "degrees of freedom",
    "p-value": "probability of a G like this or larger, if that law is right",
    "TV": "total variation between the sample and the projected law",
    "TV below": "99 % upper bound of that of the sample's own law",
    "promised": "that of the law that the options promise",
    "verdict": "BIASED = the promised law is rejected; biased as expected = only the projected one",
}


def main(arguments: Sequence[str]) -> None:
    study = Study.begin("losslessness", arguments, DEFAULTS)
    settings = study.settings
    samplings, engines = (settings[name].split(",") for name in ("samplings", "engines"))
    integrate = partial(exact_result, limit=int(settings["limit"]))
    sample = partial(sampled_result, engine=engines[0], settings=settings)
    jobs = product(range(len(CASES)), engines, samplings)
    one_thread = partial(torch.set_num_threads, 1)  # rows of five tokens are slower on several
    workers, context = int(settings["processes"]), get_context("fork")
    with ProcessPoolExecutor(workers, context, one_thread) as pool:
        drawn = pool.map(sample, controls())  # the longest ones first
        exact = list(pool.map(integrate, *zip(*jobs, strict=True)))
        sampled = list(drawn)
    tables = [exact_table(exact, samplings), sampled_table(sampled)]
    print_tables(tables)
    study.write(tables, {"exact": exact, "sampled": sampled})
    if biased := [row["strategy"] for row in (*exact, *sampled) if row["verdict"] == BIASED]:
        sys.exit(f"error: not the promised law: {'; '.join(dict.fromkeys(biased))}")


def controls() -> list[int]:
    """Indices of the cases that are sampled."""
    return [i for i, case in enumerate(CASES) if (case.name, case.drafts) in CONTROLS]


def exact_result(index: int, engine: str, sampling: str, limit: int) -> Result:
    """Integrate one case, given as its index: rules are no values that processes could exchange."""
    case = CASES[index]
    finding = find(case, case.problem(SAMPLINGS[sampling], engine, limit))
    return {
        "strategy": case.name,
        "drafts": case.drafts,
        "grammar": engine,
        "sampling": sampling,
        "cells": finding.integral.cells,
        "TV": finding.measured,
        "promised": finding.promised,
        "off": finding.off,
        "verdict": finding.verdict,
    }


def sampled_result(index: int, engine: str, settings: Mapping[str, str]) -> Result:
    """G-tests of one case, with the harness's own draws."""
    case = CASES[index]
    problem = case.problem(SAMPLINGS["temperature"], engine, int(settings["limit"]))
    projection, promise = outcome_law(problem), case.expected(problem)
    alarm = float(settings["false_alarm"]) / (2 * len(CONTROLS))  # two tests a case
    variation, power = float(settings["variation"]), float(settings["power"])
    draws = draws_needed(len(projection), variation, alarm, power)
    outcomes = [
        outcome
        for start in range(0, draws, CHUNK)
        for outcome in case.decode(problem, range(start, min(start + CHUNK, draws)))
    ]
    against_projection, against_promise = g_test(outcomes, projection), g_test(outcomes, promise)
    verdict = AS_EXPECTED if against_projection.p_value < alarm else LOSSLESS
    return {
        "strategy": case.name,
        "grammar": engine,
        **asdict(against_projection),
        "promised": total_variation(promise, projection),
        "false_alarm": alarm,
        "verdict": BIASED if against_promise.p_value < alarm else verdict,
    }


def exact_table(results: Sequence[Result], samplings: Sequence[str]) -> Table:
    """A row per case and grammar engine, a column per sampling."""
    keys = ("strategy", "drafts", "grammar")
    groups = groupby(results, key=lambda result: tuple(str(result[key]) for key in keys))
    tv = "total variation between the law of its outputs and the projected law; 0 = lossless"
    docs = {**EXACT, **dict.fromkeys(samplings, tv), "off": OFF, "verdict": "of all samplings"}
    return Table(
        "Exact laws of whole outputs: total variation from the projected law",
        tuple(docs),
        tuple(docs.values()),
        tuple((*names, *exact_cells(list(group))) for names, group in groups),
    )


def exact_cells(row: Sequence[Result]) -> Iterator[str]:
    """What stands behind the names of a case in the exact table."""
    yield str(sum(result["cells"] for result in row))
    for result in row:
        yield "0" if result["verdict"] == LOSSLESS else f"{result['TV']:.4f}"
    yield f"{max(result['off'] for result in row):.0e}"
    yield max((result["verdict"] for result in row), key=VERDICTS.index)


def sampled_table(results: Sequence[Result]) -> Table:
    """A row per control."""
    return Table(
        "G-tests of the real draws, at temperature",
        tuple(SAMPLED),
        tuple(SAMPLED.values()),
        tuple(
            (
                result["strategy"],
                str(result["draws"]),
                NONE if result["g"] is None else f"{result['g']:.1f}",
                str(result["freedom"]),
                f"{result['p_value']:.2g}",
                f"{result['variation']:.4f}",
                f"{result['bound']:.4f}",
                f"{result['promised']:.4f}",
                result["verdict"],
            )
            for result in results
        ),
    )


if __name__ == "__main__":
    run_study(main)
