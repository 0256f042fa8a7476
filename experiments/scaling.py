"""How a run grows over processes: tokens per second, and what they cost each other.

    python -m experiments.scaling dp=1,2 slots=1,8 strategies=plain,vllm,trtllm

All numbers of processes decode the same requests in the same batches, passes in turn, each process
on a device of its own, with torch threads for its part of the cores when there are most of them.
Processes exchange nothing, so what is lost is lost to one of two things: shards that end at
different times (``balance``), or a host on which the grammar and Python work of all want the same
cores (``stretch``).

``model`` is what the what-if calculator makes of the first run (``harness.data_parallel.model``);
it also answers for numbers that were not measured (``beyond``). Prints tables and writes
``scaling.json`` (and the tables as Markdown) below ``out``. Settings (``name=value``): ``dp`` (the
first is what the others are compared with), ``beyond``, ``slots``, ``turns`` (batches of full slots
per process, at the largest of ``dp``), ``passes``, ``strategies``, ``workload``, ``path``,
``limit`` (new tokens), ``whitespace``, ``target``, ``draft``, ``device``, ``compile``, ``out``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import pandas as pd

from experiments.study import Study, numbers
from harness.config import Config
from harness.data_parallel.model import ScalingModel
from harness.data_parallel.run import merge
from harness.data_parallel.shard import Shard
from harness.data_parallel.throughput import throughputs
from harness.data_parallel.workers import Workers
from harness.engine import EngineConfig
from harness.errors import exit_status
from harness.grammar.service import GrammarConfig
from harness.models.pair import PairConfig
from harness.results.fit import fit
from harness.results.manifest import cores
from harness.results.metrics import TIMES
from harness.results.record import Recorder
from harness.results.table import NONE, Table
from harness.workloads.loaders import WorkloadConfig

DRAFT_TOKENS = 4
DEFAULTS = {
    "dp": "1,2",
    "beyond": "4,8",
    "slots": "8",
    "turns": "4",
    "passes": "3",
    "strategies": "plain,vllm,trtllm,deepinfer",
    "workload": "bfcl",
    "path": "",
    "limit": "128",
    "whitespace": "free",
    "target": "smollm2",
    "draft": "smollm2-draft-3l",
    "device": "auto",
    "compile": "true",
}
SPEED = {
    "dp": "processes; measured, or from the model alone",
    "tok/s": "output tokens of all / time of the slowest process; median of the passes (1/s)",
    "range": "slowest and fastest pass (1/s)",
    "efficiency": "tok/s per process / tok/s per process at the first dp; median of the passes",
    "model": "tok/s as predicted from the costs at the first dp (1/s)",
    "model efficiency": "the same ratio of the predictions",
    "balance": "mean time of the processes / that of the slowest",
    "same %": "outputs equal to those at the first dp",
}
TIME = {
    "dp": "processes",
    "forward": "draft and verify time (µs per verify step)",
    "grammar": "grammar work on the CPU (µs per verify step)",
    "exposed": "of it, what the device waited for (µs per verify step)",
    "host": "everything else (µs per verify step)",
    "grammar %": "grammar work, share of all time",
    "stretch": "grammar and host / the same at the first dp",
    "cores": "that all processes kept busy, all strategies together",
}


def main(arguments: Sequence[str]) -> int:
    """The command line; returns its exit status, 2 for what the user can correct."""
    return exit_status(lambda: _study(arguments))


def _study(arguments: Sequence[str]) -> int:
    study = Study.begin("scaling", arguments, DEFAULTS)
    study.by_slots(lambda slots: measure(slots, study.settings), (speed_table, time_table))
    return 0


@dataclass(frozen=True)
class Pass:
    """All requests, decoded once by ``dp`` processes."""

    dp: int
    steps: pd.DataFrame
    requests: pd.DataFrame
    tok_s: dict[str, float]
    balance: dict[str, float]
    cores_used: float


def measure(slots: int, settings: Mapping[str, str]) -> dict[str, Any]:
    """One number of slots: all numbers of processes, and what the model says of them."""
    counts = numbers(settings["dp"])
    with ExitStack() as stack:
        with ThreadPoolExecutor() as threads:
            ready = threads.map(started, [configuration(n, slots, settings) for n in counts])
            pools = dict(zip(counts, ready, strict=True))
        for workers in pools.values():
            stack.callback(workers.close)
        passes: dict[int, list[Pass]] = {count: [] for count in counts}
        for _ in range(int(settings["passes"])):
            for count, workers in pools.items():
                passes[count].append(decode(workers))
    first = passes[counts[0]]
    model = fitted(first[0], slots)
    return {
        "cores": cores(),
        "costs": asdict(model.costs),
        "cores_per_process": model.cores_per_process,
        "measured": {
            name: [figures(passes[count], first, model, name) for count in counts]
            for name in settings["strategies"].split(",")
        },
        "predicted": {
            name: [prediction(model, name, count) for count in numbers(settings["beyond"])]
            for name in settings["strategies"].split(",")
        },
    }


def started(config: Config) -> Workers:
    """Processes that have compiled every grammar and captured every shape."""
    workers = Workers(config, set())
    workers.do("warm_up")
    decode(workers)
    return workers


def configuration(count: int, slots: int, settings: Mapping[str, str]) -> Config:
    """The same requests for every ``count``: turns of full slots for each of the most processes."""
    most = max(numbers(settings["dp"]))
    return Config(
        strategy="",
        compare=settings["strategies"].split(","),
        options={"sglang": {"jump_forward": False}},
        pair=PairConfig(settings["target"], settings["draft"], device=settings["device"]),
        workload=WorkloadConfig(
            name=settings["workload"],
            path=settings["path"] or None,
            limit=slots * most * int(settings["turns"]),
            seed=None,
            max_prompt_tokens=700,
            max_new_tokens=int(settings["limit"]),
        ),
        grammar=GrammarConfig(whitespace=settings["whitespace"]),
        engine=EngineConfig(
            slots=slots,
            draft_tokens=DRAFT_TOKENS,
            turn=slots,
            threads=max(1, cores() // most),
            compile=settings["compile"] == "true",
            dp=count,
        ),
    )


def decode(workers: Workers) -> Pass:
    """All requests once."""
    recorder, count = Recorder(), len(workers.ready)
    finished = workers.do("go", lambda index, entry: merge(entry, Shard(index, count), recorder))
    steps, requests = recorder.frames()
    found = throughputs(recorder.steps, recorder.requests, [each.mine for each in workers.ready])
    return Pass(
        count,
        steps,
        requests,
        {name: each.tok_s or 0.0 for name, each in found.items()},
        {name: each.balance or 1.0 for name, each in found.items()},
        sum(each.cpu_s for each in finished) / max(each.wall_s for each in finished),
    )


def figures(
    passes: Sequence[Pass], first: Sequence[Pass], model: ScalingModel, name: str
) -> dict[str, Any]:
    """One strategy on some number of processes, against the first number: medians over passes."""
    per_process = [[each.tok_s[name] / each.dp for each in those] for those in (passes, first)]
    spent, before = (
        pd.DataFrame([spent_us(each.steps, name) for each in those]).median()
        for those in (passes, first)
    )
    on_cpu = ["grammar_us", "host_us"]
    return {
        **prediction(model, name, passes[0].dp),
        "tok_s": median(each.tok_s[name] for each in passes),
        "range": [pick(each.tok_s[name] for each in passes) for pick in (min, max)],
        "efficiency": median(ours / theirs for ours, theirs in zip(*per_process, strict=True)),
        "balance": median(each.balance[name] for each in passes),
        **{str(key): float(value) for key, value in spent.items()},
        "stretch": float(spent[on_cpu].sum() / before[on_cpu].sum()),
        "cores": median(each.cores_used for each in passes),
        "same": same_outputs(name, passes[0].requests, first[0].requests),
    }


def fitted(run: Pass, slots: int) -> ScalingModel:
    """The model of what this pass did."""
    served = run.requests[run.requests["prompt_tokens"] > 0]
    ids = list(dict.fromkeys(served["request"]))
    return ScalingModel(
        costs=fit(run.steps),
        steps=run.steps,
        turns=[ids[start : start + slots] for start in range(0, len(ids), slots)],
        cores=cores(),
        cores_per_process=run.cores_used / run.dp,
        fitted_at=run.dp,
    )


def prediction(model: ScalingModel, name: str, count: int) -> dict[str, Any]:
    """What the model says of one strategy on ``count`` processes."""
    tok_s, before = (model.tok_s(n)[name] / n for n in (count, model.fitted_at))
    return {"dp": count, "model": tok_s * count, "model_efficiency": tok_s / before}


def spent_us(steps: pd.DataFrame, name: str) -> dict[str, float]:
    """Where a strategy's time went, µs per verify step; and the grammar's share of all."""
    rows = steps[steps["strategy"] == name]
    verify = rows[~rows["prefill"]]
    sums = verify[[*TIMES, "exposed_us"]].sum() / len(verify)
    return {
        "forward_us": sums["draft_us"] + sums["verify_us"],
        **{key: sums[key] for key in ("grammar_us", "exposed_us", "host_us")},
        "grammar_share": rows["grammar_us"].sum() / rows[TIMES].to_numpy().sum(),
    }


def same_outputs(name: str, requests: pd.DataFrame, others: pd.DataFrame) -> float:
    """Share of a strategy's outputs that are equal in two passes."""
    ours, theirs = (
        frame[frame["strategy"] == name].set_index("request")["output_ids"].map(tuple)
        for frame in (requests, others)
    )
    return float((ours == theirs.reindex(ours.index)).mean())


def speed_table(slots: int, measured: Mapping[str, Any]) -> Table:
    """How fast all are together: one row per strategy and number of processes."""
    rows: list[tuple[str, ...]] = []
    for name, lines in measured["measured"].items():
        rows += [
            (
                name,
                str(line["dp"]),
                f"{line['tok_s']:.0f}",
                "–".join(f"{end:.0f}" for end in line["range"]),
                f"{line['efficiency']:.2f}",
                f"{line['model']:.0f}",
                f"{line['model_efficiency']:.2f}",
                f"{line['balance']:.2f}",
                f"{100 * line['same']:.0f}",
            )
            for line in lines
        ]
        rows += [
            (
                name,
                str(line["dp"]),
                *[NONE] * 3,
                f"{line['model']:.0f}",
                f"{line['model_efficiency']:.2f}",
                *[NONE] * 2,
            )
            for line in measured["predicted"][name]
        ]
    title = f"Speed: {slots} slots a process, {measured['cores']} cores"
    docs = ("strategy that ran", *SPEED.values())
    return Table(title, ("strategy", *SPEED), docs, tuple(rows))


def time_table(slots: int, measured: Mapping[str, Any]) -> Table:
    """Where the time of a process goes: one row per strategy and number of processes."""
    rows = tuple(
        (
            name,
            str(line["dp"]),
            *(f"{line[f'{key}_us']:.0f}" for key in ("forward", "grammar", "exposed", "host")),
            f"{100 * line['grammar_share']:.0f}",
            f"{line['stretch']:.2f}",
            f"{line['cores']:.1f}",
        )
        for name, lines in measured["measured"].items()
        for line in lines
    )
    docs = ("strategy that ran", *TIME.values())
    return Table(f"Time: {slots} slots a process", ("strategy", *TIME), docs, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
