"""What a distillation depends on: one dataclass, filled from ``name=value`` words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from harness.errors import ConfigError

STAGES = ("data", "train", "export", "evaluate", "bench")
LAWS = ("masked", "own")
OPTIMIZERS = ("adamw", "muon")
Part = Literal["data", "train"]

DATA_FIELDS = ("pair", "seed", "items", "max_length", "max_new_tokens", "references")
"""What the sequences depend on, but for their number."""
TRAIN_FIELDS = (
    *DATA_FIELDS,
    "layers",
    "law",
    "steps",
    "train_seconds",
    "batch_tokens",
    "prompt_share",
    "lr",
    "warm_up",
    "weight_decay",
    "optimizer",
)
"""What the trained weights depend on, besides the sequences."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of ``python -m experiments.distill``.

    Attributes:
        pair: a config of the group ``pair``, whose target is taken, or a target itself:
            ``smollm2``, a folder, a hub id.
        layers: which students to train on one pass of the target: depths (``1,2,3``: the first
            layers of the target and its last one), or layers of the target (``[0,1,29]``).
        stages: what to do, of ``data``, ``train``, ``export``, ``evaluate``; or ``bench``.
        device: as ``pair.device``.
        seed: of everything random.
        items: train on so many items of each workload; 0 = all.
        max_length: longest sequence, tokens; longer prompts are left out.
        rounds: generation rounds, see ``experiments.distill.data``.
        part: ``i/n``: make every n-th file from the i-th on, so that n processes share the work.
        data_seconds: no round is begun after so long in one call; 0 = no bound.
        slots: sequences decoded at once.
        max_new_tokens: bound of a generated output.
        references: variants of each call whose reference answers are learnt.
        law: of the target that is taught: ``masked``, without what the grammar forbids, as it
            decodes; or ``own``, as if there were no grammar.
        steps: optimizer steps.
        train_seconds: a budget in time instead of ``steps``, s; 0 = none. The schedule then
            follows a clock, so another run makes (slightly) other weights.
        batch_tokens: tokens of a batch, padding included.
        prompt_share: share of the prompt positions that are learnt from; outputs are in full.
        lr: highest learning rate; warm-up, then cosine to 0.
        warm_up: share of the training in which the learning rate rises.
        weight_decay: of the matrices.
        optimizer: ``adamw``, or ``muon`` (matrices by Muon, norms by AdamW).
        compile: torch.compile: ``true``, ``false``, or ``auto``: on CUDA.
        checkpoint_seconds: time between two checkpoints, s.
        evaluate_every: steps between two points of the held-out curve.
        eval_items: items of the ``eval`` split that the result is measured on; 0 = all.
        draft: measure this draft instead of the trained ones (``stages=evaluate``).
        bench_seconds: how long ``stages=bench`` measures, s.

    Raises:
        ConfigError: a value is out of its range.
    """

    pair: str = "smollm2"
    layers: str = "3"
    stages: str = "data,train,export,evaluate"
    device: str = "auto"
    seed: int = 0
    items: int = 0
    max_length: int = 1024
    rounds: int = 40
    part: str = "0/1"
    data_seconds: float = 0.0
    slots: int = 128
    max_new_tokens: int = 160
    references: int = 8
    law: str = "masked"
    steps: int = 6000
    train_seconds: float = 0.0
    batch_tokens: int = 24_576
    prompt_share: float = 0.25
    lr: float = 1e-3
    warm_up: float = 0.02
    weight_decay: float = 0.01
    optimizer: str = "adamw"
    compile: str = "auto"
    checkpoint_seconds: float = 60.0
    evaluate_every: int = 200
    eval_items: int = 0
    draft: str = ""
    bench_seconds: float = 20.0

    def __post_init__(self) -> None:
        for stage in self.chosen_stages:
            _check(stage in STAGES, "stages", stage, f"name some of {', '.join(STAGES)}")
        for name, least in {
            "items": 0,
            "max_length": 2,
            "rounds": 0,
            "data_seconds": 0,
            "slots": 1,
            "max_new_tokens": 1,
            "references": 0,
            "steps": 1,
            "train_seconds": 0,
            "checkpoint_seconds": 0,
            "evaluate_every": 1,
            "eval_items": 0,
            "bench_seconds": 0,
        }.items():
            value = getattr(self, name)
            _check(value >= least, name, value, f"give {least} or more")
        for name in ("prompt_share", "warm_up"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "give a share of 1")
        _check(
            self.batch_tokens >= self.max_length,
            "batch_tokens",
            self.batch_tokens,
            "give max_length or more",
        )
        index, of = self.share
        _check(0 <= index < of, "part", self.part, "give i/n with i from 0 to n - 1")
        _check(self.law in LAWS, "law", self.law, "use masked or own")
        _check(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, "use adamw or muon")
        _check(
            self.compile in ("auto", "true", "false"),
            "compile",
            self.compile,
            "auto, true or false",
        )

    @property
    def share(self) -> tuple[int, int]:
        """``part`` as numbers; (-1, 0) if it is none."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.part)
        return (int(found[1]), int(found[2])) if found else (-1, 0)

    @property
    def chosen_stages(self) -> list[str]:
        return self.stages.split(",")

    @property
    def target(self) -> str:
        """The target, as ``pair.target`` names it."""
        config = files("configs") / "pair" / f"{self.pair}.yaml"
        if not config.is_file():
            return self.pair
        values = OmegaConf.create(config.read_text(encoding="utf-8"))
        return str(OmegaConf.select(values, "target"))

    def values(self, part: Part) -> dict[str, Any]:
        """The settings that the sequences, or the weights, depend on."""
        names = DATA_FIELDS if part == "data" else TRAIN_FIELDS
        return {name: value for name, value in asdict(self).items() if name in names}


def defaults() -> dict[str, str]:
    """All settings as words of a command line."""
    return {each.name: str(each.default) for each in fields(Settings)}


def parse(words: Mapping[str, str]) -> Settings:
    """Settings from the words of a command line.

    Raises:
        ConfigError: a word is no number where one is needed, or out of range.
    """
    values: dict[str, Any] = {}
    for each in fields(Settings):
        kind: Any = type(each.default)
        try:
            values[each.name] = kind(words[each.name])
        except ValueError:
            raise ConfigError(f"{each.name}: {words[each.name]!r} is no {kind.__name__}") from None
    return Settings(**values)


def claim(folder: Path, values: Mapping[str, Any]) -> None:
    """Make a folder for results of these settings, or go on in the one that there is.

    One that holds no result yet is anybody's: a target or layers that are named wrongly fail only
    once the models are read, and the corrected command must not be refused.

    Raises:
        ConfigError: it holds results of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    holds_results = any(not each.name.startswith("settings.") for each in folder.iterdir())
    if path.exists() and holds_results:
        theirs = json.loads(path.read_text())
        for name, value in values.items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name}: {folder} was begun with {theirs.get(name)!r}, not {value!r}; name "
                    "another folder by out="
                )
    part = folder / f"settings.{os.getpid()}.part"  # other processes may be at it
    part.write_text(json.dumps(values, indent=1))
    part.replace(path)


def _check(holds: bool, field: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"{field}: {value!r}; {remedy}")
