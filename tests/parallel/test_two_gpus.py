"""Two ranks on two GPUs: over NCCL they do what one process on one GPU does, or end in one line."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.parallel.launch import (
    STEP,
    alone,
    assert_given_up,
    assert_same,
    run,
    run_folder,
    script,
    settings,
    start,
    until_fault,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FP32 = "pair.dtype=float32"
"""In which a sum over two devices flips no choice of this pair."""


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_two_gpus_count_and_write_what_one_does(
    mode: str, sampling: str, base: Path, tmp_path: Path
) -> None:
    arguments = [FP32, f"engine.mode={mode}", f"sampling={sampling}"]
    folder = run(tmp_path, *settings(base, device="auto"), *arguments)
    assert_same(folder, alone(base, tmp_path / "alone", *arguments, device="auto"))


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(("lost", "strategy"), [(1, "plain"), (0, "vllm")])
def test_a_killed_rank_ends_the_other(
    lost: int, strategy: str, mode: str, base: Path, tmp_path: Path
) -> None:
    # A GPU waits in the target's first sum or for rank 0's first draft, and no exception comes of
    # it; where that step was launched ahead, the CPU waits behind it for what the other one has.
    scripts = ["", ""]
    scripts[lost] = script(STEP, "os.kill(os.getpid(), signal.SIGKILL)")
    arguments = [FP32, f"engine.mode={mode}", f"+strategy={strategy}", "engine.tp_timeout_s=10"]
    ranks = start(tmp_path, *settings(base, device="auto"), *arguments, scripts=scripts)
    assert_given_up(ranks[1 - lost], until_fault(tmp_path))
    assert ranks[lost].wait() == -signal.SIGKILL
    how = "(waits for another one|has lost another one)"
    assert re.search(f"rank {1 - lost} {how} in step 12 of {strategy}", ranks[1 - lost].error)
    assert (run_folder(tmp_path) / "journal.jsonl").exists()
