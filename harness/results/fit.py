"""The costs of a recorded run."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.errors import ConfigError
from harness.results.costs import GUIDED, Costs, placed
from harness.results.metrics import TIMES
from harness.results.predict import work

STALL = 10.0
"""A tick that takes this many times the median of its strategy is no cost of a policy: something
else had the machine, such as a collection of garbage."""


def fit(steps: pd.DataFrame, stepped: bool = False) -> Costs:
    """The costs of a run, from its own columns, so that predicting it is a test of the model.

    Forwards are least-squares lines in rows, all else ratios of sums. Hidden grammar time
    lengthens no step, so it counts as the forward's. A guided draft's excess over a free one is
    the round trip, of which a CPU has none; where every draft is read there is no excess, and the
    round trip stays with the draft. Advancing and rolling back share one rate
    per token; a strategy that jumps spends on its jumps what its host takes beyond the others'.
    Stalls are left out.

    Args:
        steps: step rows of the run.
        stepped: every draft is read before the next one.

    Raises:
        ConfigError: the run has no verify step.
    """
    steps = steps[~stalled(steps)]
    verify = steps[~steps["prefill"]]
    if verify.empty:
        raise ConfigError("steps.parquet has no verify step; name a run that generated tokens")
    slots, draft_tokens = int(steps["batch"].max()), max(1, int(steps["drafted_raw"].max()))
    ticks = work(steps, Costs())
    keys = ["strategy", "tick", "prefill"]
    spent = ["draft_us", "verify_us", "grammar_us", "exposed_us"]
    ticks = ticks.merge(steps.groupby(keys, as_index=False)[spent].sum(), on=keys)
    drafting = ticks[~ticks["prefill"] & (ticks["draft_forwards"] > 0)]
    forwards = drafting["draft_forwards"]
    overlap = bool((steps["grammar_us"] > steps["exposed_us"]).any())
    guided = forwards * (drafting["strategy"] == GUIDED) * (overlap and not stepped)
    draft_us, draft_row_us, sync_us = _line(
        drafting["draft_us"], forwards, drafting["draft_rows"], guided
    )
    draft_us += draft_row_us * slots
    decode = ticks[~ticks["prefill"]]
    hidden = decode["grammar_us"] - decode["exposed_us"]
    one = pd.Series(1.0, decode.index)
    fixed_us, row_us = _line(decode["verify_us"] + hidden - sync_us, one, decode["rows"])
    prompts = steps[steps["prefill"]]
    drafted_for = prompts[prompts["strategy"].isin(drafting["strategy"])]
    token_us = _token_us(steps)
    jumps = verify["strategy"].isin(verify.loc[verify["jump_tokens"] != 0, "strategy"])
    host_us = _ratio(verify.loc[~jumps, "host_us"].sum(), (~jumps).sum())
    return Costs(
        plain_us=fixed_us + row_us * slots,
        verify_us=fixed_us + row_us * slots * (1 + draft_tokens),
        draft_us=draft_us,
        chain_us=draft_us * draft_tokens,
        draft_row_us=draft_row_us,
        prefill_us=_ratio(prompts["verify_us"].sum(), len(prompts)),
        draft_prefill_us=_ratio(drafted_for["draft_us"].sum(), len(drafted_for)),
        mask_us=_ratio(_fill_us(steps), steps["mask_rows"].sum()),
        accept_us=token_us,
        rollback_us=token_us,
        jump_us=max(0.0, _ratio(verify.loc[jumps, "host_us"].sum(), jumps.sum()) - host_us),
        sync_us=sync_us,
        host_us=host_us,
        slots=slots,
        draft_tokens=draft_tokens,
        overlap=overlap,
        stepped=stepped,
    )


def stalled(steps: pd.DataFrame) -> pd.Series:
    """By step row, whether its tick took ``STALL`` times as long as its strategy's median one,
    prefills apart from decode steps."""
    kind = [steps["strategy"], steps["prefill"]]
    spent = steps[TIMES].sum(axis=1).groupby([*kind, steps["tick"]]).transform("sum")
    return spent > STALL * spent.groupby(kind).transform("median")


def _line(y: pd.Series, *terms: pd.Series) -> list[float]:
    """Least squares ``y ~ Σ coefficient · term``; a cost below 0 is none, and is left out."""
    design = np.column_stack([term.to_numpy(dtype=float) for term in terms])
    used = [i for i in range(len(terms)) if design[:, i].any()]
    found = np.zeros(len(terms))
    while used:
        found[:] = 0.0
        found[used] = np.linalg.lstsq(design[:, used], y.to_numpy(), rcond=None)[0]
        if found.min() >= 0:
            break
        used.remove(int(found.argmin()))
    return [float(value) for value in found.clip(min=0.0)]


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under else 0.0


def _fill_us(steps: pd.DataFrame) -> float:
    return sum(float(np.sum(fills)) for fills in steps["fill_us"])


def _token_us(steps: pd.DataFrame) -> float:
    """Grammar time without the fills, per token advanced, asked or rolled back."""
    unit = Costs(accept_us=1.0, rollback_us=1.0)
    moved = float(placed(steps.reset_index(drop=True), unit).to_numpy().sum())
    return max(0.0, _ratio(float(steps["grammar_us"].sum()) - _fill_us(steps), moved))
