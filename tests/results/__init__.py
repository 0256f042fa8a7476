"""Traces of two tiny runs, written by hand, for the tests of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.core import RequestTrace, StepTrace
from harness.results.record import Recorder


def prefill(strategy: str, request: str, tick: int, **columns: Any) -> StepTrace:
    """The prefill row of a request: one token emitted, and held by the matcher."""
    defaults = {"emitted": 1, "emitted_ids": [7], "advanced": 1, "held": 1, "rows": 1}
    return StepTrace(strategy, request, tick, 0, True, 1, **{**defaults, **columns})


def verify(
    strategy: str,
    request: str,
    tick: int,
    step: int,
    fates: tuple[int, int, int, int] = (0, 0, 0, 0),
    *,
    trimmed: int = 0,
    held: int = 0,
    **columns: Any,
) -> StepTrace:
    """A verify row whose matcher previews all its drafts and keeps what is emitted.

    ``fates`` are the drafts accepted, rejected by grammar and by model, and past the stop;
    ``held`` is what the matcher held before.
    """
    accepted, grammar, model, past_stop = fates
    drafted, emitted = sum(fates), accepted + 1
    defaults = {
        "drafted_raw": drafted + trimmed,
        "drafted": drafted,
        "accepted": accepted,
        "emitted": emitted,
        "trimmed": trimmed,
        "rejected_grammar": grammar,
        "rejected_model": model,
        "past_stop": past_stop,
        "rows": 1 + drafted,
        "wasted_rows": drafted - accepted,
        "mask_rows": 1 + drafted,
        "draft_forwards": drafted,
        "advanced": drafted + emitted,
        "rollback_preview_calls": int(drafted > 0),
        "rollback_preview_tokens": drafted,
        "held": held + emitted,
        "draft_ids": [7] * drafted,
        "emitted_ids": [7] * emitted,
        "fates": "a" * accepted + "m" * model + "g" * grammar + "s" * past_stop,
        "trimmed_ids": [7] * trimmed,
    }
    return StepTrace(strategy, request, tick, step, False, 1, **{**defaults, **columns})


def request(
    strategy: str, name: str, output_ids: Sequence[int], finish: str = "stop", **columns: Any
) -> RequestTrace:
    """A request row; complete, and valid, if it stopped."""
    stopped = finish == "stop"
    defaults = {
        "kind": "json",
        "grammar": "json_schema",
        "engine": "xgrammar",
        "seed": 0,
        "prompt_tokens": 5,
        "output_tokens": len(output_ids),
        "output_ids": list(output_ids),
        "finish": finish,
        "complete": stopped,
        "valid": stopped,
    }
    return RequestTrace(strategy, name, **{**defaults, **columns})


def tiny_run() -> tuple[pd.DataFrame, pd.DataFrame]:
    """``plain`` and ``vllm`` over two requests, a and b; small enough to add up by hand."""
    recorder = Recorder()
    slow = {"verify_us": 80.0, "grammar_us": 20.0, "fill_us": [20.0]}
    fast = {"draft_us": 30.0, "verify_us": 90.0, "grammar_us": 20.0, "host_us": 10.0}
    recorder.steps += [
        prefill("plain", "a", 0, **slow),
        verify("plain", "a", 1, 1, held=1, **slow),
        verify("plain", "a", 2, 2, held=2, **slow),
        prefill("plain", "b", 3, **slow),
        verify("plain", "b", 4, 1, held=1, **slow),
        prefill("vllm", "a", 0, verify_us=50.0),
        prefill("vllm", "b", 0, verify_us=50.0),
        verify("vllm", "a", 1, 1, (2, 0, 1, 0), held=1, **fast, fill_us=[1.0, 2.0, 3.0]),
        verify("vllm", "b", 1, 1, (0, 1, 0, 0), trimmed=2, held=1, **fast, exposed_us=5.0),
        verify("vllm", "b", 2, 2, (1, 0, 0, 2), held=2, **fast, exposed_us=10.0, jump_tokens=3),
    ]
    recorder.requests += [
        request("plain", "a", [1, 2, 3], gaps=[3.0, 2.0, 1.0]),
        request("plain", "b", [1, 2], gaps=[0.5, 0.001], compile_ms=4.0),
        request("vllm", "a", [1, 2, 3, 4], ttft_ms=10.0, tpot_ms=2.0),
        request("vllm", "b", [1, 9, 9, 9], finish="length", ttft_ms=20.0, tpot_ms=4.0),
        request("vllm", "c", [], finish="failed", error="no token is legal", valid=None),
    ]
    return recorder.frames()
