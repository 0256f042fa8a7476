"""The command of the campaign; see ``experiments.faults``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from experiments.faults.cases import (
    CHANGED,
    CRASH,
    HANG,
    ISOLATED,
    LOST,
    OTHER,
    SERVED,
    Case,
    Outcome,
)
from experiments.faults.kinds import SHARES, cases
from experiments.faults.workers import campaign
from experiments.study import Study, run_study
from harness.errors import ConfigError
from harness.results.table import Table, print_tables

DEFAULTS = {
    "cases": str(sum(SHARES.values())),
    "seed": "0",
    "kinds": ",".join(SHARES),
    "only": "",
    "limit_s": "90.0",
    "processes": str(os.cpu_count()),
}
COLUMNS = {
    "cases": "victims and their neighbours, decoded in one batch (kills: runs of the main job)",
    "isolated": "the victim failed alone, with a reason (kills: resumed with finished requests)",
    "served": "the fault had no effect on its request",
    LOST: "a request that had to finish did not",
    CHANGED: "a neighbour has another output than without the victim",
    HANG: "the case did not end",
    CRASH: "the process died, or an exception left the loop",
    OTHER: "an unbalanced ledger, a failure without a reason, a thread left behind",
    "invalid": "outputs that are complete but do not fit their schema: the engine's doing",
    "longest": "case (s)",
}
KILL_S = 1200.0
"""How long a case of ``kills`` may take, which runs the main job several times."""

RUN = "experiments.faults.kinds:run_case"


def main(arguments: Sequence[str]) -> None:
    study = Study.begin("faults", arguments, DEFAULTS)
    settings = study.settings
    outcomes, asked = [], chosen(settings)
    slow, quick = KILL_S, float(settings["limit_s"])
    limit_s = lambda case: slow if case.kind == "kills" else quick  # noqa: E731
    for outcome in campaign(asked, int(settings["processes"]), limit_s, RUN):
        outcomes.append(outcome)
        if len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} of {len(asked)} cases", file=sys.stderr, flush=True)
        for sort, what in outcome.violations.items():
            print(f"{sort}: only={outcome.case}  {outcome.setting}: {what}", flush=True)
        if settings["only"]:
            print(f"{outcome.setting}: {outcome.ending} {outcome.reason}")
    table = as_table(outcomes)
    print_tables([table])
    study.write([table], {"outcomes": [asdict(outcome) for outcome in outcomes]})
    if any(outcome.violations for outcome in outcomes):
        sys.exit("error: a fault did more than fail its own request; see above")


def chosen(settings: dict[str, str]) -> list[Case]:
    """The cases that the user asks for.

    Raises:
        ConfigError: there is no such kind.
    """
    only, kinds = settings["only"].partition(":"), settings["kinds"].split(",")
    if only[0]:
        kinds = [only[0]]
    if unknown := sorted(set(kinds) - SHARES.keys()):
        raise ConfigError(f"kinds: {unknown[0]!r} is none of {', '.join(SHARES)}")
    if only[0]:
        return [Case(only[0], int(only[2]))]
    return cases(int(settings["cases"]), int(settings["seed"]), kinds)


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """A row per kind, and one for all."""
    kinds = {kind: [each for each in outcomes if each.case.startswith(kind)] for kind in SHARES}
    groups = {kind: group for kind, group in kinds.items() if group} | {"all": list(outcomes)}
    return Table(
        "Faults: what came of them, by kind",
        ("fault", *COLUMNS),
        ("kind", *COLUMNS.values()),
        tuple((kind, *_cells(group)) for kind, group in groups.items()),
    )


def _cells(group: Sequence[Outcome]) -> Iterable[str]:
    yield str(len(group))
    for ending in (ISOLATED, SERVED):
        yield str(sum(each.ending == ending for each in group))
    for sort in (LOST, CHANGED, HANG, CRASH, OTHER):
        yield str(sum(sort in each.violations for each in group))
    yield str(sum(each.invalid for each in group))
    yield f"{max(each.seconds for each in group):.1f}"


if __name__ == "__main__":
    run_study(main)
