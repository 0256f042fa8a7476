"""Tracked runs, read back with MLflow's own client and from W&B's offline file."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.results.manifest import flat
from harness.results.metrics import compare_with_plain, summarise
from harness.results.record import RunFolder
from harness.results.report import write_report
from harness.results.trackers import (
    EXIT_UNTRACKED,
    FILES,
    TrackerConfig,
    entries_of,
    find_tracker,
    main,
    numbers,
    track,
)
from tests.results import tiny_run

MANIFEST = {
    "date": "2025-01-02T03:04:05+00:00",
    "command": ["python", "-m", "harness", "workload.kinds=[json, regex]"],
    "versions": {"torch": "2.6.0", "triton": None},
    "hardware": {"cpu": "Toy CPU", "cores": 4, "memory_gib": 15.5, "gpu": None},
    "git": {"commit": "abc123", "dirty": True},
    "setup": {"pair": "toy+toy", "K": 4},
}

CONFIG = """\
strategy: ???
seed: 3
engine: {slots: 8}
workload: {kinds: [json, regex], path: null}
options: {vllm: {asynchronous: false}, sglang: {jump_forward: true}}
tracker: {kind: mlflow, server: 'http://tracker'}
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "2025-01-02-tiny")
    steps, requests = tiny_run()
    requests = compare_with_plain(requests)
    summary = summarise(steps, requests)
    summary["vllm"]["own"] = {"drafts": 3, "by_position": [2, 1]}
    folder.write_manifest(MANIFEST)
    folder.write_config(CONFIG)
    folder.write_frames(steps, requests)
    folder.write_summary(summary)
    write_report(folder)
    return folder


@pytest.fixture
def tracker(request: pytest.FixtureRequest, folder: RunFolder):
    pytest.importorskip(request.param)
    return find_tracker(TrackerConfig(request.param, "toys"), folder.path.parent)


class Broken:
    kind = "mlflow"

    def log(self, entries) -> None:
        raise ConnectionError("no route\nto host")


def test_a_strategy_is_tracked_with_its_own_options_and_the_run_s_setup(folder):
    plain, vllm = entries_of(folder)
    assert (plain.name, vllm.name) == ("2025-01-02-tiny/plain", "2025-01-02-tiny/vllm")
    assert vllm.params == {
        "strategy": "vllm",
        "seed": 3,
        "engine.slots": 8,
        "workload.kinds": ["json", "regex"],
        "workload.path": None,
        "options.asynchronous": False,
        "setup.pair": "toy+toy",
        "setup.K": 4,
    }
    assert plain.params == {
        name: "plain" if name == "strategy" else value
        for name, value in vllm.params.items()
        if name != "options.asynchronous"
    }


def test_tags_say_where_and_with_what(folder):
    assert entries_of(folder)[0].tags == {
        "date": "2025-01-02T03:04:05+00:00",
        "command": "python -m harness 'workload.kinds=[json, regex]'",
        "versions.torch": "2.6.0",
        "hardware.cpu": "Toy CPU",
        "hardware.cores": "4",
        "hardware.memory_gib": "15.5",
        "git.commit": "abc123",
        "git.dirty": "True",
    }


def test_a_run_from_before_there_were_trackers_is_tracked_all_the_same(folder):
    path = folder.path / "config.yaml"
    lines = [line for line in CONFIG.splitlines() if not line.startswith("tracker")]
    path.write_text("\n".join(lines))
    assert len(entries_of(folder)) == 2


def test_nested_mappings_get_dotted_names():
    assert flat({"a": {"b": {"c": 1}, "d": [2]}, "e": {}}) == {"a.b.c": 1, "a.d": [2]}


def test_metrics_are_numbers_and_what_is_missing_is_left_out():
    metrics = {
        "drafted": 7,
        "accept_rate": None,
        "accept_rate_ci": [0.25, 0.5],
        "tok_s_ratio_ci": None,
        "accept_at": [0.5, 0.25],
        "divergence_gap": math.inf,
        "own": {"rate": 0.5, "hist": [3]},
    }
    assert numbers(metrics) == {
        "drafted": 7.0,
        "accept_rate_ci_low": 0.25,
        "accept_rate_ci_high": 0.5,
        "accept_at_0": 0.5,
        "accept_at_1": 0.25,
        "own_rate": 0.5,
        "own_hist_0": 3.0,
    }


@pytest.mark.parametrize("tracker", ["mlflow"], indirect=True)
def test_mlflow_reads_back_what_was_tracked(tracker, folder, tmp_path):
    assert track(tracker, folder)
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri=(folder.path.parent / ".mlflow").as_uri())
    experiment = client.get_experiment_by_name("toys")
    runs = client.search_runs(
        [experiment.experiment_id], "tags.`group` = '2025-01-02-tiny'", order_by=["run_name"]
    )
    assert [run.data.params["strategy"] for run in runs] == ["plain", "vllm"]
    for run, entry in zip(runs, entries_of(folder), strict=True):
        assert run.info.status == "FINISHED"
        assert run.info.run_name == entry.name
        assert run.data.metrics == entry.metrics
        assert run.data.params == {name: str(value) for name, value in entry.params.items()}
        assert entry.tags.items() <= run.data.tags.items()
        files = client.list_artifacts(run.info.run_id)
        assert {file.path for file in files} == set(FILES)
        copy = client.download_artifacts(run.info.run_id, "report.md", str(tmp_path))
        assert Path(copy).read_text() == folder.report_path.read_text()


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_the_offline_files_of_wandb_hold_what_was_tracked(tracker, folder):
    assert track(tracker, folder)
    runs = sorted((folder.path.parent / ".wandb").glob("offline-run-*"))
    assert len(runs) == 2
    seen = {}
    for run in runs:
        records = list(wandb_records(next(run.glob("*.wandb"))))
        (started,) = (each.run for each in records if each.HasField("run"))
        (history,) = (each.history for each in records if each.HasField("history"))
        seen[started.display_name] = started, items(history.item), run / "files"
    for entry in entries_of(folder):
        started, logged, files = seen[entry.name]
        assert (started.project, started.run_group) == ("toys", "2025-01-02-tiny")
        config = items(started.config.update)
        config.pop("_wandb")
        assert config == {**entry.params, "manifest": entry.tags}
        assert {n: value for n, value in logged.items() if n[0] != "_"} == entry.metrics
        assert {path.name for path in files.iterdir() if not path.is_symlink()} == set(FILES)
        assert (files / "report.md").read_text() == folder.report_path.read_text()


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_wandb_learns_no_name_of_the_user_or_the_host(tracker, folder):
    assert track(tracker, folder)
    for path in (folder.path.parent / ".wandb").glob("offline-run-*/*.wandb"):
        assert all(not record.run.host for record in wandb_records(path))


def wandb_records(path: Path) -> Iterator:
    """The records of an offline file, a log in LevelDB's format: blocks of 32 KiB, in them chunks
    with a checksum (4 bytes), a length (2) and a type (1: 1 whole, 2 first, 3 middle, 4 last)."""
    record_of = importlib.import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    data, at, parts = path.read_bytes(), 7, b""  # 7: W&B's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # padding
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record_of(parts)
            parts = b""


def items(pairs) -> dict:
    """Key and JSON value of W&B's records; a key is a word, or a path of one word."""
    return {pair.key or pair.nested_key[0]: json.loads(pair.value_json) for pair in pairs}


def test_a_failing_tracker_is_one_line_with_the_way_to_repeat_it(folder, capsys):
    assert not track(Broken(), folder)
    printed = capsys.readouterr().err
    assert printed == (
        f"warning: {folder.path} is written, but mlflow failed (no route to host); "
        f"repeat: python -m harness.results.trackers mlflow {folder.path}\n"
    )


def test_without_a_tracker_nothing_is_read_or_written(tmp_path):
    assert find_tracker(TrackerConfig(), tmp_path) is None
    assert track(None, RunFolder(tmp_path / "absent"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_missing_package_is_one_line_that_names_the_extra(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError) as error:
        find_tracker(TrackerConfig(kind), tmp_path)
    assert f"tracker={kind}: " in str(error.value)
    assert str(error.value).endswith(f"pip install 'grammar-draft-harness[{kind}]'")


@pytest.mark.parametrize(("kind", "server"), [("mlflow", "foo://x"), ("wandb", "no address")])
def test_an_address_that_cannot_be_one_is_refused(kind, server, tmp_path):
    pytest.importorskip(kind)
    with pytest.raises(ConfigError) as error:
        find_tracker(TrackerConfig(kind, server=server), tmp_path)
    assert str(error.value).startswith(f"tracker.server={server}: ")
    assert "\n" not in str(error.value)


def test_an_unknown_tracker_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"tracker\.kind: 'tensorboard' is none of none, mlflow"):
        TrackerConfig("tensorboard")


def test_the_command_tracks_recorded_runs(folder, capsys):
    mlflow = pytest.importorskip("mlflow")
    assert main(["mlflow", str(folder.path), "--project", "later"]) == 0
    client = mlflow.MlflowClient(tracking_uri=(folder.path.parent / ".mlflow").as_uri())
    assert len(client.search_runs([client.get_experiment_by_name("later").experiment_id])) == 2
    assert capsys.readouterr().err == ""


def test_the_command_refuses_what_is_no_run_and_says_what_failed(folder, tmp_path, monkeypatch):
    assert main(["mlflow", str(tmp_path)]) == 2
    monkeypatch.setattr("harness.results.trackers.find_tracker", lambda *_: Broken())
    assert main(["mlflow", str(folder.path)]) == EXIT_UNTRACKED
