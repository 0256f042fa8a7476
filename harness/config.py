"""The run's configuration: one dataclass, composed by Hydra from ``configs/``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import strategies
from harness.drafters.config import DrafterConfig
from harness.engine import EngineConfig
from harness.errors import ConfigError
from harness.grammar.service import GrammarConfig
from harness.models.pair import PairConfig
from harness.models.sampling import Sampling
from harness.results.trackers import TrackerConfig
from harness.workloads.loaders import WorkloadConfig
from strategies.base import Strategy


@dataclass
class Config:
    """Everything that a run depends on.

    Attributes:
        strategy: the one to run; missing or empty = compare all of ``compare``.
        compare: strategies of a comparison, in this order; empty = all that the drafter can serve.
        options: by strategy, its own options dataclass.
        name: of the run folder, after the date.
        runs: folder that run folders are made in.
        seed: of the run; each request derives its own.
        repeat: which repeat of the same run this is. It changes nothing but where the report puts
            the run: it takes those that differ in this alone together.
        resume: folder of an unfinished run, to go on in with the settings that it has.
    """

    strategy: str = MISSING
    compare: list[str] = field(default_factory=list)
    name: str = "run"
    runs: str = "runs"
    seed: int = 0
    repeat: int = 0
    resume: str | None = None
    pair: PairConfig = MISSING
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Sampling = field(default_factory=Sampling)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    options: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name:
            raise ConfigError(
                f"name: {self.name!r} is to be part of a folder's name; leave slashes out, and say "
                "with runs=… where the folder goes"
            )
        if self.engine.dp > 1 and self.drafter.length == "adaptive":
            raise ConfigError(
                f"drafter.length: adaptive learns from all requests, and engine.dp="
                f"{self.engine.dp} shares them out; use fixed or p_min, or engine.dp=1"
            )


def schema() -> DictConfig:
    """The typed default config; every strategy's options are in it, so Hydra checks them."""
    config = _structured(Config)
    config.options = {
        name: _structured(strategy.Options) for name, strategy in strategies.registry().items()
    }
    return config


def typed(config: DictConfig) -> Config:
    """The composed config as dataclasses, each of which checks itself.

    Raises:
        ConfigError: a value is out of its range.
    """
    try:
        given = OmegaConf.to_container(config, resolve=True)
        assert isinstance(given, dict)
        if OmegaConf.is_missing(config, "strategy"):
            given["strategy"] = ""
        merged = OmegaConf.merge(_structured(Config), given)
        value = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    assert isinstance(value, Config)
    return value


def options_of(strategy: type[Strategy], config: Config) -> Any:
    """The strategy's options dataclass, from ``config.options``.

    Raises:
        ConfigError: an option that the strategy does not have, or of another type.
    """
    given = config.options.get(strategy.name, {})
    try:
        return OmegaConf.to_object(OmegaConf.merge(_structured(strategy.Options), given))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"options.{strategy.name}: {reason}") from None


def chosen(config: Config) -> list[type[Strategy]]:
    """The strategy that was asked for, or those to compare.

    Raises:
        ConfigError: one is unknown, named twice, called like another, or cannot be served by the
            drafter.
    """
    if len(set(config.compare)) < len(config.compare):
        raise ConfigError("compare: a strategy is named twice; name each once")
    if not (named := [config.strategy] if config.strategy else config.compare):
        every = strategies.registry().values()
        return [each for each in every if config.drafter.has_logits or not _needs(each, config)]
    found = list(strategies.by_name(map(strategies.find, named)).values())
    for each in found:
        config.drafter.check_serves(_needs(each, config))
    return found


def _needs(strategy: type[Strategy], config: Config) -> str:
    return strategy.needs_logits(options_of(strategy, config))


def _structured(dataclass: type) -> DictConfig:
    """A node of this type that can be composed, though its dataclasses be frozen."""
    config = OmegaConf.structured(dataclass)
    assert isinstance(config, DictConfig)
    for node in (config, *(config._get_node(key) for key in config)):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, None)
    return config
