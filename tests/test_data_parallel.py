"""One run over several processes: the same counts, and every end that it can come to."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import strategies
from experiments import scaling
from harness.cli import main
from harness.config import Config
from harness.data_parallel import run as data_parallel, workers
from harness.data_parallel.model import ScalingModel, stretched
from harness.data_parallel.shard import Shard, devices, share_of
from harness.data_parallel.throughput import Throughput
from harness.engine import EngineConfig
from harness.errors import ConfigError
from harness.models.pair import PairConfig
from harness.results.costs import Costs
from harness.results.journal import Journal
from harness.results.manifest import cores
from harness.results.record import Recorder, RunFolder
from harness.results.schema import METRICS, metric_type
from harness.step import Step
from strategies.plain import Plain
from tests.results import verify
from tests.tiny_pair import save_pair

ITEMS = [
    {"id": f"{kind}-{number}", "prompt": f"Number {number}?", **grammar}
    for number in range(3)
    for kind, grammar in {
        "digits": {"regex": "[0-9]{6,12}"},
        "choice": {"choice": ["a long way home", "a long way off"]},
        "free": {},
    }.items()
]
ITEMS.insert(1, {"id": "bad", "prompt": "?", "regex": "(a"})
ITEMS.insert(4, {"id": "bad too", "prompt": "?", "choice": []})
REFUSED = ("bad too",)  # it never becomes a request; the other bad one fails as it is compiled
TURN = 2
FIRST_SHARD = [
    *REFUSED,
    *(
        name
        for place, name in enumerate(item["id"] for item in ITEMS if item["id"] not in REFUSED)
        if place // TURN % 2 == 0
    ),
]
"""What the first of two processes has: every other turn."""

COUNTS = [
    name
    for name in METRICS
    if metric_type(name).removeprefix("list of ") == "int"
    or name.removesuffix("_ci") in ("accept_rate", "mean_accept_len", "accept_at")
    or name in ("complete", "valid", "identical", "canonical_share")
]
OF_BATCHES = ("target_forwards", "draft_forwards")
"""Counts of whole batches, whatever is in them."""

Harness = Callable[..., Path]

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["harness.cli", "harness.results.report"])
"""Its processes have imported everything when they begin."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair and a workload, and ``SERVER`` running."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])  # where it finds what it is to import
        forkserver.ensure_running()
    folder = tmp_path_factory.mktemp("base")
    save_pair(folder)
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    return folder


def invoke(folder: Path, *arguments: str) -> Path:
    """``python -m harness`` in this process and ``folder``; returns the newest run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(workers, "CONTEXT", SERVER)
        patch.setattr(sys, "argv", ["harness", *arguments])
        main()
    return max((folder / "runs").iterdir(), key=os.path.getmtime)


@pytest.fixture
def harness(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """``invoke`` in an empty folder, with the pair and the workload unless a run is resumed."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)

    def run(*arguments: str) -> Path:
        resumed = any(argument.startswith("resume=") for argument in arguments)
        return invoke(tmp_path, *([] if resumed else settings(base)), *arguments)

    yield run
    signal.signal(signal.SIGINT, handler)
    assert not shards()  # whatever the end, nobody is left


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunFolder]:
    """By number of processes, a comparison of all strategies."""
    root = tmp_path_factory.mktemp("whole")
    return {n: RunFolder(invoke(root, *settings(base), f"engine.dp={n}")) for n in (1, 2)}


def settings(base: Path) -> list[str]:
    return [
        f"pair.target={base / 'target'}",
        f"pair.draft={base / 'draft'}",
        "pair.device=cpu",
        "workload=file",
        f"workload.path={base / 'items.jsonl'}",
        "workload.max_new_tokens=12",
        f"engine.slots={TURN}",
        "engine.threads=1",
    ]


def by_strategy(folder: Path, metrics: list[str]) -> dict[str, Any]:
    return {
        name: {metric: values[metric] for metric in metrics}
        for name, values in RunFolder.open(folder).strategies().items()
    }


def counts(folder: Path, *without: str) -> dict[str, Any]:
    return by_strategy(folder, [name for name in COUNTS if name not in without])


def rows(frame: pd.DataFrame, *without: str) -> pd.DataFrame:
    """The columns that tell no time, in an order of its own."""
    timed = [name for name in frame if str(name).endswith(("_us", "_ms"))]
    order = [name for name in ("strategy", "request", "step") if name in frame]
    return frame.drop(columns=[*timed, *without]).sort_values(order, ignore_index=True)


def assert_equal(two: RunFolder, one: RunFolder) -> None:
    """All that is written of two runs is the same, but for times and the names of ticks."""
    assert list(two.strategies()) == list(one.strategies())
    assert counts(two.path) == counts(one.path)
    intervals = [name for name in METRICS if name.startswith(("accept_rate", "mean_accept"))]
    assert by_strategy(two.path, intervals) == by_strategy(one.path, intervals)
    pd.testing.assert_frame_equal(rows(two.requests()), rows(one.requests()))
    pd.testing.assert_frame_equal(rows(two.steps(), "tick"), rows(one.steps(), "tick"))
    assert two.tokens() == one.tokens()
    assert {path.name for path in two.path.iterdir()} == {path.name for path in one.path.iterdir()}


def test_two_processes_count_and_write_what_one_does(whole: dict[int, RunFolder]) -> None:
    assert set(whole[1].strategies()) == set(strategies.registry())
    assert_equal(whole[2], whole[1])


def test_two_processes_draw_what_one_does(harness: Harness) -> None:
    law = ("sampling=temperature", "seed=3", "compare=[vllm,llamacpp]")
    one, two = (RunFolder(harness(*law, f"engine.dp={count}")) for count in (1, 2))
    assert_equal(two, one)


def test_rows_are_in_the_order_of_the_strategies_and_the_workload(
    whole: dict[int, RunFolder],
) -> None:
    requests = whole[2].requests()
    named = list(zip(requests.strategy, requests.request, strict=True))
    assert named == [(name, item["id"]) for name in strategies.registry() for item in ITEMS]


def test_the_manifest_tells_what_each_process_did(whole: dict[int, RunFolder]) -> None:
    folder, manifest = whole[2], whole[2].manifest()
    assert manifest["setup"]["dp"] == manifest["engine"]["dp"] == 2
    assert manifest["setup"]["device"] == "cpu"
    first, second = manifest["engine"]["workers"]
    assert first["items"] == len(FIRST_SHARD)
    assert first["items"] + second["items"] == len(ITEMS)
    tokens = folder.requests().groupby("strategy").output_tokens.sum()
    for name, tok_s in manifest["engine"]["tok_s"].items():
        slowest = max(worker["seconds"][name] for worker in (first, second))
        assert tok_s == pytest.approx(tokens[name] / slowest)
        assert tok_s > folder.strategies()[name]["tok_s"]  # which is that of one process


def test_a_strategy_alone_is_dealt_out_by_requests_unless_it_has_turns(harness: Harness) -> None:
    alone = ("+strategy=vllm", "workload.limit=6")
    one, two = (harness(*alone, f"engine.dp={count}") for count in (1, 2))
    assert counts(two, *OF_BATCHES) == counts(one, *OF_BATCHES)
    one, two = (harness(*alone, "engine.turn=2", f"engine.dp={count}") for count in (1, 2))
    assert counts(two) == counts(one)


def test_more_processes_than_requests_are_idle(harness: Harness) -> None:
    several = RunFolder(harness("engine.dp=3", "workload.limit=2", "compare=[plain,vllm]"))
    assert len(several.requests()) == 4
    assert 0 in [worker["items"] for worker in several.manifest()["engine"]["workers"]]
    assert several.requests().output_tokens.sum() > 0


def on_entry(
    monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None], shard: int
) -> None:
    """Do something when ``shard`` has ended its request of this number."""
    left = iter(range(number - 1, -1, -1))
    merge = data_parallel.merge

    def watched(entry: Any, part: Shard, recorder: Recorder) -> None:
        merge(entry, part, recorder)
        if part.index == shard and next(left, None) == 0:
            act()

    monkeypatch.setattr(data_parallel, "merge", watched)


def shards() -> list[BaseProcess]:
    """Living processes of data-parallel runs; other libraries keep some of their own."""
    return [each for each in multiprocessing.active_children() if each.name.startswith("shard ")]


def kill_second() -> None:
    (second,) = (each for each in shards() if each.name == "shard 1")
    assert second.pid is not None
    os.kill(second.pid, signal.SIGKILL)


def ended(harness: Harness, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and last line of a run that does not come to its end."""
    with pytest.raises(SystemExit) as exit_:
        harness(*arguments)
    printed = capsys.readouterr().err
    (line,) = [each for each in printed.splitlines() if each.startswith(("error: ", "interrupted"))]
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, line


def test_the_others_finish_when_a_process_dies_and_the_run_can_go_on(
    harness: Harness,
    whole: dict[int, RunFolder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        on_entry(patch, 1, kill_second, shard=1)
        status, line = ended(harness, capsys, "compare=[plain,vllm,sglang,trtllm]", "engine.dp=2")
    assert status == 2
    (folder,) = Path("runs").iterdir()
    run = RunFolder.open(folder)
    kept = run.requests()
    assert "shard 1 of 2: its process ended by SIGKILL" in line
    assert f"{len(kept)} finished requests are kept; continue with" in line
    assert f"resume={folder}" in line
    assert run.manifest()["state"] == "interrupted"
    assert set(zip(kept.strategy, kept.request, strict=True)) >= {
        (name, item) for name in ("plain", "vllm", "sglang", "trtllm") for item in FIRST_SHARD
    }
    assert len(kept) < 4 * len(ITEMS)
    harness(f"resume={folder}")
    assert run.manifest()["state"] == "finished"
    assert not run.journal_path.exists()
    undisturbed = counts(whole[1].path, *OF_BATCHES)  # but for the batch that was torn
    resumed = counts(folder, *OF_BATCHES)
    assert resumed == {name: undisturbed[name] for name in resumed}


def test_ctrl_c_ends_all_processes_and_leaves_a_readable_run_that_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        on_entry(patch, 4, lambda: signal.raise_signal(signal.SIGINT), shard=0)
        status, line = ended(harness, capsys, "compare=[plain,vllm]", "engine.dp=2")
    assert status == 130
    assert not shards()
    (folder,) = Path("runs").iterdir()
    kept = RunFolder.open(folder).requests()
    assert f"{len(kept)} finished requests are kept" in line
    assert 4 <= len(kept) < 2 * len(ITEMS)
    written: list[tuple[str, str]] = []
    append = Journal.append

    def watched(self: Journal, request: Any, steps: Any) -> None:
        written.append((request.strategy, request.request))
        append(self, request, steps)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", watched)
        harness(f"resume={folder}")
    assert not set(written) & set(zip(kept.strategy, kept.request, strict=True))
    assert len(written) + len(kept) == 2 * len(ITEMS)


class Broken(Plain):
    """Has a bug that one request brings to light."""

    name = "broken"

    def verify_rows(self, step: Step) -> None:
        if any(each.request.id == "choice-1" for each in step.sequences):
            raise RuntimeError("out of ideas\nand of words")
        super().verify_rows(step)


def test_a_process_that_fails_says_why_in_one_line(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "+strategy=tests.test_data_parallel:Broken"
    status, line = ended(harness, capsys, broken, "engine.turn=2", "engine.dp=2")
    assert status == 2
    assert "shard 0 of 2: RuntimeError: out of ideas:" in line
    (folder,) = Path("runs").iterdir()
    finished = set(RunFolder.open(folder).requests().request)
    assert finished >= {item["id"] for item in ITEMS} - set(FIRST_SHARD)


class Short(Plain):
    """Reads a file of its own, which ends too early."""

    name = "short"

    def verify_rows(self, step: Step) -> None:
        raise EOFError("my table is cut")


def test_a_strategy_whose_own_file_ends_is_no_line_that_ends(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = ended(harness, capsys, "+strategy=tests.test_data_parallel:Short", "engine.dp=2")
    assert status == 2
    assert "EOFError: my table is cut" in line


BAD_INPUT = {
    "no processes": (["engine.dp=0"], "engine.dp: 0 is below 1"),
    "a timeline of several": (["engine.dp=2", "engine.profile=true"], "engine.profile"),
    "a length that learns": (["engine.dp=2", "drafter.length=adaptive"], "drafter.length"),
    "what every process refuses": (["engine.dp=2", "pair.target=/nowhere"], "pair.target"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str, harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD_INPUT[case]
    status, line = ended(harness, capsys, *arguments)
    assert status == 2
    assert words in line
    assert "shard" not in line
    assert not list(Path().glob("runs/*"))


def test_each_process_has_a_cuda_device_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices("auto", 2) == devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert devices("cuda:1", 1) == ["cuda:1"]
    assert devices("cpu", 3) == ["cpu"] * 3
    with pytest.raises(ConfigError, match=r"engine\.dp: 3 processes need as many CUDA"):
        devices("auto", 3)
    with pytest.raises(ConfigError, match=r"pair\.device=cuda:1 names one"):
        devices("cuda:1", 2)


def test_processes_share_the_cores_where_no_number_of_threads_is_given() -> None:
    config = Config(pair=PairConfig("target"), engine=EngineConfig(dp=2))
    mine = share_of(config, "cuda:1")
    assert mine.pair.device == "cuda:1"
    assert mine.engine.threads == max(1, cores() // 2)
    assert mine.grammar.threads == max(1, cores() // 4)  # half of its cores (V1.6a)
    given = Config(pair=PairConfig("target"), engine=EngineConfig(dp=2, threads=7))
    assert share_of(given, "cpu").engine.threads == 7


def test_the_slowest_process_decides_how_fast_all_are() -> None:
    together = Throughput([4.0, 1.0], tokens=100)
    assert together.tok_s == 25
    assert together.balance == pytest.approx(0.625)
    assert Throughput([0.0, 0.0]).tok_s is None


def test_a_model_without_contention_loses_to_uneven_shards_alone() -> None:
    """Three turns of one token in 10 µs each: two processes take two, three take one."""
    steps = pd.DataFrame([verify("plain", name, tick, 1) for tick, name in enumerate("abc")])
    costs = Costs(plain_us=10.0, verify_us=10.0, chain_us=1.0)
    model = ScalingModel(costs, steps, ["a", "b", "c"], cores=8, cores_per_process=1.0)
    assert [model.tok_s(n)["plain"] for n in (1, 2, 3, 4)] == pytest.approx([1e5, 1.5e5, 3e5, 3e5])


def test_a_model_stretches_the_work_of_the_cpu_where_cores_are_short() -> None:
    costs = Costs(plain_us=10.0, verify_us=10.0, mask_us=2.0, host_us=1.0)
    model = ScalingModel(costs, pd.DataFrame(), [], cores=4, cores_per_process=1.0)
    assert [model.stretch(n) for n in (1, 4, 8)] == [1, 1, 2]
    on_a_gpu, on_a_cpu = (stretched(replace(costs, overlap=each), 2.0) for each in (True, False))
    assert (on_a_gpu.mask_us, on_a_gpu.host_us, on_a_gpu.plain_us) == (4, 2, 10)
    assert (on_a_cpu.mask_us, on_a_cpu.host_us, on_a_cpu.plain_us) == (4, 2, 20)


def test_the_scaling_study_decodes_the_same_on_any_number_of_processes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "CONTEXT", SERVER)
    settings = {
        "target": base / "target",
        "draft": base / "draft",
        "device": "cpu",
        "workload": "file",
        "path": base / "items.jsonl",
        "limit": 8,
        "slots": 2,
        "turns": 2,
        "passes": 1,
        "strategies": "plain,vllm",
        "beyond": 4,
        "out": tmp_path,
    }
    assert scaling.main([f"{name}={value}" for name, value in settings.items()]) == 0
    study = json.loads((tmp_path / "scaling.json").read_text())["slots_2"]
    for name in ("plain", "vllm"):
        one, two = study["measured"][name]
        assert (one["dp"], one["efficiency"], one["stretch"]) == (1, 1, 1)
        assert (two["dp"], two["same"]) == (2, 1)
        assert [line["dp"] for line in study["predicted"][name]] == [4]
    assert "Speed: 2 slots a process" in capsys.readouterr().out
    assert not shards()
