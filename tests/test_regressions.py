"""Each row of ``spec/regressions.md`` is a named test: real bugs of released systems."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
import torch

from harness.grammar.spec import GrammarSpec
from harness.models.language_model import RowInput
from tests.toys import TableLM, Toy, random_law, request, toy_table

ROOT = Path(__file__).parent.parent
SPEC = Path(os.environ.get("HARNESS_SHARED", ROOT.parent / "shared")) / "spec" / "regressions.md"

ROWS = {
    "R1": "grammar/test_reasoning.py::test_worked_rows_of_the_reasoning_bounds",
    "R2": "grammar/test_reasoning.py::test_executed_accepts_feed_what_stands_behind_the_boundary",
    "R3": "strategies/test_vllm.py::test_padding_and_stop_tokens_end_the_legal_prefix",
    "R5": "strategies/test_vllm.py::test_rows_of_a_ragged_batch_land_on_their_own_logits",
    "R6": "strategies/test_vllm.py::"
    "test_an_illegal_draft_that_the_target_would_say_is_not_accepted",
    "R7": "strategies/test_vllm.py::test_each_row_says_what_may_stand_behind_the_drafts_before_it",
    "R8": "strategies/test_vllm.py::"
    "test_the_output_is_cut_behind_its_stop_token_before_the_matcher_is_fed",
    "R9": "grammar/test_masks.py::test_a_terminated_matcher_is_not_asked_and_its_row_masks_nothing",
    "R11": "strategies/test_vllm.py::test_the_leftmost_of_several_stop_tokens_ends_the_output",
    "R12": "test_invariants.py::test_a_broken_invariant_fails_its_request_by_name_and_step",
    "R13": "grammar/test_outlines.py::"
    "test_every_strategy_that_it_serves_writes_what_xgrammar_would",
    "R15": "strategies/test_sglang.py::"
    "test_a_value_survives_a_jump_that_holds_back_its_mergeable_end",
    "R16": "grammar/test_matcher_contract.py::test_no_text_is_forced_inside_a_character_s1d_r16",
    "R17": "grammar/test_matcher_contract.py::"
    "test_a_refused_token_does_not_poison_the_matcher_v1_4e_r17",
    "R19": "grammar/test_matcher_contract.py::"
    "test_every_stop_id_ends_the_output_and_only_where_eos_does_r19",
    "R21": "grammar/test_matcher_contract.py::test_expected_refusals_are_not_logged_r21",
    "Q1": "strategies/test_trtllm.py::"
    "test_a_loop_that_failed_at_its_first_build_leaves_the_next_one_guided",
    "Q3": "strategies/test_trtllm.py::test_one_rollback_per_verification_lets_the_next_build_go_on",
    # Nothing is preempted here; what starts anew is a request of a run that was killed.
    "Q5": "test_durability.py::test_a_killed_run_goes_on_to_the_summary_of_a_whole_one",
    "Q6": "strategies/test_trtllm.py::test_a_draft_length_of_0_lays_out_one_row",
    "Q7": "strategies/test_trtllm.py::test_a_rejected_stop_token_unterminates_the_matcher",
    "Q8": "grammar/test_matcher_contract.py::test_forks_share_the_past_and_nothing_else_q8",
    "Q10": "strategies/test_deepinfer.py::test_the_matcher_is_never_asked_behind_the_end",
    "Q12": "strategies/test_llamacpp.py::test_what_stands_before_the_capture_group_is_not_replayed",
    "Q13": "test_regressions.py::test_all_rows_of_a_step_are_in_one_forward",
    "Q14": "strategies/test_late_start.py::test_greedy_output_is_plains_wherever_the_boundary_lies",
    "Q15": "test_peers.py::test_the_state_is_that_of_the_given_tokens_whatever_was_asked_before",
    "Q16": "strategies/test_llamacpp.py::test_greedy_output_is_that_of_plain_decoding",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_a_test_that_exists(row: str) -> None:
    file, _, name = ROWS[row].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_row_of_the_specification_is_missing() -> None:
    if not SPEC.is_file():
        pytest.skip(f"the specification is not here: {SPEC}")
    rows = re.findall(r"^\| ([RQ]\d+) \|", SPEC.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(ROWS)


@pytest.mark.parametrize("strategy", ["vllm", "trtllm", "llamacpp", "sglang", "deepinfer"])
def test_all_rows_of_a_step_are_in_one_forward(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q13: no forward of the target has a part of a window."""
    table = toy_table(["a", "b", "c"])
    jig = Toy(table, random_law(table, 1), random_law(table, 2), slots=3)
    forward, seen = TableLM.forward, list[list[int]]()

    def watched(model: TableLM, inputs: list[RowInput]) -> torch.Tensor:
        if model.law is jig.target:
            seen.append([row.logits for row in inputs])
        return forward(model, inputs)

    monkeypatch.setattr(TableLM, "forward", watched)
    grammar = GrammarSpec.regex("[abc]{9,12}")
    watch = jig.run(strategy, [request(table, grammar, name=f"r{i}") for i in range(5)])
    ticks: dict[int, list[int]] = {}
    for trace in watch.steps:
        ticks.setdefault(trace.tick, []).append(trace.rows)
    assert seen == list(ticks.values())
