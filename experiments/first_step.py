"""How long after its start the engine does its first decode step.

    python -m experiments.first_step

Starts a fresh process twice on the same request: with an empty compiler cache and with the one
that the first process left. Each loads the pair, compiles, captures the shapes that its first
steps need, and reports the time since it was started. Prints a table and writes
``first_step.json`` below ``out``. Settings (``name=value``): ``strategy``, ``profile``,
``compile``, ``out``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from time import time

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from experiments.study import Study, run_study
from harness.config import schema, typed
from harness.results.record import Recorder
from harness.results.table import Table, print_tables
from harness.run import Run

DEFAULTS = {"strategy": "vllm", "profile": "quick", "compile": "true"}
COLUMNS = {
    "imported": "process start to the imports done (s)",
    "loaded": "process start to both models loaded (s)",
    "first step": "process start to the end of the first decode step (s)",
}
CHILD = "--started="
"""Marks the process that is measured; the time at which it was started follows."""


def main(arguments: list[str]) -> None:
    started = [float(word.removeprefix(CHILD)) for word in arguments if word.startswith(CHILD)]
    if started:
        settings = dict(word.split("=", 1) for word in arguments if not word.startswith(CHILD))
        print(json.dumps(first_step(settings, started[0])))
    else:
        compare(Study.begin("first_step", arguments, DEFAULTS))


def compare(study: Study) -> None:
    """Both starts, side by side."""
    with TemporaryDirectory() as cache:
        starts = {name: start(study.settings, cache) for name in ("cold", "warm")}
    rows = tuple((name, *(f"{s:.1f}" for s in times.values())) for name, times in starts.items())
    table = Table(
        title="Time to the first decode step",
        headers=("compiler cache", *COLUMNS),
        rows=rows,
        docs=("what the process found", *COLUMNS.values()),
    )
    print_tables([table])
    study.write([table], {"starts": starts})


def start(settings: dict[str, str], cache: str) -> dict[str, float]:
    """One process's times, s."""
    words = [f"{name}={value}" for name, value in settings.items()]
    child = subprocess.run(
        [sys.executable, "-m", "experiments.first_step", *words, f"{CHILD}{time()}"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    times: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return times


def first_step(settings: dict[str, str], started: float) -> dict[str, float]:
    """In the child: run until the first decode step is done."""
    imported_s = time() - started
    ConfigStore.instance().store(name="schema", node=schema())
    overrides = [
        f"+strategy={settings['strategy']}",
        f"profile={settings['profile']}",
        f"engine.compile={settings['compile']}",
    ]
    with initialize_config_module("configs", version_base="1.3"):
        config = typed(compose("config", overrides))
    run = Run(config, Recorder(), lambda _: None)
    loaded_s = time() - started
    (loop,) = run.loops
    loop.submit(run.requests)
    while not any(sequence.steps > 1 for sequence in loop.running):
        if not loop.advance():  # the first step of a sequence is its prefill
            sys.exit("error: no request got to a decode step")
    return {"imported_s": imported_s, "loaded_s": loaded_s, "first_step_s": time() - started}


if __name__ == "__main__":
    run_study(main)
