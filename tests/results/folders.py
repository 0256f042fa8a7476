"""Run folders of the tiny run, for the tests of reports and pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from harness.results.metrics import compare_with_plain, summarise
from harness.results.record import RunFolder
from tests.results import tiny_run

MANIFEST: dict[str, Any] = {
    "date": "2025-01-02T03:04:05+00:00",
    "command": ["python", "-m", "harness", "workload.kinds=[json, regex]"],
    "versions": {"python": "3.11.9", "torch": "2.6.0", "triton": None},
    "hardware": {"cpu": "Toy CPU", "cores": 4, "memory_gib": 15.5, "gpu": None},
    "git": {"commit": "abc123", "dirty": True},
}


def tiny_folder(
    path: Path,
    steps: pd.DataFrame | None = None,
    requests: pd.DataFrame | None = None,
    *,
    manifest: Mapping[str, Any] = MANIFEST,
    config: Mapping[str, Any] | None = None,
) -> RunFolder:
    """A complete run folder; of the tiny run, where no other rows are given."""
    tiny_steps, tiny_requests = tiny_run()
    steps = tiny_steps if steps is None else steps
    requests = compare_with_plain(tiny_requests if requests is None else requests)
    folder = RunFolder.create(path)
    folder.write_manifest(manifest)
    folder.write_frames(steps, requests)
    folder.write_summary(summarise(steps, requests))
    if config is not None:
        folder.write_config(OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    return folder
