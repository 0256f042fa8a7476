"""What the recorded work of a run would take under other costs."""

from __future__ import annotations

import math

import pandas as pd

from harness.results.costs import PLACES, Costs, placed
from harness.results.metrics import PLAIN


def behind_whole_window(steps: pd.DataFrame) -> pd.Series:
    """By step row, whether the step before accepted its window whole: then the draft model has
    two tokens to read.

    Args:
        steps: step rows, each request's in the order of its steps.
    """
    whole = (steps["drafted"] > 0) & (steps["accepted"] == steps["drafted_raw"])
    return whole.groupby([steps["strategy"], steps["request"]]).shift(fill_value=False)


def work(steps: pd.DataFrame, costs: Costs, copies: float = 1.0) -> pd.DataFrame:
    """One row per strategy and tick: sequences, forwards, rows, tokens, and CPU time by place (µs).

    Args:
        steps: step rows of one run.
        costs: of a mask row, a token and a jump.
        copies: sequences that each recorded one stands for.
    """
    rows = steps.reset_index(drop=True)
    two = behind_whole_window(rows)
    inserted = rows["jump_tokens"].clip(lower=0) + rows["retokenized"]
    rows = rows.assign(
        tokens=rows["emitted"] + rows["jump_tokens"],
        width=rows["rows"] + inserted,
        read_first=two.astype("int64") + inserted,
        redraws=rows["mask_rows"].where(rows["strategy"] == "llamacpp", 0),
    ).join(placed(rows, costs))
    keys = ["strategy", "tick", "prefill"]
    sums = {name: (name, "sum") for name in ("tokens", *PLACES)}
    most = {name: (name, "max") for name in ("width", "read_first", "draft_forwards", "redraws")}
    ticks = rows.groupby(keys, sort=False).agg(sequences=("step", "size"), **sums, **most)
    ticks[["sequences", *sums]] *= copies
    ticks["rows"] = ticks["sequences"] * ticks["width"]  # padded to the widest
    drafts = ticks["draft_forwards"]
    ticks["draft_rows"] = ticks["sequences"] * (drafts + ticks["read_first"]) * (drafts > 0)
    return ticks.reset_index()


def predict(steps: pd.DataFrame, costs: Costs, copies: float = 1.0) -> pd.DataFrame:
    """What each strategy of a run would come to.

    Args:
        steps: step rows of one run, each request's in the order of its steps.
        costs: what its work takes.
        copies: sequences that each recorded one stands for; 2 doubles every batch.

    Returns:
        By strategy: ``tok_s``, ``to_plain`` (NaN without plain), ``prefill_share`` of the time,
        and of a verify step per sequence ``draft_us``, ``verify_us``, ``exposed_us`` and
        ``hidden_us`` of the grammar, ``sync_us``, ``host_us``; ``tokens`` and ``round_trips``.
    """
    ticks = work(steps, costs, copies)
    workers = ticks["sequences"].clip(upper=costs.threads)
    ticks[list(PLACES)] = ticks[list(PLACES)].div(workers, axis=0)
    prefill, sequences = ticks["prefill"], ticks["sequences"]
    reads_prompts = ticks["draft_forwards"].groupby(ticks["strategy"]).transform("max") > 0
    draft = costs.drafting_us(ticks).where(
        ~prefill, sequences * costs.draft_prefill_us * reads_prompts
    )
    target = costs.target_us(ticks["rows"]).where(~prefill, sequences * costs.prefill_us)
    beside = ticks["draft"].clip(upper=draft) + ticks["verify"].clip(upper=target)
    hidden = beside * float(costs.overlap)
    trips = 1 + costs.by_step(ticks) * ticks["draft_forwards"] + (ticks["redraws"] > 0)
    spent = pd.DataFrame(
        {
            "draft_us": draft,
            "verify_us": target,
            "exposed_us": ticks[list(PLACES)].sum(axis=1) - hidden,
            "sync_us": trips * costs.sync_us,
            "host_us": sequences * costs.host_us,
        }
    )
    split = spent.assign(hidden_us=hidden)[~prefill].groupby(ticks["strategy"], sort=False).sum()
    names = ticks["strategy"]
    total = spent.sum(axis=1).groupby(names, sort=False).sum()
    tokens = ticks["tokens"].groupby(names, sort=False).sum()
    tok_s = 1e6 * tokens / total
    verify_steps = sequences.where(~prefill, 0.0).groupby(names, sort=False).sum()
    return pd.DataFrame(
        {
            "tok_s": tok_s,
            "to_plain": tok_s / tok_s.get(PLAIN, math.nan),
            "prefill_share": 1 - split.drop(columns="hidden_us").sum(axis=1) / total,
            **(split.div(verify_steps, axis=0)),
            "tokens": tokens,
            "round_trips": trips.groupby(names, sort=False).sum(),
        }
    )
