"""How near each strategy comes to what its forwards alone would take.

    python -m experiments.engine_limits slots=1,8,32

For each number of slots: bare replay times of the draft and the target at each length of the
context that is captured, then every strategy on the same requests, once to capture and then timed
passes in turn. Prints a table and writes
``engine_limits.json`` (and the table as Markdown) below ``out``. Settings (``name=value``):
``slots``, ``requests`` (at one slot; twice as many else), ``passes``, ``strategies``,
``whitespace``, ``compile``, ``limit`` (new tokens), ``workload``, ``draft`` (the draft model),
``out``, and ``reference``: the run folder of a greedy ``plain`` in fp32 on the same requests, whose
outputs are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from experiments.study import Study, run_study
from harness.config import Config, GrammarConfig
from harness.core import longest_common_prefix
from harness.engine import EngineConfig
from harness.garbage import forget_set_up
from harness.loop import DecodeLoop
from harness.models.graphs import StaticLM
from harness.models.language_model import RowInput
from harness.models.pair import PairConfig
from harness.results.costs import GUIDED
from harness.results.metrics import TIMES
from harness.results.predict import behind_whole_window
from harness.results.record import Recorder
from harness.results.table import NONE, Table
from harness.run import Run
from harness.workloads.loaders import WorkloadConfig

DRAFT_TOKENS = 4
DEFAULTS = {
    "slots": "1,8,32",
    "requests": "32",
    "passes": "3",
    "strategies": "plain,unguided,vllm,trtllm,llamacpp,sglang,deepinfer",
    "whitespace": "free",
    "compile": "true",
    "limit": "128",
    "workload": "bfcl",
    "reference": "",
    "draft": "smollm2-draft-3l",
}
COLUMNS = {
    "tok_s": "output tokens / time of all steps, prefill included; median of the passes (1/s)",
    "range": "slowest and fastest pass (1/s)",
    "to plain": "tok_s / plain's tok_s",
    "length": "emitted tokens per verify step, mean_accept_len",
    "ideal": "output tokens / (bare replays of all decode steps), ideal_tok_s (1/s)",
    "efficiency": "bare replays / time, decode steps only",
    "prefill": "share of the time in steps that feed prompts (%)",
    "draft": "draft forwards and sampling (µs per decode step)",
    "verify": "target forward, masks, verification (µs per decode step)",
    "grammar": "grammar work on the CPU (µs per decode step)",
    "exposed": "grammar time that the device waited for (µs per decode step)",
    "host": "everything else (µs per decode step)",
}


def main(arguments: list[str]) -> None:
    study = Study.begin("engine_limits", arguments, DEFAULTS)
    study.by_slots(lambda slots: measure(slots, study.settings), [as_table])


def measure(slots: int, settings: dict[str, str]) -> dict[str, Any]:
    """One number of slots: bare times, and every strategy's passes."""
    torch._dynamo.reset()  # the shapes of another number of slots
    recorder = Recorder()
    start = perf_counter()
    run = Run(configuration(slots, settings), recorder, lambda _: None)
    loaded_s = perf_counter() - start
    variants = variants_of(run)
    for variant in variants:  # captures every shape that the passes will need
        decode(variant, run, recorder)
    forget_set_up()
    setup_s, peak = perf_counter() - start, run.facts()["peak_memory_mib"]
    bare = bare_times(run)
    passes: dict[str, list[dict[str, float]]] = {variant.label: [] for variant in variants}
    requests = 0
    for _ in range(int(settings["passes"])):
        for variant in variants:
            steps, outputs = decode(variant, run, recorder)
            requests += len(outputs)
            passes[variant.label].append(figures(steps, outputs, bare))
            if settings["reference"] and variant.label == "plain":
                agreement = against(Path(settings["reference"]), outputs)
    return {
        "load_s": loaded_s,
        "setup_s": setup_s,
        "facts": run.facts(),
        "peak_memory_mib_before": peak,
        "requests_measured": requests,
        "bare_us": bare,
        "draft_tokens": DRAFT_TOKENS,
        "strategies": passes,
        "reference": agreement if settings["reference"] else None,
    }


@dataclass(frozen=True)
class Variant:
    """A strategy with the options that it is measured with."""

    label: str
    loop: DecodeLoop
    options: Any


def variants_of(run: Run) -> list[Variant]:
    """Every strategy of the run; sglang without jumps, comparable to the others, and with."""
    variants = []
    for loop in run.loops:
        name, options = loop.strategy.name, loop.strategy.options
        variants.append(Variant(name, loop, options))
        if name == "sglang":
            jumping = replace(options, jump_forward=True)
            variants.append(Variant("sglang, jumps", loop, jumping))
    return variants


def decode(variant: Variant, run: Run, recorder: Recorder) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All requests once: the traces of the steps and of the requests."""
    recorder.steps.clear()
    recorder.requests.clear()
    variant.loop.strategy.options = variant.options
    variant.loop.run(run.requests)
    return recorder.frames()


def against(folder: Path, outputs: pd.DataFrame) -> dict[str, Any]:
    """Where these outputs leave those of a run in fp32, and how near a tie that was there.

    Returns:
        How many of the requests have the same output, and by request that differs the fp32 lead
        of the token that was left: a near-tie explains a difference, anything else is a bug.
    """
    rows = pd.read_parquet(folder / "requests.parquet").set_index("request")
    gaps = {}
    for row in outputs.itertuples():
        theirs = list(rows.loc[row.request].output_ids)
        ours = list(row.output_ids)
        common = longest_common_prefix(ours, theirs)
        cut = not row.complete and common == len(ours)  # by a lower limit of new tokens
        if common < max(len(ours), len(theirs)) and not cut:
            gaps[row.request] = float(rows.loc[row.request].gaps[common])
    return {
        "requests": len(outputs),
        "same": len(outputs) - len(gaps),
        "largest_gap": max(gaps.values(), default=0.0),
        "gaps": gaps,
    }


def configuration(slots: int, settings: dict[str, str]) -> Config:
    count = int(settings["requests"]) * (1 if slots == 1 else 2)
    names = settings["strategies"].split(",")
    return Config(
        strategy="",
        compare=names,
        options={"sglang": {"jump_forward": False}},
        pair=PairConfig("smollm2", settings["draft"]),
        workload=WorkloadConfig(
            name=settings["workload"],
            limit=count,
            seed=None,
            max_prompt_tokens=700,
            max_new_tokens=int(settings["limit"]),
        ),
        grammar=GrammarConfig(whitespace=settings["whitespace"]),
        engine=EngineConfig(
            slots=slots,
            draft_tokens=DRAFT_TOKENS,
            mode="graphs",
            turn=count,
            compile=settings["compile"] == "true",
        ),
    )


def bare_times(run: Run) -> dict[int, dict[str, float]]:
    """By span of the context, replay times of the captured shapes, µs."""
    target, draft = run.loops[0].target, run.draft_model
    assert isinstance(target, StaticLM), "engine_limits measures captured shapes"
    ends = range(1, target.max_length + 1)
    spans = sorted({target.buckets.span(end) for end in ends})
    return {
        span: replays(target, draft if isinstance(draft, StaticLM) else None, span)
        for span in spans
    }


def replays(target: StaticLM, draft: StaticLM | None, span: int) -> dict[str, float]:
    """Replay times at one span, µs."""
    slots, start = target.buckets.slots, min(span, target.max_length) - 3 * DRAFT_TOKENS
    window = 1 + DRAFT_TOKENS

    def rows(width: int, logits: int = 1) -> list[RowInput]:
        return [RowInput(slot, start, [5] * width, logits) for slot in range(slots)]

    times: dict[str, float] = {
        "plain": timed(lambda: target.forward(rows(1)), target.device),
        "verify": timed(lambda: target.forward(rows(window, window)), target.device),
    }
    if draft is not None:
        times["draft"] = timed(lambda: draft.forward(rows(1)), draft.device)
        for name, pending in (("chain", 1), ("chain of two", 2)):
            times[name] = timed(
                lambda n=pending: draft.greedy_chain(rows(n), DRAFT_TOKENS),  # type: ignore[misc]
                draft.device,
            )
    return times


def timed(work: Callable[[], object], device: torch.device, repeats: int = 50) -> float:
    """Median time of one call with the device drained behind it, µs."""
    times = []
    for _ in range(10 + repeats):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((perf_counter() - start) * 1e6)
    return median(times[10:])


def figures(
    rows: pd.DataFrame, requests: pd.DataFrame, bare: dict[int, dict[str, float]]
) -> dict[str, float]:
    """What one pass of one strategy comes to."""
    steps = rows.assign(two=behind_whole_window(rows), end=context_ends(rows, requests))
    decode = steps[~rows.prefill]
    ticks = decode.groupby("tick").agg(
        drafted=("draft_forwards", "max"),
        two=("two", "any"),
        end=("end", "max"),
        **{name: (name, "sum") for name in [*TIMES, "exposed_us"]},
    )
    ideal_us = float(replayed(ticks, bare, guided=str(rows.strategy.iloc[0]) == GUIDED).sum())
    total_us = float(rows[TIMES].to_numpy().sum())
    decode_us = float(ticks[TIMES].to_numpy().sum())
    per_step = {name: float(ticks[name].mean()) for name in [*TIMES, "exposed_us"]}
    return {
        "tok_s": float(requests.output_tokens.sum()) / total_us * 1e6,
        "ideal_tok_s": float(decode.emitted.sum()) / ideal_us * 1e6,
        "efficiency": ideal_us / decode_us,
        "prefill_share": 1 - decode_us / total_us,
        "mean_accept_len": float(decode.emitted.sum()) / len(decode),
        "accept_rate": float(decode.accepted.sum()) / max(1, int(decode.drafted.sum())),
        "tokens": int(requests.output_tokens.sum()),
        "failed": int((requests.error != "").sum()),
        **per_step,
    }


def context_ends(rows: pd.DataFrame, requests: pd.DataFrame) -> pd.Series:
    """By step row, the tokens that its sequence held at the end of its forward."""
    prompts = requests.set_index("request").prompt_tokens
    grown = rows.emitted + rows.jump_tokens
    before = grown.groupby(rows.request).cumsum() - rows.emitted
    return rows.request.map(prompts) + before + rows.rows - 1


def replayed(
    ticks: pd.DataFrame, bare: dict[int, dict[str, float]], guided: bool
) -> pd.Series[float]:
    """What the forwards of each tick take when nothing else is done, µs."""
    span = ticks.end.map(lambda end: min(size for size in bare if size >= min(end, max(bare))))
    times = pd.DataFrame.from_dict(bare, orient="index").reindex(
        columns=["plain", "verify", "draft", "chain", "chain of two"], fill_value=0.0
    )
    at = times.loc[span].set_index(ticks.index)
    drafts = ticks.drafted > 0
    chain = at["chain of two"].where(ticks.two, at["chain"])
    draft = ticks.drafted * at["draft"] if guided else drafts * chain
    return draft + at["verify"].where(drafts, at["plain"])


def as_table(slots: int, study: dict[str, Any]) -> Table:
    """One row per strategy: medians over the passes."""
    plain = [each["tok_s"] for each in study["strategies"].get("plain", ())]
    rows = []
    for name, passes in study["strategies"].items():
        middle = {key: median(each[key] for each in passes) for key in passes[0]}
        speeds = [each["tok_s"] for each in passes]
        rows.append(
            (
                name,
                f"{middle['tok_s']:.0f}",
                f"{min(speeds):.0f}–{max(speeds):.0f}",
                f"{middle['tok_s'] / median(plain):.2f}" if plain else NONE,
                f"{middle['mean_accept_len']:.2f}",
                f"{middle['ideal_tok_s']:.0f}",
                f"{middle['efficiency']:.2f}",
                f"{100 * middle['prefill_share']:.0f}",
                *(
                    f"{middle[key]:.0f}"
                    for key in ("draft_us", "verify_us", "grammar_us", "exposed_us", "host_us")
                ),
            )
        )
    bare = "; ".join(
        f"at {span} tokens " + ", ".join(f"{name} {us:.0f} µs" for name, us in times.items())
        for span, times in study["bare_us"].items()
    )
    title = f"{slots} slots; bare replays {bare}; {memory(study)}"
    if agreement := study["reference"]:
        title += (
            f"; plain against fp32: {agreement['same']} of {agreement['requests']} outputs the "
            f"same, largest lead where one differs {agreement['largest_gap']:.2g}"
        )
    return Table(
        title=title,
        headers=("strategy", *COLUMNS),
        rows=tuple(rows),
        docs=("strategy that ran", *COLUMNS.values()),
    )


def memory(study: dict[str, Any]) -> str:
    """What the engine took, and whether it grew while the passes were measured."""
    facts = study["facts"]
    setup = f"set up in {study['setup_s']:.0f} s, {facts['graphs']} graphs"
    if facts["peak_memory_mib"] is None:
        return setup
    return (
        f"{setup}; peak memory {study['peak_memory_mib_before']:.0f} MiB, after "
        f"{study['requests_measured']} more requests {facts['peak_memory_mib']:.0f} MiB"
    )


if __name__ == "__main__":
    run_study(main)
