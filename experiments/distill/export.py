"""The stage ``export``: each student as a folder that ``pair.draft`` reads.

It takes the last checkpoint, of an unfinished training too.
"""

from __future__ import annotations

from pathlib import Path

from experiments.distill.checkpoint import TRAINING, Checkpoint
from experiments.distill.settings import Settings
from experiments.distill.student import parse_layers, save_student, student_config
from harness.errors import ConfigError
from harness.models.checkpoint import locate, read_config


def export(settings: Settings, out: Path) -> dict[str, Path]:
    """Write the folders of all students; returns them by student.

    Raises:
        ConfigError: nothing has been trained.
    """
    weights = trained(out).weights
    target = read_config(locate(settings.target, "pair"), "pair")
    folders = draft_folders(settings, out)
    for name, layers in students(settings).items():
        save_student(folders[name], student_config(target, layers), weights[name])
    return folders


def trained(out: Path) -> Checkpoint:
    """The last checkpoint.

    Raises:
        ConfigError: there is none.
    """
    checkpoint = Checkpoint.read(out / TRAINING)
    if checkpoint is None:
        raise ConfigError(f"stages: {out} holds no training; run the stage train first")
    return checkpoint


def students(settings: Settings) -> dict[str, tuple[int, ...]]:
    """By name of the student, its layers of the target."""
    target = read_config(locate(settings.target, "pair"), "pair")
    return parse_layers(settings.layers, target.get_text_config(decoder=True).num_hidden_layers)


def draft_folders(settings: Settings, out: Path) -> dict[str, Path]:
    """By name of the student, the folder of its draft."""
    pair = Path(settings.pair).name
    return {name: out / f"{pair}-draft-{name}" for name in students(settings)}
