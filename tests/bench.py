"""All strategies over the tiny pair, in static shapes and as the command line makes them."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from harness.config import Config
from harness.drafters.config import DrafterConfig
from harness.engine import EngineConfig
from harness.loop import DecodeLoop
from harness.models.pair import PairConfig
from harness.models.sampling import Sampling
from harness.results.record import Recorder
from harness.run import Run
from harness.workloads.loaders import WorkloadConfig
from tests.tiny_pair import save_pair


class Bench:
    """In fp32, so that no other shape of a forward flips a near tie and changes what comes next.

    Args:
        folder: for the pair and the items.
        items: of the workload, by their fields.
        max_new_tokens: of each request.
        slots: of the engine.
        device: of both models.
        sampling: how tokens are chosen.
        drafter: where drafts come from; None = the draft model.
        options: by strategy, its options.
    """

    def __init__(
        self,
        folder: Path,
        items: SequenceOf[dict[str, object]],
        max_new_tokens: int,
        slots: int,
        device: str = "cpu",
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        drafter: DrafterConfig | None = None,
        **options: object,
    ) -> None:
        target, draft = save_pair(folder)
        path = folder / "items.jsonl"
        path.write_text("\n".join(json.dumps(item) for item in items))
        config = Config(
            strategy="",
            options=options,
            drafter=drafter or DrafterConfig(),
            pair=PairConfig(str(target), str(draft), "float32", device),
            workload=WorkloadConfig("file", str(path), max_new_tokens=max_new_tokens),
            engine=EngineConfig(slots=slots, mode="graphs"),
            sampling=sampling,
        )
        self.recorder = Recorder()
        self.run = Run(config, self.recorder, lambda _: None)

    def loop(self, strategy: str) -> DecodeLoop:
        return next(each for each in self.run.loops if each.strategy.name == strategy)
