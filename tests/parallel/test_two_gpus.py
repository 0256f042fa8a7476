"""Two ranks on two GPUs: over NCCL they do what one process on one GPU does, or end in one line."""

from __future__ import annotations

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
FP32 = ["pair.dtype=float32", "engine.mode=eager"]
"""In which a sum over two devices flips no choice of this pair."""


def test_two_gpus_count_and_write_what_one_does(base: Path, tmp_path: Path) -> None:
    arguments = [*FP32, "compare=[plain,vllm,trtllm]"]
    folder = run(tmp_path, *settings(base, device="auto"), *arguments)
    assert_same(folder, alone(base, tmp_path / "alone", *arguments, device="auto"))


@pytest.mark.parametrize(
    ("lost", "strategy", "says"),
    [
        # A GPU waits in the target's first sum, where no exception reaches the process.
        (1, "plain", "rank 0 waits for another one in step 12 of plain for 10 s"),
        # A CPU waits for the first draft of rank 0.
        (0, "vllm", "rank 1 has lost another one in step 12 of vllm"),
    ],
)
def test_a_killed_rank_ends_the_other(
    lost: int, strategy: str, says: str, base: Path, tmp_path: Path
) -> None:
    scripts = ["", ""]
    scripts[lost] = script(STEP, "os.kill(os.getpid(), signal.SIGKILL)")
    arguments = [*FP32, f"+strategy={strategy}", "engine.tp_timeout_s=10"]
    ranks = start(tmp_path, *settings(base, device="auto"), *arguments, scripts=scripts)
    assert_given_up(ranks[1 - lost], until_fault(tmp_path))
    assert ranks[lost].wait() == -signal.SIGKILL
    assert says in ranks[1 - lost].error
    assert (run_folder(tmp_path) / "journal.jsonl").exists()
