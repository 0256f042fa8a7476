"""Two ranks on a CPU do what one process does, or end in one line each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd
import pytest

from tests.parallel.launch import (
    ITEMS,
    STEP,
    alone,
    assert_given_up,
    assert_same,
    run,
    run_folder,
    script,
    settings,
    start,
    table,
    until_fault,
)
from tests.pruned import prune_folder
from tests.test_durability import Process

SAMPLED = [
    "compare=[llamacpp,sglang,vllm,trtllm]",
    "grammar=llguidance",
    "sampling=temperature",
    "sampling.top_k=20",
    "options.llamacpp.p_min=0.6",
    "options.vllm.probabilistic=true",
    "options.sglang.tree_width=2",
]

NOISE = """
    import torch
    from harness.models.causal_lm import CausalLM
    compute = CausalLM.compute
    def noisy(self, *given):
        logits = compute(self, *given)
        return logits + 5 * torch.randn_like(logits)
    CausalLM.compute = noisy
"""

COMPILE = """
    import time
    from pathlib import Path
    from harness.errors import GrammarError
    from harness.grammar.xgrammar import XGrammarEngine
    compile = XGrammarEngine.compile
    def journalled():
        (journal,) = Path().glob("runs/*/journal.jsonl")
        return len(journal.read_bytes().splitlines()) - 1
    def strange(self, spec):
        if spec.kind == "choice":
            ACTION
        return compile(self, spec)
    XGrammarEngine.compile = strange
"""

LOAD = """
    import os, signal
    import harness.run
    def load_pair(*_):
        ACTION
    harness.run.load_pair = load_pair
"""

LOCATE = """
    import time
    from pathlib import Path
    import harness.models.pair
    locate = harness.models.pair.locate
    def converting(name, field):
        ACTION
        return locate(name, field)
    harness.models.pair.locate = converting
"""

COSTS = """
    import harness.run
    from harness.drafters.length import Costs
    harness.run.step_costs = lambda *_: Costs(ACTION)
"""

OTHER_MASK = """
    from harness.grammar.tracked import TrackedMatcher
    fill = TrackedMatcher.fill
    def other(self, mask, row):
        fill(self, mask, row)
        if self.held == 3:
            mask[row, 0] |= 2
    TrackedMatcher.fill = other
"""


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All strategies, in one process."""
    return alone(base, tmp_path_factory.mktemp("whole") / "alone")


def test_all_strategies_count_and_write_what_one_process_does(
    base: Path, whole: Path, tmp_path: Path
) -> None:
    folder = run(tmp_path, *settings(base))
    assert_same(folder, whole)
    assert (tmp_path / "printed-1.txt").read_text() == ""


def test_rank_0_alone_decides_every_token(base: Path, tmp_path: Path) -> None:
    # The other one sees logits of its own: drafts, trees, second choices, all must be rank 0's.
    arguments = [*SAMPLED, f"pair.draft={base / 'borrowing'}"]
    folder = run(tmp_path, *settings(base), *arguments, scripts=("", script(NOISE)))
    assert_same(folder, alone(base, tmp_path / "alone", *arguments))


def test_rank_0_decides_what_ranks_draft_in_one_go_and_run_ahead(
    base: Path, tmp_path: Path
) -> None:
    # As GPUs run. A borrowed embedding is shared out: what the other one feeds, rank 0 would see.
    arguments = ["engine.mode=graphs", "compare=[plain,vllm,trtllm,llamacpp]"]
    arguments.append(f"pair.draft={base / 'borrowing'}")
    folder = run(tmp_path, *settings(base), *arguments, scripts=("", script(NOISE)))
    assert_same(folder, alone(base, tmp_path / "alone", *arguments))


def test_rank_0_tells_what_a_step_costs(base: Path, tmp_path: Path) -> None:
    # The other one has measured that a draft is too dear to be made.
    scripts = script(COSTS, "0.5, 1, 0.25"), script(COSTS, "50, 1, 0.25")
    arguments = ["compare=[unguided,vllm]", "drafter.length=adaptive"]
    folder = run(tmp_path, *settings(base), *arguments, scripts=scripts)
    costs = [f"drafter.{each}" for each in ("draft_ms=0.5", "verify_ms=1", "row_ms=0.25")]
    assert_same(folder, alone(base, tmp_path / "alone", *arguments, *costs))
    assert table(folder, "steps").drafted.astype(int).any()


@pytest.mark.parametrize("drafter", ["ngram", "grammar", "chain", "random"])
def test_ranks_draft_alike_by_other_means(drafter: str, base: Path, tmp_path: Path) -> None:
    arguments = ["compare=[vllm,llamacpp]", f"drafter={drafter}", "sampling=temperature"]
    folder = run(tmp_path, *settings(base), *arguments)
    assert_same(folder, alone(base, tmp_path / "alone", *arguments))


def test_ranks_replay_the_same_outputs(base: Path, whole: Path, tmp_path: Path) -> None:
    arguments = ["+strategy=vllm", "workload.limit=2", "drafter=oracle"]
    arguments.append(f"drafter.reference={whole}")
    folder = run(tmp_path, *settings(base), *arguments)
    assert_same(folder, alone(base, tmp_path / "alone", *arguments))


def test_a_pruned_draft_borrows_rows_of_a_shared_head(base: Path, tmp_path: Path) -> None:
    kept = [*range(32, 127), 256]
    prune_folder(base / "borrowing", tmp_path / "pruned", kept)
    arguments = [
        "compare=[vllm,trtllm,sglang]",
        "options.sglang.tree_width=2",
        f"pair.draft={tmp_path / 'pruned'}",
    ]
    folder = run(tmp_path, *settings(base), *arguments, scripts=("", script(NOISE)))
    assert_same(folder, alone(base, tmp_path / "alone", *arguments))


def test_a_job_of_a_sweep_is_no_rank(base: Path, tmp_path: Path) -> None:
    sweep = Process(tmp_path, "-m", *settings(base), "+strategy=plain,vllm")
    assert sweep.wait() == 1
    assert sweep.printed.count("engine.tp: 2 ranks asked for, but a job of a sweep is one") >= 2
    assert "Traceback" not in sweep.printed


def test_a_request_waits_until_its_grammar_is_compiled_on_every_rank_and_holds_back_no_other(
    base: Path, tmp_path: Path
) -> None:
    slow = script(COMPILE, f"while journalled() < {len(ITEMS) - 1}: time.sleep(0.01)")
    arguments = ["+strategy=vllm", "grammar.ahead=false", "grammar.threads=2"]
    folder = run(tmp_path, *settings(base), *arguments, scripts=("", slow))
    requests = pd.read_parquet(folder / "requests.parquet")
    assert list(requests.request)[-1] == "choice"  # first in the queue
    assert requests.text.iloc[-1].startswith("a long way")
    assert list(requests.request[requests.error != ""]) == ["bad"]


def test_grammars_compiled_ahead_are_waited_for_on_every_rank(base: Path, tmp_path: Path) -> None:
    # For longer than one rank waits for another in a step.
    arguments = ["+strategy=plain", "engine.tp_timeout_s=2"]
    slow = script(COMPILE, "time.sleep(3)")
    folder = run(tmp_path, *settings(base), *arguments, scripts=("", slow))
    assert_same(folder, alone(base, tmp_path / "alone", "+strategy=plain"))


def test_a_grammar_that_one_rank_refuses_fails_its_request_and_no_other(
    base: Path, tmp_path: Path
) -> None:
    failing = script(COMPILE, "raise GrammarError('grammar.choice: out of memory')")
    folder = run(tmp_path, *settings(base), "+strategy=trtllm", scripts=("", failing))
    errors = pd.read_parquet(folder / "requests.parquet").set_index("request").error
    assert errors["choice"] == "rank 1: grammar.choice: out of memory"
    assert errors["bad"].startswith("grammar.regex")  # on all alike
    assert not errors[["digits", "free", "pet"]].any()


def outputs(folder: Path) -> pd.DataFrame:
    """What was written and why it ended, in an order of its own."""
    names = ["strategy", "request", "finish", "error", "identical", "text"]
    return table(folder, "requests")[names].sort_values(names[:2], ignore_index=True)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_others_with_the_step_and_the_run_goes_on(
    lost: int, base: Path, whole: Path, tmp_path: Path
) -> None:
    scripts = ["", ""]
    scripts[lost] = script(STEP, "os.kill(os.getpid(), signal.SIGKILL)")
    ranks = start(tmp_path, *settings(base), "compare=[plain,vllm]", scripts=scripts)
    assert_given_up(ranks[1 - lost], until_fault(tmp_path))
    assert ranks[lost].wait() == -signal.SIGKILL
    line = ranks[1 - lost].error
    assert f"engine.tp: rank {1 - lost} has lost another one in step 12 of plain" in line
    resume = f"resume=runs/{run_folder(tmp_path).name}"
    if lost == 1:
        assert f"continue with `torchrun --nproc-per-node 2 -m harness {resume}`" in line
    else:
        folder = run(tmp_path, resume)
        expected = outputs(whole).query("strategy in ['plain', 'vllm']")
        pd.testing.assert_frame_equal(outputs(folder), expected.reset_index(drop=True))


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_timeout(
    base: Path, tmp_path: Path
) -> None:
    hanging = script(STEP, "os.kill(os.getpid(), signal.SIGSTOP)")
    arguments = ["+strategy=plain", "engine.tp_timeout_s=3"]  # which meet in the target first
    ranks = start(tmp_path, *settings(base), *arguments, scripts=("", hanging))
    assert_given_up(ranks[0], until_fault(tmp_path))
    os.kill(ranks[1].inner.pid, signal.SIGKILL)
    assert "has lost another one in step 12 of plain" in ranks[0].error
    assert "engine.tp_timeout_s" in ranks[0].error


def test_a_rank_whose_matcher_went_another_way_stops_the_run_with_the_step(
    base: Path, tmp_path: Path
) -> None:
    arguments = ["+strategy=vllm", "engine.slots=1"]
    ranks = start(tmp_path, *settings(base), *arguments, scripts=("", script(OTHER_MASK)))
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "engine.tp: the ranks differ in step 3 of vllm: rank 1 from rank 0 in choice" in (
        ranks[0].error
    )
    assert ranks[1].printed == ""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("harness.errors.HarnessError('no room')", "no room"),
        ("torch.OutOfMemoryError('Tried 9 GiB. GPU 1 has 8')", "Tried 9 GiB. Lower engine.slots"),
    ],
)
def test_a_rank_that_fails_for_a_reason_of_its_own_says_it(
    error: str, says: str, base: Path, tmp_path: Path
) -> None:
    failing = script(STEP, f"import torch, harness.errors; raise {error}")
    ranks = start(tmp_path, *settings(base), "+strategy=plain", scripts=("", failing))
    assert_given_up(ranks[0], until_fault(tmp_path))
    assert ranks[1].wait() == 2
    assert "see what that one says" in ranks[0].error
    assert ranks[1].error.startswith(f"error: rank 1, in step 12 of plain: {says}")


def test_what_rank_0_converts_the_others_find(base: Path, tmp_path: Path) -> None:
    scripts = (
        script(LOCATE, "time.sleep(0.5); Path(field).touch()"),
        script(LOCATE, "assert Path(field).exists()"),
    )
    run(tmp_path, *settings(base), "+strategy=unguided", scripts=scripts)


def test_a_rank_that_cannot_load_the_pair_tells_why_on_rank_0(base: Path, tmp_path: Path) -> None:
    failing = script(LOAD, "raise MemoryError('no room for the weights')")
    ranks = start(tmp_path, *settings(base), "+strategy=plain", scripts=("", failing))
    assert [rank.wait(60) for rank in ranks] == [2, 1]
    assert ranks[0].error == "error: rank 1: MemoryError: no room for the weights"
    assert not list((tmp_path / "runs").iterdir())


def test_a_rank_that_is_killed_while_it_loads_is_not_waited_for(base: Path, tmp_path: Path) -> None:
    dying = script(LOAD, "open('fault', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)")
    ranks = start(tmp_path, *settings(base), "+strategy=plain", scripts=("", dying))
    assert_given_up(ranks[0], until_fault(tmp_path))
    assert "rank 0 has lost another one in the set-up" in ranks[0].error
    assert "nothing is kept" in ranks[0].error


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pair.dtype=int3", "pair.dtype: 'int3' is none of auto, float32, bfloat16, float16"),
        ("pair.draft=./nowhere", "pair.draft: there is no folder ./nowhere; correct the path"),
    ],
)
def test_a_bad_setting_is_told_once(setting: str, message: str, base: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path, *settings(base), "+strategy=vllm", setting)
    assert [rank.wait(60) for rank in ranks] == [2, 2]
    assert ranks[0].error.startswith(f"error: {message}")
    assert ranks[1].printed == ""
