"""The answer first: which strategy is fastest here, why, and what the grammar costs.

Plain sentences worked out from the metrics of one run, so that nobody has to read the tables to
know what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.results.metrics import PLAIN
from harness.results.palette import PHASES
from harness.results.schema import Metrics

CEILING = "unguided"
"""Drafts without a grammar: how fast the others could be, and no choice for who needs one."""


def answer(summary: Mapping[str, Metrics]) -> list[str]:
    """Sentences, the most important first.

    Args:
        summary: metrics by strategy name.

    Returns:
        At least one sentence, also for a run in which nothing came out.
    """
    choices = _choices(summary)
    if not choices:
        return ["No strategy came beyond its prefill: there is nothing to compare."]
    # Who is fastest, and whose step is explained: that of the best that drafts.
    drafting = [name for name in choices if name != PLAIN]
    explained = drafting[0] if drafting else PLAIN
    return [
        *_fastest(choices),
        *_why(explained, choices),
        *_grammar(explained, choices),
        *_ceiling(summary),
        *_outputs(choices),
    ]


def fastest(summary: Mapping[str, Metrics]) -> str | None:
    """The strategy of the answer, which tables may point out; None where nothing came out."""
    return next(iter(_choices(summary)), None)


def _choices(summary: Mapping[str, Metrics]) -> dict[str, Metrics]:
    """The strategies that came beyond their prefill, fastest first, without the ceiling."""
    return {
        name: metrics
        for name, metrics in sorted(summary.items(), key=lambda item: -(item[1]["tok_s"] or 0))
        if metrics["tok_s"] and metrics["verify_steps"] and name != CEILING
    }


def step_us(metrics: Metrics) -> float:
    """Time of one verify step, µs: the phases exclude each other."""
    return float(sum(metrics[phase] for phase in PHASES))


def _fastest(choices: Mapping[str, Metrics]) -> Iterator[str]:
    """Who is fastest and by how much, then who comes next; ``choices`` is sorted by speed."""
    first, *others = choices
    speed = f"{choices[first]['tok_s']:.1f} tokens/s"
    if first == PLAIN:
        yield f"{PLAIN} is fastest here, at {speed}" + (
            ": drafting slows it down." if others else "."
        )
    elif PLAIN in choices:
        yield f"{first} is fastest here: {speed}, {_to_plain(choices[first])}."
    else:
        yield f"{first} is fastest here: {speed}; {PLAIN} did not run, so there is no ratio to it."
    others = [name for name in others if name != PLAIN and PLAIN in choices]
    if others:
        yield f"Next is {others[0]}, {_to_plain(choices[others[0]])}."


def _to_plain(metrics: Metrics) -> str:
    ratio, interval = metrics["tok_s_ratio"], metrics["tok_s_ratio_ci"]
    text = f"{ratio:.2f} times {PLAIN} (95 % interval {_range(interval)})"
    if interval[0] <= 1 <= interval[1]:
        text += ", which this run cannot tell from equal"
    return text


def _range(interval: tuple[float, float]) -> str:
    return "–".join(f"{bound:.2f}" for bound in interval)


def _why(name: str, choices: Mapping[str, Metrics]) -> Iterator[str]:
    """Acceptance length against the cost of a step: their ratio is the gain in decoding."""
    if name == PLAIN or PLAIN not in choices:
        return
    metrics = choices[name]
    forced = metrics["jump_tokens"] / metrics["verify_steps"]
    length = metrics["mean_accept_len"] + forced
    cost = step_us(metrics) / step_us(choices[PLAIN])
    jumps = f" and inserts {forced:.2f} forced ones" if forced else ""
    yield (
        f"Why: a step of {name} emits {metrics['mean_accept_len']:.2f} tokens "
        f"({_range(metrics['mean_accept_len_ci'])}){jumps}, and takes as long as {cost:.2f} steps "
        f"of {PLAIN} ({_ms(step_us(metrics))}, of which {_ms(metrics['draft_us'])} drafting and "
        f"{_ms(metrics['verify_us'])} verifying, against {_ms(step_us(choices[PLAIN]))}): "
        f"{length:.2f} / {cost:.2f} = {length / cost:.2f} times {PLAIN} in decoding, before the "
        "prefill that both share."
    )


def _grammar(name: str, choices: Mapping[str, Metrics]) -> Iterator[str]:
    """CPU time of the grammar and its exposed part, in µs and as shares of a step."""
    metrics = choices[name]
    yield (
        f"The grammar costs {name} {metrics['grammar_us']:.0f} µs of CPU per step "
        f"({_share(metrics, 'grammar_us')} of the step); for {metrics['exposed_us']:.0f} µs of it "
        f"({_share(metrics, 'exposed_us')}) the device waits."
    )
    most = max(choices, key=lambda each: float(choices[each]["exposed_us"]))
    if most != name:
        yield (
            f"It costs {most} most: {choices[most]['exposed_us']:.0f} µs exposed per step "
            f"({_share(choices[most], 'exposed_us')})."
        )


def _share(metrics: Metrics, part: str) -> str:
    return f"{100 * metrics[part] / step_us(metrics):.2f} %"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"


def _ceiling(summary: Mapping[str, Metrics]) -> Iterator[str]:
    if CEILING in summary and summary[CEILING]["tok_s"]:
        yield (
            f"The ceiling is {CEILING}, which drafts without any grammar: "
            f"{summary[CEILING]['tok_s']:.1f} tokens/s."
        )


def _outputs(choices: Mapping[str, Metrics]) -> Iterator[str]:
    """What the speed is worth: outputs that are not valid, failed, or are not plain's."""
    flaws = {
        "not all valid": [name for name in choices if _below_one(choices[name]["valid"])],
        "failed requests": [name for name in choices if choices[name]["failed"]],
        f"outputs other than {PLAIN}'s": [
            name for name in choices if _below_one(choices[name]["identical"])
        ],
    }
    told = [f"{flaw}: {', '.join(names)}" for flaw, names in flaws.items() if names]
    if told:
        yield f"Mind the outputs ({'; '.join(told)})."
    else:
        yield f"Every judged output is valid, none failed, and all compared ones are {PLAIN}'s."


def _below_one(share: float | None) -> bool:
    """Whether there is a share, and something is missing from it."""
    return share is not None and share < 1
