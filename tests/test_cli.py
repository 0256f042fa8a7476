"""The command line on a pair of the user's own: run folders, sweeps, and one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import strategies
from harness.cli import main
from harness.results.schema import METRICS
from harness.results.trackers import EXIT_UNTRACKED, Entry
from tests.tiny_pair import save_pair

ITEMS = [
    {"id": "digits", "prompt": "A number?", "regex": "[0-9]{2,4}"},
    {"id": "yes", "prompt": "Yes or no?", "choice": ["yes", "no"]},
    {"id": "free", "prompt": "Say something."},
    {
        "id": "object",
        "prompt": "A pet?",
        "json_schema": {
            "type": "object",
            "properties": {"cat": {"type": "boolean"}, "age": {"enum": [1, 2, 10]}},
            "required": ["cat", "age"],
            "additionalProperties": False,
        },
    },
]

Invoke = Callable[..., Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def invoke(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Path]]:
    """Run ``python -m harness`` with the tiny pair in this process; returns the run folders."""
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> list[Path]:
        base = {
            "pair.target": str(pair[0]),
            "pair.draft": str(pair[1]),
            "pair.device": "cpu",
            "workload": "file",
            "workload.path": str(tmp_path / "items.jsonl"),
            "workload.max_new_tokens": "20",
        }
        given = {argument.split("=")[0] for argument in arguments}
        defaults = [f"{key}={value}" for key, value in base.items() if key not in given]
        monkeypatch.setattr(sys, "argv", ["harness", *arguments, *defaults])
        main()
        return sorted((tmp_path / "runs").iterdir())

    return run


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["schema_version"] == 1
    strategies_: dict[str, Any] = summary["strategies"]
    return strategies_


def test_a_comparison_runs_every_strategy_and_explains_itself(
    invoke: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = invoke()
    names = set(strategies.registry())
    summary = summary_of(folder)
    assert set(summary) == names
    assert all(set(METRICS) <= set(metrics) for metrics in summary.values())
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "manifest.json",
        "report.md",
        "requests.parquet",
        "steps.parquet",
        "summary.json",
        "tokens.json",
    }
    requests = pd.read_parquet(folder / "requests.parquet")
    assert len(requests) == len(names) * len(ITEMS)
    assert not requests.error.any()
    lossless = requests[~requests.strategy.isin(["unguided", "sglang"])]
    assert lossless.identical.all()
    constrained = requests[(requests.strategy != "unguided") & requests.complete]
    assert constrained.valid.dropna().all()
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_one_strategy_runs_alone(invoke: Callable[..., list[Path]]) -> None:
    (folder,) = invoke("+strategy=trtllm", "grammar=llguidance", "sampling=temperature")
    assert list(summary_of(folder)) == ["trtllm"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["command"]


def test_auto_records_the_engine_of_each_request(
    invoke: Callable[..., list[Path]], tmp_path: Path
) -> None:
    schemas: dict[str, Any] = {
        "xgrammar": {"enum": [1, 2]},
        "llguidance": {"type": "number", "multipleOf": 3, "minimum": 0, "maximum": 9},
    }
    items = [{"id": name, "prompt": "?", "json_schema": each} for name, each in schemas.items()]
    (tmp_path / "schemas.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder,) = invoke(
        "+strategy=vllm",
        "grammar=auto",
        "grammar.ahead=false",
        f"workload.path={tmp_path / 'schemas.jsonl'}",
    )
    requests = pd.read_parquet(folder / "requests.parquet").set_index("request")
    assert requests.engine.to_dict() == {name: name for name in schemas}


def test_static_shapes_give_the_tokens_of_the_eager_engine(
    invoke: Callable[..., list[Path]],
) -> None:
    invoke("engine=eager", "name=eager")
    eager, static = (
        pd.read_parquet(folder / "requests.parquet")
        for folder in invoke("engine.mode=graphs", "name=static")
    )
    assert [list(ids) for ids in eager.output_ids] == [list(ids) for ids in static.output_ids]
    assert len(static) == len(eager)  # the warm-up left no rows


def test_a_sweep_runs_each_combination(invoke: Callable[..., list[Path]]) -> None:
    (sweep,) = invoke("-m", "+strategy=vllm,trtllm", "grammar=xgrammar,llguidance")
    folders = [sweep / f"{sweep.name}-{number}" for number in range(4)]
    assert sorted(name for folder in folders for name in summary_of(folder)) == [
        "trtllm",
        "trtllm",
        "vllm",
        "vllm",
    ]


def test_a_sweep_over_drafters_compares_the_strategies_that_each_can_serve(
    invoke: Callable[..., list[Path]],
) -> None:
    (sweep,) = invoke("-m", "drafter=model,ngram,random")
    by_drafter = {
        json.loads(manifest.read_text())["setup"]["drafter"]: manifest.parent
        for manifest in sweep.glob("*/manifest.json")
    }
    every = set(strategies.registry())
    assert set(summary_of(by_drafter["model"])) == every
    for name in ("ngram", "random"):
        summary = summary_of(by_drafter[name])
        assert set(summary) == every - {"trtllm"}
        assert all(metrics["draft_forwards"] == 0 for metrics in summary.values())
        requests = pd.read_parquet(by_drafter[name] / "requests.parquet")
        assert requests[~requests.strategy.isin(["unguided", "sglang"])].identical.all()


def test_no_draft_model_is_loaded_that_nobody_uses(
    invoke: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    invoke("drafter=grammar", "compare=[plain,vllm]", "pair.draft=/nowhere")
    invoke("+strategy=plain", "pair.draft=/nowhere")
    with pytest.raises(SystemExit):
        invoke("drafter=chain", "+strategy=vllm", "pair.draft=/nowhere")
    assert "pair.draft" in capsys.readouterr().err


def test_an_oracle_replays_the_plain_of_another_run(invoke: Callable[..., list[Path]]) -> None:
    (reference,) = invoke("+strategy=plain", "name=reference")
    oracle = ["drafter=oracle", f"drafter.reference={reference}", "drafter.rate=1"]
    folder = invoke("compare=[vllm,llamacpp]", "name=replay", *oracle)[-1]
    summary = summary_of(folder)
    assert all(metrics["accept_rate"] == 1 for metrics in summary.values())


def test_the_costs_of_an_adaptive_length_make_a_run_that_can_be_repeated(
    invoke: Callable[..., list[Path]],
) -> None:
    asked = ["+strategy=vllm", "drafter.length=adaptive"]
    (first,) = invoke(*asked, "name=first")
    costs = json.loads((first / "manifest.json").read_text())["engine"]["step_costs"]
    given = [f"drafter.{name}={value}" for name, value in costs.items()]
    again = invoke(*asked, *given, "name=second")[-1]
    assert json.loads((again / "manifest.json").read_text())["engine"]["step_costs"] == costs
    one, other = (pd.read_parquet(folder / "steps.parquet") for folder in (first, again))
    assert one.drafted_raw.tolist() == other.drafted_raw.tolist()


def test_an_option_of_a_strategy_changes_what_it_does(invoke: Callable[..., list[Path]]) -> None:
    (folder,) = invoke("+strategy=vllm", "options.vllm.asynchronous=true")
    steps = pd.read_parquet(folder / "steps.parquet")
    assert any(-1 in drafts for drafts in steps.draft_ids)


def test_a_bad_item_fails_alone_with_its_reason(
    invoke: Callable[..., list[Path]], tmp_path: Path
) -> None:
    bad = [
        {"id": "schema", "prompt": "?", "json_schema": {"type": "objekt"}},
        {"id": "empty", "prompt": "?", "choice": []},
        {"id": "blank", "prompt": "?", "ebnf": "  "},
        {"id": "nul", "prompt": "?", "regex": "a\u0000"},
        {"id": "long", "prompt": "x" * 600, "regex": "a"},
        {"id": "syntax", "prompt": "?", "regex": "(a"},
    ]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, [*bad, *ITEMS])))
    (folder,) = invoke("+strategy=vllm", f"workload.path={tmp_path / 'mixed.jsonl'}")
    requests = pd.read_parquet(folder / "requests.parquet").set_index("request")
    assert len(requests) == len(bad) + len(ITEMS)
    assert all(requests.loc[item["id"]].error for item in bad)
    assert all(requests.loc[item["id"]].finish == "failed" for item in bad)
    assert not any(requests.loc[item["id"]].error for item in ITEMS)
    assert "engine.max_length" in requests.loc["long"].error


BAD_INPUT = {
    "strategy": (["+strategy=vlm"], ["strategy", "trtllm"]),
    "strategy of the user's": (["+strategy=nowhere:Nothing"], ["strategy", "nowhere"]),
    "option of nobody": (
        ["options.mine.drafts=3"],
        ["options.mine.drafts", "+options.mine.drafts"],
    ),
    "name of several folders": (["name=../x"], ["name: '../x'", "runs=…"]),
    "group option": (["grammar=outline"], ["grammar/outline", "xgrammar"]),
    "unknown key": (["engine.slot=3"], ["engine.slot: no such setting", "--cfg job"]),
    "type": (["engine.slots=many"], ["engine.slots", "Integer"]),
    "slots": (["engine.slots=0"], ["engine.slots"]),
    "no drafts": (["engine.draft_tokens=0"], ["engine.draft_tokens"]),
    "more drafts than context": (["engine.draft_tokens=600"], ["engine.draft_tokens"]),
    "context": (["engine.max_length=100000"], ["engine.max_length"]),
    "strategy named twice": (["compare=[vllm,vllm]"], ["compare"]),
    "strategies of one name": (
        ["compare=[vllm,tests.strategies.test_registry:Mine]"],
        ["strategy: strategies.vllm:Vllm", "'vllm'", "rename"],
    ),
    "time that is none": (["grammar.timeout_s=nan"], ["grammar.timeout_s"]),
    "engine": (["engine.mode=fast"], ["engine.mode"]),
    "whitespace": (["grammar.whitespace=some"], ["grammar.whitespace"]),
    "strategy option": (
        ["+strategy=vllm", "options.vllm.n_min=1"],
        ["options.vllm.n_min: no such"],
    ),
    "strategy option's value": (
        ["+strategy=llamacpp", "options.llamacpp.p_min=2"],
        ["options.llamacpp.p_min"],
    ),
    "drafter": (["drafter=medusa"], ["drafter/medusa", "ngram"]),
    "drafter's range": (["drafter=ngram", "drafter.min_n=9"], ["drafter.min_n", "drafter.max_n"]),
    "drafter without logits": (
        ["+strategy=trtllm", "drafter=ngram", "pair.target=/nowhere"],
        ["drafter.name", "strategy trtllm", "drafter=model"],
    ),
    "drafter without runners-up": (
        ["compare=[plain,sglang]", "drafter=chain", "options.sglang.tree_width=2"],
        ["drafter.name", "options.sglang.tree_width"],
    ),
    "drafter without probabilities": (
        ["+strategy=llamacpp", "drafter=grammar", "options.llamacpp.p_min=0.3"],
        ["drafter.name", "options.llamacpp.p_min"],
    ),
    "length without probabilities": (
        ["drafter=oracle", "drafter.reference=r", "drafter.length=p_min"],
        ["drafter.length", "drafter=model"],
    ),
    "length": (["drafter.length=long"], ["drafter.length", "adaptive"]),
    "cost": (["drafter.length=adaptive", "drafter.verify_ms=0"], ["drafter.verify_ms"]),
    "oracle without reference": (["drafter=oracle"], ["drafter.reference"]),
    "oracle's reference": (
        ["drafter=oracle", "drafter.reference=/nowhere", "pair.target=/nowhere"],
        ["/nowhere is not a run folder"],
    ),
    "oracle of samples": (
        ["drafter=oracle", "drafter.reference=r", "sampling=temperature"],
        ["drafter.name", "sampling.temperature"],
    ),
    "target folder": (["pair.target=/nowhere"], ["pair.target"]),
    "no draft": (["+strategy=vllm", "pair.draft=null"], ["pair.draft"]),
    "device": (["pair.device=tpu"], ["pair.device"]),
    "workload file": (["workload.path=/nowhere.jsonl"], ["workload.path"]),
    "temperature": (["sampling.temperature=-1"], ["sampling.temperature"]),
    "tracker": (["tracker=tensorboard"], ["tracker/tensorboard", "mlflow"]),
    "tracker's server": (["tracker=mlflow", "tracker.server=foo://x"], ["tracker"]),
    "run folder": (["runs=/proc/runs"], ["/proc/runs"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_status_2(
    case: str, invoke: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD_INPUT[case]
    with pytest.raises(SystemExit) as exit_:
        invoke(*arguments)
    assert exit_.value.code == 2
    assert not list(Path().glob("runs/*"))  # a start that failed leaves nothing
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in printed.err
    assert all(word in lines[0] for word in words), lines[0]


def test_a_device_without_room_is_one_line_that_names_the_settings(
    invoke: Callable[..., list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 8 GiB"
        )

    monkeypatch.setattr("harness.models.causal_lm.CausalLM.forward", full)
    with pytest.raises(SystemExit) as exit_:
        invoke("+strategy=plain")
    assert exit_.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert "Tried to allocate 9.00 GiB. Lower engine.slots or engine.max_length" in line
    assert not list(Path().glob("runs/*"))


class FailingTracker:
    """Takes every strategy but ``vllm``."""

    kind = "mlflow"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def log(self, entries: Sequence[Entry]) -> None:
        self.seen += [entry.strategy for entry in entries]
        if self.seen[-1] == "vllm":
            raise ConnectionError("no route to host")


def test_a_tracker_that_fails_loses_no_run_ends_no_sweep_and_is_said_last(
    invoke: Callable[..., list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = FailingTracker()
    monkeypatch.setattr("harness.cli.find_tracker", lambda *_: tracker)
    with pytest.raises(SystemExit) as exit_:
        invoke("-m", "+strategy=vllm,plain", "workload.limit=1")
    assert exit_.value.code == EXIT_UNTRACKED
    assert tracker.seen == ["vllm", "plain"]
    (sweep,) = (tmp_path / "runs").iterdir()
    folders = [sweep / f"{sweep.name}-{number}" for number in range(2)]
    assert [list(summary_of(folder)) for folder in folders] == [["vllm"], ["plain"]]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert len(warnings) == 1
    assert "no route to host" in warnings[0]


def test_a_missing_tracker_stops_a_run_before_its_models_load(
    invoke: Callable[..., list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as exit_:
        invoke("tracker=wandb", "pair.target=/nowhere")
    assert exit_.value.code == 2
    assert "pip install 'grammar-draft-harness[wandb]'" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


def test_pairs_of_different_vocabularies_are_refused_with_the_first_difference(
    invoke: Callable[..., list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = save_pair(tmp_path / "unlike", draft_words=("the",))
    with pytest.raises(SystemExit):
        invoke(f"pair.target={target}", f"pair.draft={draft}")
    assert "token 256 is 'the'" in capsys.readouterr().err


def test_a_workload_of_which_nothing_can_be_served_is_an_error(
    invoke: Callable[..., list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"id": "a", "prompt": "x" * 600}))
    with pytest.raises(SystemExit) as exit_:
        invoke("+strategy=plain", f"workload.path={tmp_path / 'bad.jsonl'}")
    assert exit_.value.code == 2
    assert "exceed the context" in capsys.readouterr().err
