"""What the forwards of a step take, measured before anything is decoded."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from harness.drafters.config import DrafterConfig
from harness.drafters.length import Costs
from harness.models.graphs import StaticLM
from harness.models.language_model import LanguageModel, RowInput

WARM_UPS = 2
REPEATS = 7
DECIMALS = 4
"""Of the ms that are measured: they are to be copied from a manifest into a command."""


def step_costs(
    config: DrafterConfig,
    target: LanguageModel,
    draft: LanguageModel | None,
    slots: int,
    draft_tokens: int,
) -> Costs:
    """The costs of the config, and bare forwards in all slots where it has null.

    They run in the middle of the cache, and leave it to be overwritten: nothing is decoded yet.

    Args:
        config: what is known already.
        target, draft: the models; without a draft model drafts cost nothing.
        slots: sequences of a full batch.
        draft_tokens: K, the most drafts per step.
    """
    draft_ms, verify_ms, row_ms = config.draft_ms, config.verify_ms, config.row_ms
    if draft_ms is None:
        draft_ms = 0.0 if draft is None else _draft_ms(draft, slots, draft_tokens)
    if verify_ms is None or row_ms is None:
        one, window = (_forward_ms(target, slots, width) for width in (1, 1 + draft_tokens))
        verify_ms = one if verify_ms is None else verify_ms
        row_ms = max(0.0, (window - one) / draft_tokens) if row_ms is None else row_ms
    return Costs(*(round(each, DECIMALS) for each in (draft_ms, verify_ms, row_ms)))


def _draft_ms(draft: LanguageModel, slots: int, draft_tokens: int) -> float:
    """One of K draft forwards: in one go where the engine does that."""
    if isinstance(draft, StaticLM):
        rows = _rows(draft, slots, 1)
        return _timed(lambda: draft.greedy_chain(rows, draft_tokens), draft.device) / draft_tokens
    return _forward_ms(draft, slots, 1)


def _forward_ms(model: LanguageModel, slots: int, width: int) -> float:
    rows = _rows(model, slots, width)
    return _timed(lambda: model.forward(rows), model.device)


def _rows(model: LanguageModel, slots: int, width: int) -> list[RowInput]:
    start = max(0, model.max_length // 2 - width)
    return [RowInput(slot, start, [0] * width, width) for slot in range(slots)]


@torch.inference_mode()
def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Median time of one call with the device drained behind it, ms."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((perf_counter() - start) * 1e3)
    return median(times[WARM_UPS:])
