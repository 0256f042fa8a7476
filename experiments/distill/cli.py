"""Makes a draft for a target: student = some layers of the target, its embeddings and its head.

    python -m experiments.distill pair=smollm2 layers=3

Four stages; each keeps what it has done and goes on there when the same command is given again
(Ctrl-C is safe; ``stages=`` names some of them):

``data``
    token sequences: the target's own outputs under grammars and free ones, made by the harness's
    decode loop, and reference answers; training records only (``experiments.distill.data``)
``train``
    forward KL divergence to the law that the target decodes by, which under a grammar is the masked
    one; several students at once (``experiments.distill.learner``)
``export``
    a folder for ``pair.draft`` per student, the curve as JSON, CSV and figure
``evaluate``
    agreement with the target on BFCL's ``eval`` split, and the model card. With ``draft=`` it
    measures that draft instead

``stages=bench`` measures how fast a training would be. Settings (``name=value``) are documented in
``experiments.distill.settings``; everything is written below ``out`` (``runs/distill``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.distill.card import write_card
from experiments.distill.data import as_table as data_table, load, make
from experiments.distill.evaluate import as_table, evaluate
from experiments.distill.export import export, trained
from experiments.distill.settings import Settings, defaults, parse
from experiments.distill.train import train
from experiments.study import Study
from harness.errors import EXIT_INTERRUPTED, exit_status
from harness.results.table import print_tables


def main(arguments: Sequence[str]) -> int:
    """The command line; returns its exit status."""
    try:
        return exit_status(lambda: run(arguments))
    except KeyboardInterrupt as stop:
        reason = str(stop) or "what was finished is kept; the same command goes on"
        print(f"interrupted: {reason}", file=sys.stderr)
        return EXIT_INTERRUPTED


def run(arguments: Sequence[str]) -> int:
    """Do the stages that are asked for.

    Raises:
        HarnessError: a setting is wrong, or a stage lacks what an earlier one makes.
        KeyboardInterrupt: it was interrupted; the message says what is kept.
    """
    study = Study.begin("distill", arguments, defaults(), parsed=True)
    settings = parse(study.settings)
    for stage in settings.chosen_stages:
        STAGES[stage](settings, study)
    return 0


def _data(settings: Settings, study: Study) -> None:
    make(settings, study.out / "data")
    if settings.share == (0, 1):  # else others may be at work
        print_tables([data_table(load(study.out / "data"))])


def _train(settings: Settings, study: Study) -> None:
    data = load(study.out / "data")
    taught = data if settings.law == "masked" else data.without_masks()
    train(settings, taught, study.out / "train")


def _export(settings: Settings, study: Study) -> None:
    from experiments.distill.curve import write_curve  # noqa: PLC0415 (figures: not at the start)

    for folder in export(settings, study.out).values():
        print(folder)
    write_curve(study.out / "curve", trained(study.out).curve)


def _evaluate(settings: Settings, study: Study) -> None:
    folders = {} if settings.draft else export(settings, study.out)
    drafts = [settings.draft] if settings.draft else list(map(str, folders.values()))
    results = evaluate(settings, drafts)
    tables = [as_table(results)]
    print_tables(tables)
    study.write(tables, {"agreement": results})
    for name, folder in folders.items():
        write_card(settings, study.out, name, results[str(folder)])


def _bench(settings: Settings, study: Study) -> None:
    from experiments.distill.bench import bench  # noqa: PLC0415 (nothing else needs it)

    tables = [bench(settings)]
    print_tables(tables)
    study.write(tables, {})


STAGES = {
    "data": _data,
    "train": _train,
    "export": _export,
    "evaluate": _evaluate,
    "bench": _bench,
}
