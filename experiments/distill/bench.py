"""The stage ``bench``: how fast a training with these settings is, and where its time goes.

On made-up tokens of the usual lengths; nothing is read or written. With compiled layers it also
leaves their kernels in the compiler's cache, where the training finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import count
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from experiments.distill.batches import Batches, ahead
from experiments.distill.learner import Learner
from experiments.distill.sequences import TokenSequence
from experiments.distill.settings import Settings
from harness.results.table import Table

T = TypeVar("T")

PROMPT, OUTPUT = 250.0, 50.0
"""Median tokens of BFCL's prompts and answers."""
SPREAD = 0.5
"""Standard deviation of their logarithms."""
SEQUENCES = 2048
LEAST_STEPS = 3


def bench(settings: Settings) -> Table:
    """Measure for about ``bench_seconds``, compilation not counted."""
    learner = Learner(settings)
    batches = Batches(
        made_up(settings, vocab_size=len(learner.head)),
        settings.batch_tokens,
        settings.max_length,
        settings.prompt_share,
        settings.seed,
    )
    begun = perf_counter()
    for batch in batches.one_of_each_shape():
        learner.learn(batch.to(learner.device), settings.lr)
    wait(learner.device)
    warm_up_s = perf_counter() - begun
    step_s, tokens = whole_steps(learner, batches, settings)
    parts = by_part(learner, batches, settings)
    rows = [("whole step", step_s), *parts.items()]
    return Table(
        title=title(learner, tokens, warm_up_s),
        headers=("part", "ms per step", "tokens/s"),
        docs=(
            "of a step; each part is waited for, the whole step is not",
            "mean",
            "tokens of a batch, without padding, over this time",
        ),
        rows=tuple(
            (name, f"{1e3 * seconds:.1f}", f"{tokens / seconds:,.0f}") for name, seconds in rows
        ),
    )


def title(learner: Learner, tokens: float, warm_up_s: float) -> str:
    """What the times stand for."""
    students = f"{len(learner.students)} students" if len(learner.students) > 1 else "one student"
    text = f"{students}, {tokens:,.0f} tokens a batch without padding, warm-up {warm_up_s:.0f} s"
    if learner.device.type == "cuda":
        text += f", peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return text


def whole_steps(learner: Learner, batches: Batches, settings: Settings) -> tuple[float, float]:
    """Steps as the training does them: seconds and tokens per step."""
    tokens, begun = 0, perf_counter()
    with closing(ahead(lambda index: learner.stage(batches[index]), 0)) as made:
        for steps in count(1):
            batch = next(made)
            learner.learn(batch.to(learner.device), settings.lr)
            tokens += batch.real
            if steps >= LEAST_STEPS and perf_counter() - begun > settings.bench_seconds / 2:
                break
    wait(learner.device)
    return (perf_counter() - begun) / steps, tokens / steps


def by_part(learner: Learner, batches: Batches, settings: Settings) -> dict[str, float]:
    """Seconds of each part of a step, each waited for."""
    spent: dict[str, float] = {}

    def timed(part: str, work: Callable[[], T]) -> T:
        begun = perf_counter()
        result = work()
        wait(learner.device)
        spent[part] = spent.get(part, 0.0) + perf_counter() - begun
        return result

    for steps in count(1):
        made = timed("batch, on the host", lambda: learner.stage(batches[steps]))  # noqa: B023
        batch = made.to(learner.device)
        target = timed("target forward", lambda: learner.target_states(batch))  # noqa: B023
        states = timed(
            "student forward",
            lambda: {name: learner.states(name, batch) for name in learner.students},  # noqa: B023
        )
        found = timed(
            "head and loss",
            lambda: learner.divergences(target, states, batch),  # noqa: B023
        )
        timed("student backward", lambda: learner.backward(states, found, batch))  # noqa: B023
        timed("optimizer", lambda: learner.update(settings.lr))
        if steps >= LEAST_STEPS and sum(spent.values()) > settings.bench_seconds / 2:
            break
    return {part: seconds / steps for part, seconds in spent.items()}


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made_up(settings: Settings, vocab_size: int) -> list[TokenSequence]:
    """Sequences of random tokens."""
    random = np.random.default_rng(settings.seed)
    found = []
    for _ in range(SEQUENCES):
        prompt, output = np.exp(random.normal(np.log([PROMPT, OUTPUT]), SPREAD)).astype(int) + 1
        length = min(prompt + output, settings.max_length)
        tokens = random.integers(vocab_size, size=length).astype(np.int32)
        start = int(min(prompt, length - 1))
        rows = np.zeros(length - start, np.int32)
        found.append(TokenSequence("made up", "made up", tokens, start, rows))
    return found
