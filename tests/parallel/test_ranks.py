"""What ranks say to each other, and what is refused before they meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from transformers import LlamaConfig

from harness.clock import Clock
from harness.core import Finish, Proposal, Request, Sequence as Running
from harness.engine import EngineConfig
from harness.errors import ConfigError, GrammarError, LostRank, RanksError
from harness.grammar.masks import MaskBuffer
from harness.grammar.pool import GrammarPool
from harness.grammar.service import GrammarConfig, GrammarService
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.models.checkpoint import check_parallel
from harness.parallel import agreement
from harness.parallel.agreement import Agreement, fingerprints
from harness.parallel.grammars import AgreedGrammars
from harness.parallel.launch import join, rank_device
from harness.parallel.ranks import ALONE, Ranks, common_reason
from harness.step import Step, isolate
from tests.toys import Toy, ids, toy_table

TABLE = toy_table("abc")
CHOICE, OTHER = GrammarSpec.choice(["ab", "ac"]), GrammarSpec.regex("c+")


class Peer(Ranks):
    """Rank 0 of two, of which the other says what it is told to."""

    size = 2

    def __init__(self, votes: Iterable[bool] = (), says: object = None) -> None:
        super().__init__()
        self._votes, self._says = iter(votes), says

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        return [flag and next(self._votes, True) for flag in flags]

    def alike(self, digest: int) -> bool:
        return self._says is None

    def gather(self, value: object) -> list[object]:  # type: ignore[override]
        return [value, value if self._says is None else self._says]


def agreed(peer: Ranks) -> AgreedGrammars:
    service = GrammarService(Toy(TABLE, list, list).grammar_engine(), GrammarConfig())
    service.finish([CHOICE, OTHER])
    return AgreedGrammars(service, peer)


def test_a_grammar_is_ready_when_it_is_on_all_ranks() -> None:
    grammars = agreed(Peer([False, True]))
    assert grammars.first_ready([CHOICE, OTHER]) == 1
    assert agreed(Peer([False, False])).first_ready([CHOICE, OTHER]) is None
    assert agreed(Peer([])).first_ready([]) is None
    assert agreed(Peer()).first_ready([None]) == 0


def test_waiting_ends_when_the_slowest_rank_is_ready() -> None:
    votes = [False] * 5 + [True]
    peer = Peer(votes)
    agreed(peer).wait([CHOICE])
    assert list(peer._votes) == []


def test_a_grammar_that_fails_elsewhere_fails_here_with_the_reason() -> None:
    with pytest.raises(GrammarError, match=r"^rank 1: out of memory$"):
        agreed(Peer([True, False], says="out of memory")).compile(CHOICE)


def test_a_grammar_that_fails_on_all_ranks_says_what_one_process_would() -> None:
    bad = GrammarSpec.regex("(a")
    with pytest.raises(GrammarError) as alone:
        agreed(ALONE).compile(bad)
    with pytest.raises(GrammarError) as together:
        agreed(Peer()).compile(bad)
    assert str(together.value) == str(alone.value)


def test_reasons_name_the_ranks_that_have_one() -> None:
    assert common_reason(["full", "full"]) == "full"
    assert common_reason(["full", None]) == "full"
    assert common_reason([None, "full", "gone"]) == "rank 1: full; rank 2: gone"
    assert common_reason(["lost", "full"]) == "rank 0: lost; rank 1: full"


def step_of(*output: str, fill: bool = True) -> Step:
    """A step of one sequence behind the given output."""
    compiled, _ = agreed(ALONE).compile(CHOICE)
    request = Request("r-1", (0,), CHOICE, 8)
    matcher = TrackedMatcher(compiled.matcher(), Clock())
    sequence = Running(request, 0, matcher, output_ids=ids(TABLE, *output))
    masks = MaskBuffer(1, 2, len(TABLE), torch.device("cpu"), None)
    step = Step([sequence], masks, masks, None, False, GrammarPool(1, Clock()))
    assert matcher.accept(sequence.output_ids)
    step.proposals = [Proposal(ids(TABLE, "c"))]
    if fill:
        masks.fill(0, 0, matcher)
    return step


CHANGES: dict[str, Callable[[Step], object]] = {
    "output": lambda step: step.sequences[0].output_ids.append(2),
    "end": lambda step: setattr(step.sequences[0], "finish", Finish.STOP),
    "failure": lambda step: setattr(step.sequences[0], "error", "dead end"),
    "matcher": lambda step: step.sequences[0].matcher.rollback(1, "draft"),  # type: ignore[union-attr]
    "mask": lambda step: step.masks.host[0].fill_(7),
    "masked rows": lambda step: step.masks.copy(0, 1, 0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_fingerprint_tells_ranks_apart_by_their(what: str) -> None:
    step = step_of("a")
    assert fingerprints(step) == fingerprints(step_of("a"))
    CHANGES[what](step)
    assert fingerprints(step) != fingerprints(step_of("a"))


def test_ranks_that_differ_stop_with_the_step_and_the_request() -> None:
    step = step_of("a")
    peer = Peer(says=fingerprints(step_of("a", "c")))
    peer.now = "step 7 of vllm"
    with pytest.raises(RanksError, match=r"in step 7 of vllm: rank 1 from rank 0 in r-1;"):
        Agreement(peer).check(step)
    Agreement(Peer()).check(step)


def test_ranks_whose_batches_are_in_another_order_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [("r-1", "a3"), ("r-2", "7c")]
    monkeypatch.setattr(agreement, "fingerprints", lambda _: ours)
    with pytest.raises(RanksError, match=r"rank 1 from rank 0 in r-1, r-2;"):
        Agreement(Peer(says=ours[::-1])).check(step_of("a"))


def test_a_lost_rank_ends_all_requests_not_one() -> None:
    (sequence,) = step_of().sequences
    with pytest.raises(LostRank), isolate(sequence):
        raise LostRank("gone")
    assert sequence.error is None


def test_a_rank_that_was_not_started_as_one_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join(1, 20, "auto") is ALONE
    with pytest.raises(ConfigError, match="start `torchrun --nproc-per-node 2 -m harness … "):
        join(2, 20, "auto")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"2 ranks asked for, 3 started; set engine\.tp=3"):
        join(2, 20, "auto")
    with pytest.raises(ConfigError, match=r"set engine\.tp=3"):
        join(1, 20, "auto")


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto") == rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="run on cpu, not cuda:1; set auto"):
        rank_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("auto") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES="):
        rank_device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="rank 2 of this machine has no GPU, 2 are here"):
        rank_device("cuda")


def test_heads_must_be_shared_out_evenly() -> None:
    config = LlamaConfig(num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    check_parallel(config, 1, "pair.target")
    check_parallel(config, 3, "pair.target")
    with pytest.raises(
        ConfigError, match=r"2 ranks .* 9 attention heads and 3 key/value heads .* of 1, 3$"
    ):
        check_parallel(config, 2, "pair.target")
    config.base_model_tp_plan = None
    check_parallel(config, 1, "pair.target")
    with pytest.raises(ConfigError, match="no tensor-parallel plan for llama"):
        check_parallel(config, 3, "pair.target")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tp": 0}, "engine.tp: 0 is below 1"),
        ({"tp_timeout_s": 0}, "engine.tp_timeout_s: 0 is not above 0"),
        ({"tp": 2, "compile": True}, "engine.compile: not with engine.tp=2"),
        ({"tp": 2, "profile": True}, "engine.profile: not with engine.tp=2"),
        ({"tp": 2, "dp": 3}, "engine.dp: 3 processes .* engine.tp=2"),
    ],
)
def test_what_ranks_cannot_do_is_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**setting)  # type: ignore[arg-type]


def test_a_watchdog_ends_what_takes_too_long_and_nothing_else() -> None:
    script = (
        "import time; from harness.parallel.watchdog import Watchdog; dog = Watchdog(0.5);"
        "dog.arm('first'); dog.disarm(); time.sleep(0.8); print('lives', flush=True);"
        "dog.arm('step 3'); time.sleep(60)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        2,
        "lives\n",
        "error: step 3 for 0.5 s; see what that one says, or raise engine.tp_timeout_s if it is "
        "merely slow\n",
    )
