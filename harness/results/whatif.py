"""Tokens per second of a recorded run under other costs: a calculation, its assumptions printed.

    python -m harness.results.whatif RUN draft_us=400 sync_us=50
    python -m harness.results.whatif RUN bare=engine_limits.json
    python -m harness.results.whatif RUN pair=70b-8b batch=64 users=1000000 user_tok_s=10

What happened stays as recorded (drafts, acceptance, mask rows, who shared a forward); only its
price changes. Without settings the run's own costs are fitted; then, and with bare replays alone,
the prediction is held against the record. Settings: any field of ``Costs``; ``bare``, the replay
times that ``experiments/engine_limits.py`` measured; ``pair``, forwards from the size of the
weights (``Scale``); ``batch``, so many sequences in a forward instead of the recorded most;
``users``, who read ``user_tok_s`` each.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from harness.core import columns
from harness.errors import ConfigError, exit_status
from harness.results.costs import PAIRS, PLACEMENTS, Costs, with_bare
from harness.results.fit import STALL, fit, stalled
from harness.results.metrics import TIMES
from harness.results.predict import predict
from harness.results.record import RunFolder
from harness.results.table import Table, print_tables

ASSUMPTIONS = (
    "acceptance, grammar work and batches are those recorded, whatever the pair",
    "step = before + max(draft, CPU beside it) + between + max(target, CPU beside it) + after "
    "+ round trips + host; without overlap the CPU's part is added instead",
    "round trips: one per step, one more per draft if guided or stepped, one more per llamacpp "
    "redraw",
    "a forward is linear in its rows, a prefill in its prompts; communication and KV reads are in "
    "no cost unless they were measured",
    f"a strategy other than {', '.join(PLACEMENTS)} hides no grammar work",
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a run.

    Attributes:
        costs: what its work takes.
        sources: by cost, where the value comes from.
        batch: most sequences in a forward.
        copies: sequences that each recorded one stands for.
        users, user_tok_s: readers, and how fast each reads; 0 = nobody asks.
    """

    costs: Costs
    sources: Mapping[str, str]
    batch: float
    copies: float
    users: float
    user_tok_s: float


def question(
    settings: Mapping[str, str], steps: pd.DataFrame, prompt_tokens: float, stepped: bool = False
) -> Question:
    """Costs of the run, then bare replays, then a pair, then the user's own values.

    Args:
        settings: as the command line has them.
        steps: step rows of the run.
        prompt_tokens: mean length of its prompts, which a pair's prefill and the bare replays need.
        stepped: the run read every draft before the next one.

    Raises:
        ConfigError: a setting is unknown, or no value of its kind.
    """
    names = {item.name for item in fields(Costs)}
    others = {"bare", "pair", "batch", "users", "user_tok_s"}
    if unknown := sorted(set(settings) - names - others):
        known = ", ".join(sorted(names | others))
        raise ConfigError(f"{unknown[0]}: no such setting; name one of {known}")
    costs, sources = fit(steps, stepped), dict.fromkeys(names, "the run")
    if bare := settings.get("bare"):
        costs = _mark(
            costs, with_bare(costs, Path(bare), prompt_tokens), sources, f"bare replays in {bare}"
        )
    batch = number("batch", settings.get("batch", "0")) or float(steps["batch"].max())
    if pair := settings.get("pair"):
        if pair not in PAIRS:
            raise ConfigError(f"pair: {pair!r} is none of {', '.join(PAIRS)}")
        at = replace(costs, slots=math.ceil(batch))
        costs = _mark(costs, PAIRS[pair].costs(at, prompt_tokens), sources, f"pair={pair}")
    given = {name: _value(name, text) for name, text in settings.items() if name in names}
    sources |= dict.fromkeys(given, "given")
    if "draft_us" in given:  # another draft model: nothing of the run's own is left
        k = given.get("draft_tokens", costs.draft_tokens)
        follow = {"chain_us": k * given["draft_us"], "draft_row_us": 0.0}
        sources |= dict.fromkeys(follow.keys() - given.keys(), "follows draft_us")
        given = follow | given
    return Question(
        replace(costs, **given),
        sources,
        batch,
        batch / float(steps["batch"].max()),
        number("users", settings.get("users", "0")),
        number("user_tok_s", settings.get("user_tok_s", "0")),
    )


def _mark(old: Costs, new: Costs, sources: dict[str, str], source: str) -> Costs:
    changed = [name for name in sources if getattr(old, name) != getattr(new, name)]
    sources |= dict.fromkeys(changed, source)
    return new


def _value(name: str, text: str) -> Any:
    if name in ("overlap", "stepped"):
        if text not in ("true", "false"):
            raise ConfigError(f"{name}: {text!r} is neither true nor false")
        return text == "true"
    value = number(name, text)
    if name not in ("slots", "draft_tokens", "threads"):
        return value
    if value % 1:
        raise ConfigError(f"{name}: {text!r} is no whole number")
    return int(value)


def number(name: str, text: str) -> float:
    """The value of a setting.

    Raises:
        ConfigError: it is no finite number of at least 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}: {text!r} is no number of at least 0")
    return value


def assumptions(asked: Question, pair: str | None, prompt_tokens: float) -> Iterator[str]:
    """All that a prediction rests on, one line each."""
    for name, doc in columns(Costs).items():
        value = getattr(asked.costs, name)
        shown = f"{value:.1f}" if isinstance(value, float) else str(value).lower()
        yield f"{name} = {shown} ({asked.sources[name]}): {doc}"
    yield from ASSUMPTIONS
    if pair:
        yield from PAIRS[pair].derivation(asked.costs, prompt_tokens)
    if asked.copies != 1:
        yield f"each recorded sequence stands for {asked.copies:g} of one batch"
    if asked.users:
        yield (
            f"engines = {asked.users:,.0f} users × {asked.user_tok_s:g} tok/s / tok_s: throughput "
            "alone, all slots busy, no peaks"
        )


def table(predicted: pd.DataFrame, asked: Question, recorded: Mapping[str, float] | None) -> Table:
    """One row per strategy; held against the record if there is one to hold it against."""
    shown = {
        "tok/s": (predicted["tok_s"], "predicted output tokens / time (1/s)"),
        "to plain": (predicted["to_plain"], "ratio to plain's"),
        "draft µs": (predicted["draft_us"], "draft forwards, per verify step and sequence"),
        "verify µs": (predicted["verify_us"], "target forward, likewise"),
        "exposed µs": (predicted["exposed_us"], "grammar work that the device waits for"),
        "hidden µs": (predicted["hidden_us"], "grammar work beside the device"),
        "sync µs": (predicted["sync_us"], "round trips to the host"),
        "host µs": (predicted["host_us"], "everything else"),
        "prefill %": (100 * predicted["prefill_share"], "share of the time"),
    }
    if recorded is not None:
        truth = predicted.index.map(recorded).astype(float)
        shown["recorded tok/s"] = (pd.Series(truth, predicted.index), "of the run (1/s)")
        shown["error %"] = (100 * (predicted["tok_s"] / truth - 1), "predicted against recorded")
    if asked.users:
        engines = np.ceil(asked.users * asked.user_tok_s / predicted["tok_s"])
        shown["engines"] = (engines, "that the users keep busy")
        shown["tok/s per user"] = (predicted["tok_s"] / asked.batch, "with all slots busy")
    return Table(
        "Prediction",
        ("strategy", *shown),
        ("strategy that ran", *(doc for _, doc in shown.values())),
        tuple(
            (str(name), *(_cell(values[name]) for values, _ in shown.values()))
            for name in predicted.index
        ),
    )


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _stalls(steps: pd.DataFrame) -> str:
    """What the fit leaves out, and the record does not."""
    lost = steps[stalled(steps)]
    ticks = lost.groupby(["strategy", "tick", "prefill"]).ngroups
    spent = lost[TIMES].to_numpy().sum() / 1e3
    where = ", ".join(sorted(lost["strategy"].unique()))
    told = (
        f"left out of the fit, but not of the record: {ticks} stalls ({where}; {spent:.0f} ms in "
        f"all), each over {STALL:g} times the median step"
    )
    return told if ticks else ""


def stepped(folder: RunFolder) -> bool:
    """Whether the run's drafters looked at each draft before the next, whatever the strategy."""
    return bool(OmegaConf.select(folder.config(), "drafter.length") == "p_min")


def read_arguments(words: Sequence[str]) -> tuple[RunFolder, dict[str, str]]:
    """One run folder, and settings ``name=value``, in any order.

    Raises:
        ConfigError: not one folder, or it is no run.
    """
    runs = [word for word in words if "=" not in word]
    if len(runs) != 1:
        raise ConfigError("RUN: name one run folder, then settings as name=value")
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    return RunFolder.open(Path(runs[0])), settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status, 2 for what the user can correct."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.whatif",
        usage="%(prog)s RUN [NAME=VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="RUN, NAME=VALUE", help="in any order")
    words: list[str] = parser.parse_args(arguments).words
    return exit_status(lambda: _answer(words))


def _answer(words: Sequence[str]) -> int:
    folder, settings = read_arguments(words)
    steps, prompt_tokens = folder.steps(), float(folder.requests()["prompt_tokens"].mean())
    asked = question(settings, steps, prompt_tokens, stepped(folder))
    predicted = predict(steps, asked.costs, asked.copies)
    recorded = {name: each["tok_s"] for name, each in folder.strategies().items()}
    for line in assumptions(asked, settings.get("pair"), prompt_tokens):
        print(f"- {line}")
    if told := _stalls(steps):
        print(f"- {told}")
    print()
    as_it_ran = settings.keys() <= {"bare"}
    print_tables([table(predicted, asked, recorded if as_it_ran else None)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
