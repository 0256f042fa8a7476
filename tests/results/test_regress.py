"""The regression table: what fails, what does not, and what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strategies
from harness.results.baseline import BETTER, Better, Snapshot
from harness.results.metrics import compare_with_plain, summarise
from harness.results.record import RunFolder
from harness.results.regress import Finding, differences, main
from harness.results.schema import METRICS, SCHEMA_VERSION
from tests.results import tiny_run

BASELINE = Path(__file__).parents[1] / "baseline" / "smoke.json"

MANIFEST: dict[str, Any] = {
    "versions": {"torch": "2.6.0"},
    "hardware": {"cpu": "Toy CPU"},
    "setup": {"pair": "toy+tiny", "dtype": "float32", "device": "cpu", "slots": 8, "K": 4},
}

CONFIG = """\
seed: 0
runs: /home/someone/runs
workload: {name: file, path: /home/someone/items.jsonl, limit: 8}
sampling: {temperature: 0.0}
engine: {max_length: 0, turn: 0, threads: 0}
options: {plain: {}, vllm: {asynchronous: false}}
"""

Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Write a run folder: the tiny run's, changed as told."""

    def write(
        name: str,
        plant: Callable[[dict[str, Any]], None] = lambda summary: None,
        config: str = CONFIG,
        manifest: dict[str, Any] = MANIFEST,
    ) -> Path:
        folder = RunFolder.create(tmp_path / name)
        steps, requests = tiny_run()
        requests = compare_with_plain(requests)
        summary = summarise(steps, requests)
        plant(summary)
        folder.write_config(config)
        folder.write_manifest(manifest)
        folder.write_frames(steps, requests)
        folder.write_summary(summary)
        return folder.path

    return write


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Give ``vllm`` these values."""
    return lambda summary: summary["vllm"].update(values)


def one_more_rollback_per_step(summary: dict[str, Any]) -> None:
    metrics = summary["vllm"]
    for name in ("rollback_calls", "rollback_preview_calls"):
        metrics[name] += metrics["verify_steps"]


def one_percent_fewer_accepted(summary: dict[str, Any]) -> None:
    summary["vllm"]["accept_rate"] *= 0.99


def an_output_no_longer_valid(summary: dict[str, Any]) -> None:
    summary["plain"]["valid"] = 0.5


def test_runs_with_equal_counts_pass(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(record("a")), str(record("b"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# No regression: {len(BETTER)} counts of 2 strategies are equal\n")
    assert "## Counts" not in out


@pytest.mark.parametrize(
    ("plant", "row"),
    [
        (one_percent_fewer_accepted, "| vllm | accept_rate | 0.428571 | 0.424286 | regression |"),
        (one_more_rollback_per_step, "| vllm | rollback_calls | 3 | 6 | regression |"),
        (an_output_no_longer_valid, "| plain | valid | 1 | 0.5 | regression |"),
    ],
)
def test_a_planted_regression_is_exit_status_1_and_leads_the_report(
    plant: Callable[[dict[str, Any]], None],
    row: str,
    record: Record,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(record("a")), str(record("b", plant))]) == 1
    out = capsys.readouterr().out
    assert out.startswith("# Regression: ")
    assert row in out
    assert "make baseline" in out


@pytest.mark.parametrize("metric", [name for name in BETTER if BETTER[name] is not Better.NEITHER])
def test_each_directed_metric_regresses_one_way_and_improves_the_other(
    metric: str, record: Record
) -> None:
    before = Snapshot.read(record("a", change(**{metric: 0.5})))
    worse, better = (0.4, 0.6) if BETTER[metric] is Better.HIGHER else (0.6, 0.4)
    found = {
        value: differences(before, Snapshot.read(record("b", change(**{metric: value}))))
        for value in (worse, better)
    }
    assert [each.finding for each in found[worse]] == [Finding.REGRESSION]
    assert [each.finding for each in found[better]] == [Finding.IMPROVEMENT]


def test_a_value_that_is_gone_is_a_regression_and_a_new_one_a_change(record: Record) -> None:
    there, gone = record("a"), record("b", change(accept_rate=None))
    for before, after, finding in (
        (there, gone, Finding.REGRESSION),
        (gone, there, Finding.CHANGE),
    ):
        (each,) = differences(Snapshot.read(before), Snapshot.read(after))
        assert each.finding is finding


def test_improvements_pass_and_ask_to_renew_the_baseline(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    improved = change(accept_rate=0.5, accepted=4, rollback_calls=2)
    assert main([str(record("a")), str(record("b", improved))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# No regression, but renew the baseline: 2 × improvement, 1 × change\n")
    assert "- accepted: verified drafts that were emitted; neither is better" in out


def test_regressions_are_listed_before_improvements_and_changes(record: Record) -> None:
    mixed = change(accept_rate=0.9, accepted=9, mask_rows=99)
    found = differences(Snapshot.read(record("a")), Snapshot.read(record("b", mixed)))
    assert [each.metric for each in found] == ["mask_rows", "accept_rate", "accepted"]


def test_the_last_bit_of_a_ratio_is_no_difference(record: Record) -> None:
    almost = change(accept_rate=3 / 7 * (1 + 2e-16))
    assert not differences(Snapshot.read(record("a")), Snapshot.read(record("b", almost)))


def test_other_versions_are_named_beside_a_difference(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = {**MANIFEST, "versions": {"torch": "2.7.0"}}
    assert main([str(record("a")), str(record("b", change(failed=2), manifest=newer))]) == 1
    assert "made elsewhere: torch 2.6.0 → 2.7.0. " in capsys.readouterr().out


# Times


def slower(summary: dict[str, Any]) -> None:
    change(tok_s_ratio=0.5, tok_s_ratio_ci=(0.4, 0.6))(summary)


def faster(summary: dict[str, Any]) -> None:
    change(tok_s_ratio=9.0, tok_s_ratio_ci=(8.0, 9.9))(summary)


def noisy(summary: dict[str, Any]) -> None:
    """Another run of the same commit on a busier machine: every time moves."""
    for metrics in summary.values():
        for name in METRICS.keys() - BETTER.keys():
            if isinstance(metrics[name], float):
                metrics[name] *= 1.3
    change(tok_s_ratio_ci=(1.0, 1.2))(summary)


def quiet(summary: dict[str, Any]) -> None:
    change(tok_s_ratio=1.0, tok_s_ratio_ci=(0.9, 1.1))(summary)


def test_noise_between_two_runs_of_a_commit_is_no_regression(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = record("a", quiet), record("b", noisy)
    assert main([str(a), str(b), "--gate-times"]) == 0
    assert "| vllm | 0.90–1.10 | 1.00–1.20 | noise |" in capsys.readouterr().out


def test_times_fail_only_when_asked_to(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(record("a", quiet)), str(record("b", slower))]
    assert main(paths) == 0
    assert "| vllm | 0.90–1.10 | 0.40–0.60 | slower |" in capsys.readouterr().out
    assert main([*paths, "--gate-times"]) == 1
    assert capsys.readouterr().out.startswith("# Regression: slower: vllm\n")


def test_a_faster_run_passes(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(record("a", quiet)), str(record("b", faster)), "--gate-times"]) == 0
    assert "| faster |" in capsys.readouterr().out


def test_repeats_widen_the_interval(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(record("b", slower)), str(record("c", quiet))]
    assert main([str(record("a", quiet)), *runs, "--gate-times"]) == 0
    assert "| vllm | 0.90–1.10 | 0.40–1.10 | noise |" in capsys.readouterr().out


# What cannot be compared


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda summary: summary.pop(name)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a comparison ends in."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIG.replace("seed: 0", "seed: 1"), "seed is 0 in the baseline and 1 in the run"),
        (CONFIG.replace("limit: 8", "limit: 9"), "workload.limit is 8"),
        (CONFIG.replace("items.jsonl", "other.jsonl"), "workload.path is 'items.jsonl'"),
        (CONFIG.replace("temperature: 0.0", "temperature: 1.0"), "sampling.temperature is 0.0"),
        (CONFIG.replace("turn: 0", "turn: 1"), "engine.turn is 0"),
        (CONFIG.replace("asynchronous: false", "asynchronous: true"), "options.vllm.asynchronous"),
    ],
)
def test_another_setting_is_refused_by_name(
    config: str, reason: str, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal([str(record("a")), str(record("b", config=config))], capsys)
    assert f"not comparable: {reason}" in line


@pytest.mark.parametrize("name", ["pair", "dtype", "device", "slots", "K"])
def test_another_setup_is_refused_by_name(
    name: str, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = {**MANIFEST, "setup": {**MANIFEST["setup"], name: "other"}}
    line = refusal([str(record("a")), str(record("b", manifest=manifest))], capsys)
    assert f"not comparable: {name} is " in line


@pytest.mark.parametrize(
    "config",
    [
        CONFIG.replace("/home/someone", "/srv"),
        CONFIG.replace("threads: 0", "threads: 2"),
        CONFIG.replace("asynchronous: false", "asynchronous: false, added_since: 1"),
    ],
)
def test_what_decides_no_count_may_differ(config: str, record: Record) -> None:
    assert main([str(record("a")), str(record("b", config=config))]) == 0


def test_runs_of_unlike_strategies_are_refused(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal([str(record("a")), str(record("b", without("vllm")))], capsys)
    assert "only one of the two has vllm" in line


def test_runs_without_plain_are_refused(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [str(record(name, without("plain"))) for name in "ab"]
    assert "there is no plain" in refusal(alone, capsys)


def test_a_baseline_older_than_a_metric_is_refused(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    old = record("a", lambda summary: summary["vllm"].pop("mask_rows"))
    assert "vllm has no mask_rows in one of the two" in refusal(
        [str(old), str(record("b"))], capsys
    )


def test_another_schema_version_is_refused(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, baseline = record("a"), tmp_path / "baseline.json"
    main(["--renew", str(baseline), str(run)])
    values = {**json.loads(baseline.read_text()), "schema_version": SCHEMA_VERSION + 1}
    baseline.write_text(json.dumps(values))
    line = refusal([str(baseline), str(run)], capsys)
    assert f"schema_version is {SCHEMA_VERSION + 1}" in line
    (run / "summary.json").write_text('{"schema_version": 2}')
    assert "schema_version is 2" in refusal([str(record("b")), str(run)], capsys)


def test_repeats_of_unlike_counts_are_refused(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(record("b")), str(record("c", change(failed=2)))]
    assert "failed of vllm is 2, not 1" in refusal([str(record("a")), *runs], capsys)


def test_gating_times_needs_a_baseline_that_has_them(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, baseline = str(record("a")), str(tmp_path / "baseline.json")
    main(["--renew", baseline, run])
    assert "has no times" in refusal([baseline, run, "--gate-times"], capsys)


UNLIKE = json.dumps(
    {"schema_version": SCHEMA_VERSION, "settings": [], "made_with": {}, "strategies": None}
)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"strategies": {}}', UNLIKE])
def test_a_file_that_is_no_baseline_is_one_line(
    text: str, record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "baseline.json").write_text(text)
    line = refusal([str(tmp_path / "baseline.json"), str(record("a"))], capsys)
    assert "not a baseline" in line


def test_bad_paths_are_one_line(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, nowhere = record("a"), str(tmp_path / "nowhere")
    assert "not a run folder" in refusal([nowhere, str(run)], capsys)
    assert "not a run folder" in refusal([str(run), nowhere], capsys)
    assert "cannot be written" in refusal(["--renew", f"{nowhere}/x.json", str(run)], capsys)
    (run / "config.yaml").unlink()
    assert "settings are incomplete" in refusal([str(run), str(record("b"))], capsys)


# The baseline's file


def test_a_renewed_baseline_equals_its_run_and_holds_no_time_and_no_folder(
    record: Record, tmp_path: Path
) -> None:
    run, baseline = record("a"), tmp_path / "baseline.json"
    assert main(["--renew", str(baseline), str(run)]) == 0
    assert main([str(baseline), str(run)]) == 0
    assert all(set(each) == set(BETTER) for each in Snapshot.read(baseline).strategies.values())
    text = baseline.read_text()
    assert "/home" not in text
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def test_renewing_from_a_run_that_differs_only_in_times_changes_nothing(
    record: Record, tmp_path: Path
) -> None:
    baseline = tmp_path / "baseline.json"
    texts = []
    for run in (record("a"), record("b", noisy)):
        main(["--renew", str(baseline), str(run)])
        texts.append(baseline.read_text())
    assert texts[0] == texts[1]


def test_a_regression_against_the_file_is_caught(record: Record, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    main(["--renew", str(baseline), str(record("a"))])
    assert main([str(baseline), str(record("b", one_more_rollback_per_step))]) == 1


def test_the_committed_baseline_has_every_strategy_and_every_count() -> None:
    baseline = Snapshot.read(BASELINE)
    assert set(baseline.strategies) == set(strategies.registry())
    assert all(set(metrics) == set(BETTER) for metrics in baseline.strategies.values())
    assert baseline.settings["dtype"] == "float32"
    assert not differences(baseline, baseline)


def test_every_metric_is_compared_or_measured() -> None:
    """A new metric has to be put into ``BETTER``, or be a time or an interval."""
    measured = {name for name in METRICS if name.endswith(("_us", "_ms", "_ci"))}
    measured |= {"fill_us_p50", "fill_us_p99", "tok_s", "tok_s_ratio", "divergence_gap"}
    assert METRICS.keys() - BETTER.keys() == measured
    assert BETTER.keys() <= METRICS.keys()
