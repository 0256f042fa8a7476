from __future__ import annotations

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from harness.core import StepTrace, columns
from harness.errors import ConfigError
from harness.results.record import Recorder, RunFolder
from tests.results import request, tiny_run, verify


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest({})
    folder.write_summary({})
    folder.write_frames(*tiny_run())
    return folder


def test_frames_survive_parquet_with_their_lists_and_nulls(run):
    steps, requests = tiny_run()
    pd.testing.assert_frame_equal(run.steps(), steps)
    pd.testing.assert_frame_equal(run.requests(), requests)
    assert run.steps()["fill_us"].iloc[7].tolist() == [1.0, 2.0, 3.0]
    assert run.steps()["fill_us"].iloc[8].tolist() == []
    assert run.requests()["valid"].tolist() == [True, True, True, False, None]
    assert run.requests()["identical"].tolist() == [None] * 5
    assert run.requests()["divergence_gap"].isna().all()


def test_a_gap_that_is_a_number_survives_parquet_among_nulls(tmp_path):
    recorder = Recorder()
    recorder.requests += [
        request("vllm", "a", [1], identical=False, first_divergence=0, divergence_gap=0.25),
        request("vllm", "b", [1], identical=True),
    ]
    folder = RunFolder.create(tmp_path)
    folder.write_frames(*recorder.frames())
    table = pq.read_table(tmp_path / "requests.parquet")
    assert table["divergence_gap"].to_pylist() == [0.25, None]
    assert table["identical"].to_pylist() == [False, True]


def test_a_run_without_a_row_has_its_columns(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.write_frames(*Recorder().frames())
    assert list(folder.steps().columns) == list(columns(StepTrace))
    assert len(folder.steps()) == 0


def test_parquet_columns_carry_their_documentation(run):
    schema = pq.read_schema(run.path / "steps.parquet")
    assert schema.field("tick").metadata[b"doc"].decode() == columns(StepTrace)["tick"]


def test_the_summary_has_the_fixed_layout(run):
    run.write_summary({"vllm": {"accepted": 3, "accept_at": [0.5], "tok_s_ci": (1.0, 2.0)}})
    assert json.loads((run.path / "summary.json").read_text()) == {
        "schema_version": 1,
        "strategies": {"vllm": {"accepted": 3, "accept_at": [0.5], "tok_s_ci": [1.0, 2.0]}},
    }


def test_a_dated_folder_never_takes_the_place_of_another(tmp_path):
    first, second = RunFolder.dated(tmp_path, "cpu"), RunFolder.dated(tmp_path, "cpu")
    assert first.path != second.path
    assert second.path.name == f"{first.path.name}-2"
    assert first.path.name[4] == "-"
    assert first.path.name.endswith("-cpu")


@pytest.mark.parametrize("make", [RunFolder.create, lambda path: RunFolder.dated(path, "cpu")])
def test_a_folder_that_cannot_be_written_is_refused_when_made(tmp_path, make):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*; choose another"):
        make(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    "missing", ["manifest.json", "summary.json", "requests.parquet", "steps.parquet"]
)
def test_a_folder_without_one_of_its_files_is_no_run(run, missing):
    assert RunFolder.open(run.path) == run
    (run.path / missing).unlink()
    with pytest.raises(ConfigError, match=f"not a run folder: it has no {missing}"):
        RunFolder.open(run.path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema_version": 2}', "schema_version is 2"),
        ("[]", "not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_summary_of_another_version_is_refused(run, text, complaint):
    (run.path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        RunFolder.open(run.path)


READERS = {
    "steps.parquet": RunFolder.steps,
    "requests.parquet": RunFolder.requests,
    "manifest.json": RunFolder.manifest,
    "summary.json": RunFolder.strategies,
    "tokens.json": RunFolder.tokens,
    "config.yaml": RunFolder.config,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("damage", [b"\xff\xfe", b"{{:", b"\x00"])
def test_a_damaged_file_is_named_in_one_line(run, name, damage):
    (run.path / name).write_bytes(damage)
    with pytest.raises(ConfigError) as told:
        READERS[name](run)
    assert str(told.value).startswith(f"{run.path / name}: cannot be read (")
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["steps.parquet", "requests.parquet"])
def test_a_table_that_was_cut_short_is_named_in_one_line(run, name):
    whole = (run.path / name).read_bytes()
    for kept in (0, 5, len(whole) // 2):
        (run.path / name).write_bytes(whole[:kept])
        with pytest.raises(ConfigError, match=f"{name}: cannot be read .*; run it again"):
            READERS[name](run)


def test_a_config_without_settings_is_refused(run):
    (run.path / "config.yaml").write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="settings were expected there"):
        run.config()


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [("manifest.json", "{}", "versions"), ("summary.json", '{"schema_version": 1}', "strategies")],
)
def test_a_file_that_lacks_a_part_is_named_with_it(run, name, text, part):
    (run.path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}: it has no {part}"):
        READERS[name](run)


def test_rows_stay_in_the_order_in_which_they_happened():
    recorder = Recorder()
    recorder.steps += [verify("vllm", "b", 0, 1), verify("vllm", "a", 0, 1)]
    steps, _ = recorder.frames()
    assert steps["request"].tolist() == ["b", "a"]


def test_a_table_that_is_not_written_to_its_end_takes_no_ones_place(run, monkeypatch):
    def full(table, path):
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    steps, requests = tiny_run()
    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        run.write_frames(steps, requests)
    pd.testing.assert_frame_equal(run.steps(), steps)
    assert not list(run.path.glob(".*"))


def test_what_has_not_ended_is_in_no_table():
    recorder = Recorder()
    recorder.step(verify("vllm", "a", 0, 1))
    recorder.step(verify("vllm", "b", 0, 1))
    recorder.finished(request("vllm", "a", [1]))
    steps, requests = recorder.frames()
    assert steps["request"].tolist() == requests["request"].tolist() == ["a"]
