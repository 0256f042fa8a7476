"""From traces to numbers: ratios of sums, intervals by bootstrap over requests, identities.

Frames are those of ``Recorder.frames`` or of a run folder. Ticks are unique within a
strategy. A *verify step* is a row of the step table that is no prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from harness.core import ROLLBACK_KINDS, Finish, longest_common_prefix
from harness.errors import HarnessError
from harness.results.schema import COUNTERS, Metrics

PLAIN = "plain"
"""The strategy that all others are compared with."""

NEAR_TIE = 1e-2
"""Logit lead (fp32) below which another forward width may flip a greedy choice."""

Interval = tuple[float, float]

TIMES = ["draft_us", "verify_us", "grammar_us", "host_us"]
"""Step columns that exclude each other: their sum over rows is wall time."""


def compare_with_plain(requests: pd.DataFrame) -> pd.DataFrame:
    """Fill ``identical``, ``first_divergence`` and ``divergence_gap``.

    Each output is compared with that of ``plain`` for the same request and seed; where there
    is none, ``identical`` and the gap are null.
    """
    plain = {
        (request, seed): (output, leads)
        for strategy, request, seed, output, leads in _outputs(requests)
        if strategy == PLAIN
    }
    identical: list[bool | None] = []
    first: list[int] = []
    gaps: list[float | None] = []
    for _, request, seed, output, _ in _outputs(requests):
        reference, leads = plain.get((request, seed), (output, []))
        at = divergence(output, reference)
        identical.append(at < 0 if (request, seed) in plain else None)
        first.append(at)
        gaps.append(_gap(at, output, leads))
    return requests.assign(
        identical=pd.Series(identical, index=requests.index, dtype="object"),
        first_divergence=pd.Series(first, index=requests.index, dtype="int64"),
        divergence_gap=pd.Series(gaps, index=requests.index, dtype="float64"),
    )


def _outputs(requests: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Strategy, request id, seed, output ids and logit leads of each row."""
    yield from zip(
        *(requests[name] for name in ("strategy", "request", "seed", "output_ids", "gaps")),
        strict=True,
    )


def divergence(output: Sequence[int], reference: Sequence[int]) -> int:
    """Index of the first id that differs, or where the shorter one ends; -1 = none."""
    shared = longest_common_prefix(output, reference)
    return -1 if shared == len(output) == len(reference) else shared


def _gap(at: int, output: Sequence[int], reference_gaps: Sequence[float]) -> float | None:
    """Plain's logit lead where the other chose another token.

    An output that merely ends there (it failed) was not flipped by a near tie: no gap.
    """
    chose = 0 <= at < len(output) and at < len(reference_gaps)
    return float(reference_gaps[at]) if chose else None


def summarise(steps: pd.DataFrame, requests: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Every metric of ``schema.METRICS`` by strategy, ready for JSON.

    Args:
        steps: step rows of one run.
        requests: its request rows, from ``compare_with_plain``.
    """
    names = [str(name) for name in requests["strategy"].unique()]
    parts = {
        name: (steps[steps["strategy"] == name], requests[requests["strategy"] == name])
        for name in names
    }
    totals = {name: _totals_by_request(*part) for name, part in parts.items()}
    return {
        name: {
            **_work(parts[name][0]),
            **_acceptance(parts[name][0], totals[name]),
            **_times(*parts[name]),
            **_throughput(totals[name], totals.get(PLAIN)),
            **_outcomes(parts[name][1]),
        }
        for name in names
    }


def bootstrap_interval(
    values_numerator: ArrayLike, values_denominator: ArrayLike, seed: int = 0, samples: int = 1000
) -> Interval | None:
    """95 % percentile interval of a ratio of sums; the requests are resampled.

    Args:
        values_numerator: ``[requests]``, what each request adds to the numerator.
        values_denominator: ``[requests]``, what it adds to the denominator.
        seed: of the resampling.
        samples: number of resamples.

    Returns:
        The 2.5 % and 97.5 % quantiles; None where the denominator is always 0.
    """
    return _interval([values_numerator], [values_denominator], seed, samples)


def _interval(
    numerators: Sequence[ArrayLike],
    denominators: Sequence[ArrayLike],
    seed: int = 0,
    samples: int = 1000,
) -> Interval | None:
    """Interval of (product of sums) / (product of sums), all over the same resample of requests.

    How often each request is drawn is multinomial, so a resample is a vector of counts.
    """
    over, under = (np.asarray(values, dtype=np.float64) for values in (numerators, denominators))
    size = over.shape[1]  # over, under: [factors, requests]
    if size == 0:
        return None
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(size, np.full(size, 1 / size), size=samples)  # [samples, size]
    top, bottom = (drawn @ over.T).prod(axis=1), (drawn @ under.T).prod(axis=1)
    ratios = top[bottom > 0] / bottom[bottom > 0]
    if ratios.size == 0:
        return None
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


def _totals_by_request(steps: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Per request id, in its order, what the ratios are made of. Requests without steps count."""
    verify = ~steps["prefill"]
    rows = pd.DataFrame(
        {
            "request": steps["request"],
            "drafted": steps["drafted"],
            "accepted": steps["accepted"],
            "emitted": steps["emitted"].where(verify, 0),
            "verify_steps": verify.astype("int64"),
            "seconds": steps[TIMES].sum(axis=1) / 1e6,
        }
    )
    tokens = requests.groupby("request")[["output_tokens"]].sum()
    return tokens.join(rows.groupby("request").sum(), how="left").fillna(0.0).sort_index()


def _work(steps: pd.DataFrame) -> dict[str, Any]:
    """Counts of drafts, rows, rollbacks and forwards.

    Rows that share a tick share the target's forward; a sequence that needs fewer draft
    forwards than its neighbours sits out the last ones, so the tick ran the largest number.
    """
    counts = {name: int(steps[name].sum()) for name in COUNTERS}
    return {
        **counts,
        "rollback_calls": sum(counts[f"rollback_{kind}_calls"] for kind in ROLLBACK_KINDS),
        "rollback_tokens": sum(counts[f"rollback_{kind}_tokens"] for kind in ROLLBACK_KINDS),
        "target_forwards": int(steps["tick"].nunique()),
        "draft_forwards": int(steps.groupby("tick")["draft_forwards"].max().sum()),
    }


def _acceptance(steps: pd.DataFrame, totals: pd.DataFrame) -> dict[str, Any]:
    histogram = np.bincount(steps.loc[~steps["prefill"], "accepted"].to_numpy(dtype=np.int64))
    verify_steps = int(totals["verify_steps"].sum())
    more_than = histogram[::-1].cumsum()[::-1][1:]
    return {
        "verify_steps": verify_steps,
        "emitted": int(totals["emitted"].sum()),
        "accept_hist": histogram.tolist(),
        "accept_at": (more_than / max(verify_steps, 1)).tolist(),
        **_with_interval("accept_rate", totals, "accepted", "drafted"),
        **_with_interval("mean_accept_len", totals, "emitted", "verify_steps"),
    }


def _with_interval(
    metric: str, totals: pd.DataFrame, numerator: str, denominator: str
) -> dict[str, Any]:
    return {
        metric: _ratio(totals[numerator].sum(), totals[denominator].sum()),
        f"{metric}_ci": bootstrap_interval(
            totals[numerator].to_numpy(), totals[denominator].to_numpy()
        ),
    }


def _times(steps: pd.DataFrame, requests: pd.DataFrame) -> dict[str, Any]:
    verify = steps[~steps["prefill"]]
    fills = np.concatenate([np.zeros(0), *steps["fill_us"]])
    begun = requests[requests["output_tokens"] > 0]
    later_tokens = begun["output_tokens"] - 1
    return {
        "compile_ms": float(requests["compile_ms"].sum()),
        "fill_us_p50": float(np.quantile(fills, 0.5)) if fills.size else None,
        "fill_us_p99": float(np.quantile(fills, 0.99)) if fills.size else None,
        **{name: _ratio(verify[name].sum(), len(verify)) for name in [*TIMES, "exposed_us"]},
        "ttft_ms": _ratio(begun["ttft_ms"].sum(), len(begun)),
        "tpot_ms": _ratio((begun["tpot_ms"] * later_tokens).sum(), later_tokens.sum()),
    }


def _throughput(totals: pd.DataFrame, plain: pd.DataFrame | None) -> dict[str, Any]:
    """Tokens per second, and as a multiple of plain's over the requests that both ran."""
    speed = _with_interval("tok_s", totals, "output_tokens", "seconds")
    if plain is None:
        return {**speed, "tok_s_ratio": None, "tok_s_ratio_ci": None}
    both = totals.join(plain.add_suffix("_plain"), how="inner")
    over = [both["output_tokens"].to_numpy(), both["seconds_plain"].to_numpy()]
    under = [both["seconds"].to_numpy(), both["output_tokens_plain"].to_numpy()]
    return {
        **speed,
        "tok_s_ratio": _ratio(over[0].sum() * over[1].sum(), under[0].sum() * under[1].sum()),
        "tok_s_ratio_ci": _interval(over, under),
    }


def _outcomes(requests: pd.DataFrame) -> dict[str, Any]:
    judged = requests[requests["complete"] & requests["valid"].notna()]
    compared = requests[requests["identical"].notna()]
    gaps = requests["divergence_gap"].dropna()
    finite = gaps[gaps < math.inf]  # infinite: plain's grammar left no second token
    tokens = requests["output_tokens"]
    return {
        "requests": len(requests),
        "complete": _ratio(requests["complete"].sum(), len(requests)),
        "valid": _ratio(judged["valid"].sum(), len(judged)),
        "failed": int((requests["finish"] == Finish.FAILED.value).sum()),
        "canonical_share": _ratio((requests["canonical_share"] * tokens).sum(), tokens.sum()),
        "identical": _ratio(compared["identical"].sum(), len(compared)),
        "first_divergence": int((requests["first_divergence"] >= 0).sum()),
        "near_ties": int((gaps < NEAR_TIE).sum()),
        "divergence_gap": float(finite.max()) if len(finite) else None,
    }


def check_identities(summary: Mapping[str, Metrics], steps: pd.DataFrame) -> None:
    """Check what must hold exactly: in every row, in every strategy's metrics, between the two.

    Args:
        summary: what ``summarise`` made of ``steps``, or the ``strategies`` of a summary file.
        steps: the step rows, each request's in the order of its steps.

    Raises:
        HarnessError: names the first identity that is broken, and where.
    """
    for strategy, metrics in summary.items():
        rows = steps[steps["strategy"] == strategy]
        for identity, holds in _row_identities(rows):
            if not holds.all():
                row = rows[~holds].iloc[0]
                where = f"{strategy}, request {row['request']}, step {row['step']}"
                raise HarnessError(f"{where}: {identity} is broken; correct what the step records")
        for identity, left, right in _summary_identities(metrics, rows):
            if left != right:
                raise HarnessError(
                    f"{strategy}: {identity} is broken ({left} is not {right}); summarise again"
                )


def _row_identities(rows: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    fates = ["accepted", "rejected_grammar", "rejected_model", "past_stop"]
    rolled_back = [f"rollback_{kind}_tokens" for kind in ROLLBACK_KINDS]
    moved = rows["advanced"] - rows[rolled_back].sum(axis=1)
    yield f"drafted = {' + '.join(fates)}", rows["drafted"] == rows[fates].sum(axis=1)
    yield (
        "drafted_raw = drafted + trimmed",
        rows["drafted_raw"] == rows["drafted"] + rows["trimmed"],
    )
    yield "emitted = length of emitted_ids", rows["emitted"] == rows["emitted_ids"].map(len)
    yield "held = Σ advanced - Σ rollbacks", rows["held"] == moved.groupby(rows["request"]).cumsum()


def _summary_identities(metrics: Metrics, rows: pd.DataFrame) -> Iterator[tuple[str, Any, Any]]:
    verify = rows[~rows["prefill"]]
    histogram = metrics["accept_hist"]
    yield "verify_steps = verify rows", metrics["verify_steps"], len(verify)
    yield "emitted = Σ emitted of verify rows", metrics["emitted"], verify["emitted"].sum()
    for name in COUNTERS:
        yield f"{name} = Σ {name} of rows", metrics[name], rows[name].sum()
    for what in ("calls", "tokens"):
        kinds = sum(metrics[f"rollback_{kind}_{what}"] for kind in ROLLBACK_KINDS)
        yield f"rollback_{what} = Σ rollback_*_{what}", metrics[f"rollback_{what}"], kinds
    accept_rate = _ratio(metrics["accepted"], metrics["drafted"])
    yield "accept_rate = accepted / drafted", metrics["accept_rate"], accept_rate
    mean = _ratio(metrics["emitted"], metrics["verify_steps"])
    yield "mean_accept_len = emitted / verify_steps", metrics["mean_accept_len"], mean
    yield "Σ accept_hist = verify_steps", sum(histogram), metrics["verify_steps"]
    weighted = sum(accepted * steps for accepted, steps in enumerate(histogram))
    yield "Σ i·accept_hist[i] = accepted", weighted, metrics["accepted"]
