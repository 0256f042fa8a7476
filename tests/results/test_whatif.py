"""Predictions against steps that are added up by hand."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from experiments import break_even
from harness.errors import ConfigError
from harness.grammar.spec import GrammarSpec
from harness.results import whatif
from harness.results.break_even import break_even_sync_us, fastest, speeds
from harness.results.costs import PAIRS, Costs, with_bare
from harness.results.fit import fit
from harness.results.metrics import compare_with_plain, summarise
from harness.results.predict import predict
from harness.results.record import Recorder, RunFolder
from harness.results.whatif import question
from tests.results import prefill, tiny_run, verify
from tests.toys import Toy, random_law, request, toy_table

COSTS = Costs(
    plain_us=1000,
    verify_us=1400,
    draft_us=100,
    chain_us=360,
    draft_row_us=10,
    prefill_us=2000,
    draft_prefill_us=200,
    mask_us=50,
    accept_us=10,
    rollback_us=5,
    jump_us=70,
    sync_us=20,
    host_us=30,
)
PREFILL_US = 200 + 2000 + 20 + 30
"""Of a strategy that drafts; feeding one token hides behind a forward."""


def frame(*rows):
    recorder = Recorder()
    recorder.steps += rows
    return recorder.frames()[0]


def one(name, *rows, costs=COSTS, **options):
    return predict(frame(*rows), costs, **options).loc[name]


def drafted(name, fates, **columns):
    return verify(name, "a", 1, 1, fates, held=1, **{"draft_forwards": 4, **columns})


VLLM = (
    prefill("vllm", "a", 0),
    drafted("vllm", (2, 0, 1, 0), trimmed=1),
    verify("vllm", "a", 2, 2, (4, 0, 0, 0), held=4),
    verify("vllm", "a", 3, 3, (0, 0, 4, 0), held=9),
)
"""Trimmed to 3 drafts; accepted whole; behind which the draft model has two tokens to read."""

TRTLLM = drafted(
    "trtllm",
    (3, 0, 1, 0),
    mask_rows=9,
    advanced=9,
    rollback_draft_tokens=4,
    rollback_preview_tokens=0,
    rollback_rejected_tokens=1,
)
"""Four guided drafts, then the target's build over the golden token and the drafts."""


def test_two_steps_of_vllm_add_up():
    """The trim stands between the forwards (V1.1), the rows beside the target (V1.2)."""
    first = 360 + 4 * 10 + 1300 + 20 + 30  # 4 tokens looked at; 4 rows of the target
    second = 360 + 4 * 10 + 1400 + 20 + 30
    third = second + 10  # V1.7: whole window accepted before it, one more draft row
    row = one("vllm", *VLLM)
    assert row["tok_s"] == pytest.approx(
        1e6 * (1 + 3 + 5 + 1) / (PREFILL_US + first + second + third)
    )
    assert row["exposed_us"] == pytest.approx(40)
    assert row["hidden_us"] == pytest.approx((30 + 245 + 50 + 310 + 10 + 310) / 3)


def test_cpu_time_beyond_the_forward_is_exposed():
    slow = replace(COSTS, mask_us=400)
    beyond = [4 * 400 + 45 - 1300, 5 * 400 + 60 - 1400, 5 * 400 + 60 - 1400]
    assert one("vllm", *VLLM, costs=slow)["exposed_us"] == pytest.approx(40 + sum(beyond) / 3)


def test_nothing_hides_without_overlap():
    row = one("vllm", *VLLM, costs=replace(COSTS, overlap=False))
    assert row["hidden_us"] == 0
    assert row["exposed_us"] == pytest.approx(40 + (30 + 245 + 50 + 310 + 10 + 310) / 3)


def test_guided_drafting_pays_a_round_trip_per_draft():
    """Single forwards, not the chain; both rollbacks stand outside them (T8, T9)."""
    row = one("trtllm", TRTLLM)
    assert row["draft_us"] == 4 * 100
    assert row["sync_us"] == 5 * 20
    assert row["exposed_us"] == 1 * 5 + 4 * 5
    assert row["hidden_us"] == 4 * (50 + 10) + 5 * 50 + 5 * 10


def test_drafts_that_are_read_one_by_one_pay_a_round_trip_each():
    row = one("vllm", *VLLM, costs=replace(COSTS, stepped=True))
    assert row["draft_us"] == pytest.approx(4 * 100 + 10 / 3)  # one draft row more in three steps
    assert row["sync_us"] == 5 * 20


def test_fills_of_draft_steps_hide_behind_the_draft_alone():
    row = one("trtllm", TRTLLM, costs=replace(COSTS, mask_us=200))
    assert row["exposed_us"] == 25 + (4 * 210 - 400)


def test_llamacpp_checks_behind_the_target():
    """Two emitted tokens checked; one more was refused, masked and drawn again (L4)."""
    step = drafted("llamacpp", (1, 0, 3, 0), mask_rows=1, advanced=2, rollback_preview_tokens=0)
    row = one("llamacpp", step)
    assert (row["exposed_us"], row["hidden_us"]) == (2 * 10 + 1 * (10 + 50), 0)
    assert row["sync_us"] == 2 * 20


def test_sglang_exposes_jumps_before_drafting():
    """S1: the commit and the re-encoding; the target reads the tokens that were inserted."""
    step = drafted(
        "sglang", (4, 0, 0, 0), jump_tokens=2, retokenized=1, rollback_retokenize_tokens=1
    )
    row = one("sglang", step)
    assert row["exposed_us"] == 5 * 10 + 1 * 5 + 70
    assert row["verify_us"] == 1000 + 100 * (4 + 3)
    assert row["draft_us"] == 360 + 10 * 3
    assert row["tokens"] == 5 + 2


def test_sglang_without_jumps_hides_everything():
    row = one("sglang", drafted("sglang", (4, 0, 0, 0)))
    assert (row["exposed_us"], row["hidden_us"]) == (0, 5 * 10 + 5 * 50 + 4 * 15)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_free_text_pays_nothing_to_a_grammar(name):
    free = {"mask_rows": 0, "advanced": 0, "rollback_preview_tokens": 0}
    bound = verify(name, "a", 2, 2, (1, 0, 3, 0), jump_tokens=1)
    steps = [drafted(name, (4, 0, 0, 0), **free), bound]
    both, constrained = (one(name, *rows) for rows in (steps, steps[1:]))
    assert both["exposed_us"] == constrained["exposed_us"] / 2


def test_deepinfer_hides_everything_beside_the_target():
    """D11-D13."""
    row = one("deepinfer", drafted("deepinfer", (4, 0, 0, 0)))
    assert (row["exposed_us"], row["hidden_us"]) == (0, 5 * 10 + 5 * 50 + 4 * 15)


def test_plain_hides_its_one_fill_and_reads_no_prompt_twice():
    row = one("plain", prefill("plain", "a", 0), verify("plain", "a", 1, 1, held=1))
    assert row["tok_s"] == pytest.approx(1e6 * 2 / ((2000 + 50) + (1000 + 50)))
    assert row["hidden_us"] == 50 + 10


def test_a_strategy_nobody_knows_hides_nothing():
    row = one("mine", drafted("mine", (4, 0, 0, 0)))
    assert (row["exposed_us"], row["hidden_us"]) == (5 * 50 + 9 * 10 + 4 * 5, 0)


def test_rows_of_one_tick_share_forwards_threads_and_the_round_trip():
    pair = [verify("deepinfer", name, 1, 1, (0, 0, 4, 0), held=1) for name in "ab"]
    row = predict(frame(*pair), replace(COSTS, mask_us=500, threads=2)).loc["deepinfer"]
    target = 1000 + 100 * 9
    assert row["verify_us"] == target / 2
    assert row["draft_us"] == (360 + 10 * 4) / 2
    assert row["sync_us"] == 20 / 2
    assert row["exposed_us"] == (5 * 500 + 10 + 4 * 15 - target) / 2


def test_copies_enlarge_the_batch():
    pair = frame(*(verify("vllm", name, 1, 1, (0, 0, 4, 0), held=1) for name in "ab"))
    single = frame(verify("vllm", "a", 1, 1, (0, 0, 4, 0), held=1))
    pd.testing.assert_frame_equal(
        predict(pair, COSTS).drop(columns="tokens"),
        predict(single, COSTS, copies=2).drop(columns="tokens"),
    )


def toy_steps(*names):
    """What toy models do under several strategies; its times are set by the tests."""
    table = toy_table(["a", "b", "c", "ab", "bc"])
    toy = Toy(table, random_law(table, 1), random_law(table, 1, memory=1), slots=3)
    grammar = GrammarSpec.regex("(ab|bc|c){4,12}")
    requests = [request(table, grammar, name=f"r{i}", seed=i) for i in range(6)]
    return [step for name in names for step in toy.run(name, requests).steps]


@pytest.fixture(scope="module")
def toy():
    return frame(*toy_steps("plain", "vllm", "trtllm", "llamacpp", "deepinfer"))


DEARER = [
    item.name
    for item in fields(Costs)
    if item.name.endswith("_us") and item.name not in ("plain_us", "jump_us")
]


@pytest.mark.parametrize("name", DEARER)
def test_what_is_dearer_speeds_nothing_up(toy, name):
    costs = replace(COSTS, draft_tokens=3)
    before = predict(toy, costs)["tok_s"]
    after = predict(toy, replace(costs, **{name: 3 * getattr(costs, name)}))["tok_s"]
    assert (after <= before + 1e-9).all()
    assert (after < before - 1e-9).any() or name in ("mask_us", "accept_us")


def timed(steps):
    """The steps as a machine would record them whose laws are those of this function (no
    overlap): forwards linear in rows, a fill 20 µs, a token 5 µs, 40 µs on the host."""
    ticks = steps.groupby(["strategy", "tick"])
    sequences, width = ticks["step"].transform("size"), ticks["rows"].transform("max")
    forwards = ticks["draft_forwards"].transform("max")
    target = (800 + 60 * sequences * width).where(~steps["prefill"], 900 * sequences)
    drafts = steps["strategy"] != "plain"
    draft = (forwards * (150 + 15 * sequences)).where(~steps["prefill"], 100 * sequences * drafts)
    undone = steps.filter(regex="^rollback_.*_tokens$").sum(axis=1)
    grammar = 20.0 * steps["mask_rows"] + 5.0 * (steps["advanced"] + undone)
    grammar = grammar.groupby([steps["strategy"], steps["tick"]]).transform("mean")
    return steps.assign(
        verify_us=target / sequences,
        draft_us=draft / sequences,
        grammar_us=grammar,
        exposed_us=grammar,
        host_us=40.0,
        fill_us=[[20.0] * rows for rows in steps["mask_rows"]],
    )


def test_a_run_is_predicted_from_its_own_costs(toy):
    steps = timed(toy)
    spent = steps[["draft_us", "verify_us", "grammar_us", "host_us"]].sum(axis=1)
    totals = steps.assign(spent=spent).groupby("strategy")[["spent", "emitted"]].sum()
    recorded = 1e6 * totals["emitted"] / totals["spent"]
    predicted = predict(steps, fit(steps))["tok_s"]
    assert (predicted / recorded[predicted.index] - 1).abs().max() < 0.05


def test_fitting_finds_the_costs_of_the_machine(toy):
    costs = fit(timed(toy))
    assert costs.plain_us == pytest.approx(800 + 60 * 3)
    assert costs.verify_us == pytest.approx(800 + 60 * 3 * 4)
    assert (costs.mask_us, costs.host_us, costs.overlap) == (20.0, 40.0, False)
    assert costs.draft_us == pytest.approx(150 + 15 * 3, rel=0.05)
    assert costs.prefill_us == pytest.approx(900)
    assert costs.draft_prefill_us == pytest.approx(100)


def test_a_guided_drafts_excess_is_the_round_trip(toy):
    """Recorded on a GPU: some grammar work was hidden."""
    steps = timed(toy)
    guided = (steps["strategy"] == "trtllm") & ~steps["prefill"]
    forwards = steps.groupby(["strategy", "tick"])["draft_forwards"].transform("max")
    sequences = steps.groupby(["strategy", "tick"])["step"].transform("size")
    slower = steps["draft_us"] + guided * forwards * 33.0 / sequences
    costs = fit(steps.assign(draft_us=slower, exposed_us=0.0))
    assert costs.sync_us == pytest.approx(33, rel=0.05)
    assert costs.overlap


def test_where_every_draft_is_read_the_round_trip_stays_with_the_draft(toy):
    """Nothing tells the two apart then; the prediction must still be the record."""
    steps = timed(toy)
    forwards = steps.groupby(["strategy", "tick"])["draft_forwards"].transform("max")
    sequences = steps.groupby(["strategy", "tick"])["step"].transform("size")
    read = steps["draft_us"] + (~steps["prefill"] * forwards) * 33.0 / sequences
    costs = fit(steps.assign(draft_us=read, exposed_us=0.0), stepped=True)
    assert costs.stepped
    assert costs.sync_us == 0
    assert costs.draft_us == pytest.approx(fit(steps).draft_us + 33, rel=0.05)


def test_a_run_without_verify_steps_has_no_costs():
    with pytest.raises(ConfigError, match="no verify step"):
        fit(frame(prefill("plain", "a", 0)))


def test_the_order_flips_where_the_inequality_says(toy):
    costs = replace(COSTS, draft_tokens=3, sync_us=7)
    predicted = predict(toy, costs)
    bound = break_even_sync_us(predicted, costs, "trtllm", "vllm")
    assert 0 < bound < 1e4
    for sync_us, guided_pays in ((0.99 * bound, True), (1.01 * bound, False)):
        tok_s = predict(toy, replace(costs, sync_us=sync_us))["tok_s"]
        assert (tok_s["trtllm"] > tok_s["vllm"]) == guided_pays


def test_the_inequality_by_hand():
    """Per token, guided: 2 trips, 100 µs; free: 1 trip, 160 µs: it pays below 60 µs."""
    predicted = pd.DataFrame(
        {"tokens": [10.0, 20.0], "round_trips": [20.0, 20.0], "tok_s": [1e7 / 1200, 2e7 / 3400]},
        index=["trtllm", "vllm"],
    )
    costs = Costs(sync_us=10)
    assert break_even_sync_us(predicted, costs, "trtllm", "vllm") == pytest.approx(60)
    assert break_even_sync_us(predicted, costs, "vllm", "trtllm") == float("inf")


def test_the_map_names_the_fastest(toy):
    costs = replace(COSTS, draft_tokens=3, slots=3, verify_us=1010)
    cells = speeds(toy, costs, [0.01, 2.0], "sync_us", [0.0, 1000.0])
    winners = fastest(cells, "sync_us")
    assert winners.shape == (2, 2)
    assert winners.loc[0.0, 0.01] == "trtllm"
    assert set(winners[2.0]) == {"plain"}


def test_a_pair_costs_its_weights_over_the_bandwidth():
    """70.6e9 weights × 2 bytes / (4 × 4.8e12 bytes/s) = 7354 µs; 8 rows do not change it."""
    costs = PAIRS["70b-8b"].costs(replace(COSTS, slots=8), 100.0)
    assert costs.plain_us == costs.verify_us == pytest.approx(7354.17, abs=0.01)
    assert costs.draft_us == pytest.approx(1e6 * 2 * 8.03e9 / 19.2e12)
    assert costs.chain_us == 4 * costs.draft_us
    assert costs.prefill_us == pytest.approx(1e6 * 2 * 70.6e9 * 100 / (4 * 989e12))
    assert costs.mask_us == COSTS.mask_us


def test_many_rows_cost_their_arithmetic():
    costs = PAIRS["70b-8b"].costs(replace(COSTS, slots=128), 100.0)
    assert costs.verify_us == pytest.approx(1e6 * 2 * 70.6e9 * 640 / (4 * 989e12))


def test_a_stall_is_left_out_of_the_fit_and_told(toy, run, capsys):
    """One step in which something else had the machine is no cost of a policy."""
    steps = timed(toy)
    stalled = steps.index[~steps["prefill"]][5]
    late = steps.assign(host_us=steps["host_us"].where(steps.index != stalled, 5e5))
    assert fit(late).host_us == fit(steps).host_us == 40.0
    folder = RunFolder.open(Path(run))
    folder.write_frames(late, folder.requests())
    assert whatif.main([run]) == 0
    assert "1 stalls" in capsys.readouterr().out


def test_bare_replays_replace_the_forwards(tmp_path):
    bare = {"plain": 10, "verify": 14, "draft": 2, "chain": 7, "chain of two": 9}
    spans = {"512": dict.fromkeys(bare, 99), "1024": bare, "2048": dict.fromkeys(bare, 99)}
    path = tmp_path / "engine_limits.json"
    path.write_text(json.dumps({"slots_8": {"bare_us": spans, "draft_tokens": 6}}))
    costs = with_bare(replace(COSTS, slots=8, sync_us=0.5), path, context=513.0)
    assert (costs.plain_us, costs.verify_us, costs.draft_us, costs.chain_us) == (9.5, 13.5, 1.5, 7)
    assert costs.draft_row_us == (9 - 7) / 8
    assert costs.draft_tokens == 6  # of the study's chain and window, whatever the run's K
    with pytest.raises(ConfigError, match=r"bare: .* 4 slots"):
        with_bare(replace(COSTS, slots=4), path, context=513.0)
    assert with_bare(replace(COSTS, slots=8), path, context=9000.0).chain_us == 99


def test_another_draft_takes_its_chain_along(toy):
    costs = question({"draft_us": "9"}, timed(toy), 5.0).costs
    assert (costs.draft_us, costs.chain_us, costs.draft_row_us) == (9, 27, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"mask_us": -1.0}, {"sync_us": float("nan")}, {"threads": 0}, {"verify_us": 999.0}],
)
def test_costs_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(COSTS, **wrong)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "tiny")
    steps, requests = tiny_run()
    requests = compare_with_plain(requests)
    folder.write_manifest({})
    folder.write_frames(steps, requests)
    folder.write_summary(summarise(steps, requests))
    return str(folder.path)


def test_the_command_prints_assumptions_and_holds_itself_against_the_record(run, capsys):
    assert whatif.main([run]) == 0
    out = capsys.readouterr().out
    for name in (item.name for item in fields(Costs)):
        assert f"- {name} = " in out
    assert "error" in out
    assert "vllm" in out


@pytest.mark.parametrize(("length", "told"), [("p_min", "true"), ("fixed", "false")])
def test_a_run_tells_whether_its_drafts_were_read_one_by_one(run, capsys, length, told):
    (Path(run) / "config.yaml").write_text(f"drafter: {{length: {length}}}\n")
    assert whatif.main([run]) == 0
    assert f"- stepped = {told} (the run)" in capsys.readouterr().out


def test_a_pair_prints_its_arithmetic_and_a_fleet_its_engines(run, capsys):
    asked = [run, "pair=70b-8b", "batch=8", "users=1000000", "user_tok_s=10"]
    assert whatif.main(asked) == 0
    out = capsys.readouterr().out
    assert "7.06e+10 weights × 2 bytes / (4 GPUs × 4.8e+12 bytes/s) = 7354 µs" in out
    assert "1,000,000 users × 10 tok/s" in out
    assert "engines" in out


def test_bare_replays_are_held_against_the_record_and_other_costs_are_not(run, capsys, tmp_path):
    bare = dict.fromkeys(("plain", "verify", "draft", "chain", "chain of two"), 10)
    path = tmp_path / "engine_limits.json"
    path.write_text(json.dumps({"slots_1": {"bare_us": {"512": bare}, "draft_tokens": 4}}))
    assert whatif.main([run, f"bare={path}"]) == 0
    assert "recorded" in capsys.readouterr().out.partition("Prediction")[2]
    assert whatif.main([run, f"bare={path}", "sync_us=9"]) == 0
    assert "recorded" not in capsys.readouterr().out.partition("Prediction")[2]


def test_the_map_is_printed_and_written(run, capsys, tmp_path):
    out = tmp_path / "map.md"
    assert break_even.main([run, "y=mask_us", "values=1,10", "ratios=0.1,0.5", f"out={out}"]) == 0
    assert "down: mask_us" in capsys.readouterr().out
    assert "| 0.1 | 0.5 |" in out.read_text()


def test_a_ratio_that_is_named_twice_has_one_column(run, capsys, tmp_path):
    out = tmp_path / "map.md"
    assert break_even.main([run, "values=0", "ratios=0.1,0.1", f"out={out}"]) == 0
    assert "| sync_us | 0.1 |\n" in out.read_text()


def test_a_map_that_cannot_be_written_is_one_line_and_exit_2(run, capsys, tmp_path):
    assert break_even.main([run, "values=0", "ratios=0.1", f"out={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: out: {tmp_path} cannot be written")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["nonsense=1"], "nonsense: no such setting"),
        (["draft_us=fast"], "draft_us: 'fast' is no number"),
        (["pair=9b"], "pair: '9b' is none of"),
        (["overlap=maybe"], "overlap: 'maybe'"),
        (["slots=1.5"], "slots: '1.5' is no whole number"),
        (["bare=nowhere.json"], "bare: nowhere.json"),
    ],
)
@pytest.mark.parametrize("command", [whatif.main, break_even.main])
def test_a_wrong_setting_is_one_line_and_exit_2(run, capsys, command, settings, message):
    assert command([run, *settings]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_is_needed(capsys):
    assert whatif.main(["draft_us=1"]) == 2
    assert "RUN: name one run folder" in capsys.readouterr().err


def test_the_map_sweeps_costs_only(run, capsys):
    assert break_even.main([run, "y=slots"]) == 2
    assert "y: 'slots' is no cost" in capsys.readouterr().err
