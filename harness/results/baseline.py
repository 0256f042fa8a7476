"""What is compared of a run, and the file in which a baseline keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.errors import ConfigError
from harness.results.metrics import PLAIN
from harness.results.record import RunFolder
from harness.results.schema import ROLLBACKS, SCHEMA_VERSION, Metrics


class Better(StrEnum):
    """The direction in which a count is better."""

    HIGHER = "higher is better"
    LOWER = "lower is better"
    NEITHER = "neither is better"


BETTER: dict[str, Better] = {
    **dict.fromkeys(("accept_rate", "mean_accept_len"), Better.HIGHER),
    **dict.fromkeys(("requests", "complete", "valid"), Better.HIGHER),
    **dict.fromkeys(("canonical_share", "identical"), Better.HIGHER),
    **dict.fromkeys(("failed", "first_divergence", "retokenized"), Better.LOWER),
    **dict.fromkeys(("rollback_calls", "rollback_tokens", *ROLLBACKS), Better.LOWER),
    **dict.fromkeys(("target_forwards", "draft_forwards"), Better.LOWER),
    **dict.fromkeys(("mask_rows", "wasted_rows"), Better.LOWER),
    **dict.fromkeys(("drafted_raw", "drafted", "accepted", "trimmed"), Better.NEITHER),
    **dict.fromkeys(("rejected_grammar", "rejected_model", "past_stop"), Better.NEITHER),
    **dict.fromkeys(("verify_steps", "emitted", "jump_tokens"), Better.NEITHER),
    **dict.fromkeys(("accept_hist", "accept_at", "near_ties"), Better.NEITHER),
}
"""The metrics that are compared exactly: the counts of ``METRICS`` and their ratios.

Neither is better where a loss shows in another one: fewer accepted drafts in ``accept_rate`` and
``mean_accept_len``, more dead ones in ``wasted_rows`` and ``draft_forwards``.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is compared of a run; ``--renew`` writes its fields to the baseline's file.

    Attributes:
        schema_version: of the summary.
        settings: what the counts depend on, by dotted name.
        made_with: versions and processor, which the counts should not depend on.
        strategies: metrics by strategy; those of ``BETTER`` only when read from a file.
    """

    schema_version: int
    settings: dict[str, Any]
    made_with: dict[str, str | None]
    strategies: dict[str, Metrics]

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """Of a run folder, or of a file that ``write`` made.

        Raises:
            ConfigError: ``path`` is neither, or of another schema version.
        """
        if path.is_file():
            return cls._of_file(path)
        folder = RunFolder.open(path)
        manifest = folder.manifest()
        try:
            config = OmegaConf.to_container(folder.config())
            return cls(
                SCHEMA_VERSION,
                {**manifest["setup"], **_settings(config)},
                {**manifest["versions"], "cpu": manifest["hardware"]["cpu"]},
                dict[str, Metrics](folder.strategies()),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: its settings are incomplete ({error}); run again") from None

    @classmethod
    def _of_file(cls, path: Path) -> Snapshot:
        try:
            snapshot = cls(**json.loads(path.read_text(encoding="utf-8")))
            if not all(isinstance(each, dict) for each in (snapshot.settings, snapshot.strategies)):
                raise TypeError
        except (OSError, ValueError, TypeError):
            raise ConfigError(f"{path}: not a baseline; write one with --renew") from None
        if snapshot.schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: schema_version is {snapshot.schema_version}, this version reads "
                f"{SCHEMA_VERSION}; renew the baseline"
            )
        return snapshot

    def write(self, path: Path) -> None:
        """Write the counts, sorted, without times."""
        counts = {
            strategy: {metric: metrics[metric] for metric in BETTER}
            for strategy, metrics in self.strategies.items()
        }
        values = {**asdict(self), "strategies": counts}
        text = json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror})") from None


def _settings(config: Any) -> dict[str, Any]:
    """The part of a run's config that decides its counts, flat: ``workload.limit``, ….

    ``Run.setup`` names the rest: pair, K, slots, grammar. A workload's file goes by its name,
    whatever the folder.
    """
    path = config["workload"]["path"]
    groups = {
        "engine": {name: config["engine"][name] for name in ("max_length", "turn")},
        "workload": {**config["workload"], "path": path and Path(path).name},
        "sampling": config["sampling"],
        **{f"options.{name}": options for name, options in config["options"].items()},
    }
    flat = {
        f"{group}.{name}": value
        for group, values in groups.items()
        for name, value in values.items()
    }
    return {"seed": config["seed"], **flat}


def check_comparable(baseline: Snapshot, run: Snapshot) -> None:
    """Both must have the same settings and strategies, ``plain`` among them.

    A setting that only one has came or went with the code: its effect shows in the counts.

    Raises:
        ConfigError: they cannot be compared; names the first difference.
    """
    for name, before in baseline.settings.items():
        after = run.settings.get(name, before)
        if after != before:
            raise ConfigError(
                f"not comparable: {name} is {before!r} in the baseline and {after!r} in the run; "
                "run with the same, or renew the baseline"
            )
    unlike = sorted(set(baseline.strategies) ^ set(run.strategies))
    if unlike:
        raise ConfigError(
            f"not comparable: only one of the two has {', '.join(unlike)}; run the same "
            "strategies, or renew the baseline"
        )
    if PLAIN not in run.strategies:
        raise ConfigError("not comparable: there is no plain; run it along")
    for strategy in run.strategies:
        both = baseline.strategies[strategy].keys() & run.strategies[strategy].keys()
        if missing := sorted(BETTER.keys() - both):
            raise ConfigError(
                f"not comparable: {strategy} has no {missing[0]} in one of the two; run again, "
                "or renew the baseline"
            )
