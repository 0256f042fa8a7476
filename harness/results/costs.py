"""What the work of a step costs, and where in the step each strategy pays it.

Costs come from a run's own columns (``fit``), from bare replays, from the size of the
weights, or from the user. Where a strategy pays is read off its docstring and the rules it cites.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core import column
from harness.errors import ConfigError

GUIDED = "trtllm"
"""The strategy whose draft loop comes back to the host for every draft (1.4)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one unit of work takes. Forwards are those of ``slots`` sequences at once.

    Raises:
        ConfigError: a cost is negative or not finite, a count is below 1, or more rows cost less.
    """

    plain_us: float = column("target forward, one row per sequence", default=0.0)
    verify_us: float = column("target forward, 1 + draft_tokens rows per sequence", default=0.0)
    draft_us: float = column("single draft forward, one row per sequence", default=0.0)
    chain_us: float = column("draft_tokens draft forwards in one go, read back once", default=0.0)
    draft_row_us: float = column("each draft row more or less than one per slot", default=0.0)
    prefill_us: float = column("target forward over one prompt", default=0.0)
    draft_prefill_us: float = column("draft forward over one prompt", default=0.0)
    mask_us: float = column("one mask row filled on the CPU", default=0.0)
    accept_us: float = column("matcher advanced, or asked, by one token", default=0.0)
    rollback_us: float = column("matcher rolled back by one token", default=0.0)
    jump_us: float = column("search for forced text and re-encoding, per step (S1)", default=0.0)
    sync_us: float = column("round trip to the host", default=0.0)
    host_us: float = column("everything else on the host, per step and sequence", default=0.0)
    slots: int = column("sequences per forward at which the forwards were timed", default=1)
    draft_tokens: int = column("K, drafts per step of chain_us and verify_us", default=4)
    threads: int = column("CPU threads that share a batch's grammar work evenly", default=1)
    overlap: bool = column("the CPU works beside the forwards: a GPU computes them", default=True)
    stepped: bool = column("every draft is read before the next one, as p_min does", default=False)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in ("slots", "draft_tokens", "threads") else 0
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name}: {value} is no finite number of at least {least}")
        if self.verify_us < self.plain_us:
            raise ConfigError(f"verify_us: {self.verify_us:g} is below plain_us; give both")

    def target_us(self, rows: pd.Series) -> pd.Series:
        """Forward of ``rows`` target rows: a line through ``plain_us`` and ``verify_us``, level
        where the reading of the weights is what takes time."""
        row_us = (self.verify_us - self.plain_us) / (self.slots * self.draft_tokens)
        return (self.plain_us + row_us * (rows - self.slots)).clip(lower=0.0)

    def by_step(self, ticks: pd.DataFrame) -> pd.Series:
        """Of each tick, whether its draft loop comes back to the host for every draft."""
        return (ticks["strategy"] == GUIDED) | self.stepped

    def drafting_us(self, ticks: pd.DataFrame) -> pd.Series:
        """All draft forwards of each tick; rows above or below one per slot cost their slope."""
        free_us = self.chain_us / self.draft_tokens
        each_us = self.by_step(ticks).map({True: self.draft_us, False: free_us})
        extra = ticks["draft_rows"] - ticks["draft_forwards"] * self.slots
        return (ticks["draft_forwards"] * each_us + self.draft_row_us * extra).clip(lower=0.0)


PLACES = ("before", "draft", "between", "verify", "after")
"""Where grammar work stands in a step: exposed before, between and behind the two phases of the
device, or side by side with one of them."""

Placement = Callable[[pd.DataFrame, Costs], dict[str, pd.Series]]
"""CPU time of each step row by place, µs; places without work are left out."""


def _fills(rows: pd.DataFrame, costs: Costs) -> pd.Series:
    return rows["mask_rows"] * costs.mask_us


def _constrained(rows: pd.DataFrame) -> pd.Series:
    """Verify steps under a grammar: they fill at least one row, and free text none."""
    return (rows["mask_rows"] > 0) & ~rows["prefill"]


def _preview(rows: pd.DataFrame, costs: Costs) -> pd.Series:
    """Drafts fed and taken back within the step."""
    return rows["rollback_preview_tokens"] * (costs.accept_us + costs.rollback_us)


def _commit(rows: pd.DataFrame, costs: Costs) -> pd.Series:
    """What the output got, fed for good."""
    return (rows["advanced"] - rows["rollback_preview_tokens"]) * costs.accept_us


def _plain(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """One fill, and the commit of the step before, beside the target."""
    return {"verify": _fills(rows, costs) + _commit(rows, costs)}


def _vllm(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """The commit beside the next draft; the trim waits for it, and the target for the trim
    (V1.1: the legal drafts and the first illegal one are looked at); rows beside the target."""
    asked = (rows["drafted"] + (rows["trimmed"] > 0)) * _constrained(rows)
    return {
        "draft": _commit(rows, costs),
        "between": asked * costs.accept_us,
        "verify": _fills(rows, costs) + _preview(rows, costs),
    }


def _trtllm(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """Each draft is fed and its row filled beside its own draft forward (ADVD, T9, counts them);
    the two rollbacks stand before and behind the draft loop (T8, T9); the target's build is beside
    the target (1.4a)."""
    guided = rows["rollback_draft_tokens"]
    return {
        "before": rows["rollback_rejected_tokens"] * costs.rollback_us,
        "draft": guided * (costs.mask_us + costs.accept_us),
        "between": guided * costs.rollback_us,
        "verify": (rows["mask_rows"] - guided) * costs.mask_us
        + (rows["advanced"] - guided) * costs.accept_us,
    }


def _llamacpp(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """Behind the target: one check per emitted token, and one refused before each mask (L4)."""
    refused = rows["mask_rows"] * (costs.accept_us + costs.mask_us)
    return {"after": _commit(rows, costs) + refused}


def _sglang(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """The search beside the target (S2b). Where it jumps, the commit, the search for forced text
    and re-encoding come before anything is drafted (S1a, S1h); else the commit is beside the draft.
    """
    beside = {"verify": _fills(rows, costs) + _preview(rows, costs)}
    if not rows[["jump_tokens", "retokenized"]].to_numpy().any():
        return {"draft": _commit(rows, costs), **beside}
    undone = rows["rollback_retokenize_tokens"] * costs.rollback_us
    jumps = _constrained(rows) * costs.jump_us
    return {"before": _commit(rows, costs) + undone + jumps, **beside}


def _deepinfer(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """The last step's commit, the fills and the preview: all beside the target (D11-D13)."""
    return {"verify": _fills(rows, costs) + _preview(rows, costs) + _commit(rows, costs)}


def _unknown(rows: pd.DataFrame, costs: Costs) -> dict[str, pd.Series]:
    """A strategy that is not listed: nothing is known to be hidden, so nothing is."""
    undone = rows.filter(regex=r"^rollback_.*_tokens$").sum(axis=1)
    fed = rows["advanced"] * costs.accept_us
    return {"after": _fills(rows, costs) + fed + undone * costs.rollback_us}


PLACEMENTS: dict[str, Placement] = {
    "plain": _plain,
    "unguided": _plain,
    "vllm": _vllm,
    "trtllm": _trtllm,
    "llamacpp": _llamacpp,
    "sglang": _sglang,
    "deepinfer": _deepinfer,
}


def placed(rows: pd.DataFrame, costs: Costs) -> pd.DataFrame:
    """CPU time of each step row by place, µs: ``[rows, PLACES]``."""
    parts = [
        pd.DataFrame(PLACEMENTS.get(str(name), _unknown)(part, costs), index=part.index)
        for name, part in rows.groupby("strategy", sort=False)
    ]
    return pd.concat(parts).reindex(index=rows.index, columns=list(PLACES)).fillna(0.0)


BARE = {
    "plain": "plain_us",
    "verify": "verify_us",
    "draft": "draft_us",
    "chain": "chain_us",
}
"""Names in the ``bare_us`` of ``engine_limits.json``, and the costs that they are."""


def with_bare(costs: Costs, path: Path, context: float) -> Costs:
    """Take the forwards from replays that ``experiments/engine_limits.py`` measured.

    A replay was waited for when it was timed. ``predict`` counts a round trip of its own for
    each single forward, so that one is taken off here; of a chain it counts none.

    Args:
        costs: what is not replaced; its ``slots`` choose the replays, whose K may be another.
        path: the JSON of the study.
        context: tokens that a sequence holds; the shortest span that has room for them counts.

    Raises:
        ConfigError: no such file, or it lacks these slots.
    """
    try:
        study = json.loads(path.read_text(encoding="utf-8"))[f"slots_{costs.slots}"]
        spans, draft_tokens = study["bare_us"], int(study["draft_tokens"])
        bare = spans[min(spans, key=lambda span: (int(span) < context, abs(int(span) - context)))]
        forwards: dict[str, Any] = {field: float(bare[name]) for name, field in BARE.items()}
        for field in ("plain_us", "verify_us", "draft_us"):
            forwards[field] = max(0.0, forwards[field] - costs.sync_us)
        row_us = (float(bare["chain of two"]) - forwards["chain_us"]) / costs.slots
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"bare: {path} has no replay times of {costs.slots} slots ({error}); "
            f"run experiments/engine_limits.py slots={costs.slots}"
        ) from None
    return replace(costs, draft_row_us=max(0.0, row_us), draft_tokens=draft_tokens, **forwards)


@dataclass(frozen=True, slots=True)
class Scale:
    """A pair on accelerators that nobody has to own to ask about it.

    Attributes:
        target, draft: weights of each model.
        gpus: accelerators that both are split over; no time for their communication.
        bandwidth: of one accelerator's memory, bytes/s.
        flops: of one accelerator, dense bf16, 1/s.
    """

    target: float
    draft: float
    gpus: int
    bandwidth: float = 4.8e12  # NVIDIA H200 SXM, data sheet
    flops: float = 989e12  # the same

    def forward_us(self, weights: float, rows: float) -> float:
        """The longer of reading the weights (2 bytes each, bf16) and 2 operations for each
        weight and row: the roofline of a dense model."""
        reading_s = 2 * weights / (self.gpus * self.bandwidth)
        computing_s = 2 * weights * rows / (self.gpus * self.flops)
        return 1e6 * max(reading_s, computing_s)

    def derivation(self, costs: Costs, prompt_tokens: float) -> list[str]:
        """The arithmetic behind ``costs``, a line for each model and the prompts."""
        lines = []
        for name, weights in (("target", self.target), ("draft", self.draft)):
            reading_us = 2e6 * weights / self.gpus / self.bandwidth
            row_us = 2e6 * weights / self.gpus / self.flops
            lines.append(
                f"{name}: the longer of {weights:g} weights × 2 bytes / ({self.gpus} GPUs × "
                f"{self.bandwidth:g} bytes/s) = {reading_us:.0f} µs, and {weights:g} × 2 "
                f"operations / ({self.gpus} GPUs × {self.flops:g}/s) = {row_us:.2f} µs a row"
            )
        window = 1 + costs.draft_tokens
        return [
            *lines,
            f"rows: plain {costs.slots}, verify {costs.slots} × {window}, a prompt "
            f"{prompt_tokens:.0f} (the run's mean), {costs.slots} prompts at once; the engine "
            "reaches the roofline (an upper bound)",
        ]

    def costs(self, costs: Costs, prompt_tokens: float) -> Costs:
        """Those of the forwards; all others stay."""
        rows, k = costs.slots, costs.draft_tokens
        draft_us = self.forward_us(self.draft, rows)
        return replace(
            costs,
            plain_us=self.forward_us(self.target, rows),
            verify_us=self.forward_us(self.target, rows * (1 + k)),
            draft_us=draft_us,
            chain_us=k * draft_us,
            draft_row_us=0.0,
            prefill_us=self.forward_us(self.target, rows * prompt_tokens) / rows,
            draft_prefill_us=self.forward_us(self.draft, rows * prompt_tokens) / rows,
            overlap=True,
        )


PAIRS = {
    "70b-8b": Scale(target=70.6e9, draft=8.03e9, gpus=4),  # Llama 3.1, model cards
    "8b-1b": Scale(target=8.03e9, draft=1.24e9, gpus=1),  # Llama 3.1 and 3.2, model cards
}
