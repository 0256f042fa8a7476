"""What the loop does for every strategy alike: failures, draws, times."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import pytest

from harness.core import Finish, Sequence
from harness.errors import ConfigError
from harness.grammar.service import GrammarConfig
from harness.grammar.spec import GrammarSpec
from harness.grammar.xgrammar import XGrammarEngine
from harness.loop import DecodeLoop
from harness.models.sampling import Sampling
from harness.step import Step
from strategies.sglang import Sglang
from tests.toys import TableLM, Toy, Watch, random_law, request, toy_table

LETTERS = toy_table("pabcx")
"""No token for d: ``abcd`` ends dead."""


def says(text: str) -> Any:
    """A model that writes ``text`` behind the prompt, then stops."""
    wanted = [*LETTERS.encode_greedily(text.encode()), LETTERS.eos_id]

    def law(tokens: tuple[int, ...]) -> list[float]:
        place = min(len(tokens) - 1, len(wanted) - 1)
        return [5.0 if token == wanted[place] else 0.0 for token in range(len(LETTERS))]

    return law


@pytest.mark.parametrize("strategy", ["plain", "vllm", "trtllm", "llamacpp", "sglang", "deepinfer"])
def test_a_dead_end_keeps_what_was_legal_before_it(strategy: str) -> None:
    toy = Toy(LETTERS, says("abcx"), says("abcx"))
    grammar = GrammarSpec.choice(["abcd"])
    options = {"jump_forward": False} if strategy == "sglang" else {}
    watch = toy.run(toy.strategy(strategy, **options), [request(LETTERS, grammar)])
    sequence = watch.done["r"]
    assert sequence.finish is Finish.FAILED
    assert "dead end" in watch.errors["r"]
    assert sequence.output_ids == LETTERS.encode_greedily(b"abc")


def test_no_position_draws_twice_when_a_jump_merges_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draw that decided one token must not decide another, however short the output gets."""
    table = toy_table(["p", "a", "b", "c", "ab", "abc", "d"])
    toy = Toy(table, random_law(table, 1), random_law(table, 2), sampling=Sampling(temperature=1.0))
    seen: dict[str, list[int]] = {}
    original = Sglang.verify_batch

    def watched(self: Sglang, step: Step, logits: Any) -> Any:
        batch = original(self, step, logits)
        for sequence, position in zip(step.sequences, batch.positions, strict=True):
            seen.setdefault(sequence.request.id, []).append(position)
        return batch

    monkeypatch.setattr(Sglang, "verify_batch", watched)
    grammar = GrammarSpec.regex("(abc|adb)d*")
    requests = [request(table, grammar, f"r{seed}", seed=seed) for seed in range(60)]
    watch = toy.run("sglang", requests)
    assert not watch.errors
    assert any(each.jump_tokens < 0 for each in watch.done.values())
    assert all(sorted(set(positions)) == positions for positions in seen.values())


def slow_compiler(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Compiling a choice of one word takes that long."""
    original = XGrammarEngine.compile

    def slow(self: XGrammarEngine, spec: GrammarSpec) -> Any:
        time.sleep(seconds.get(spec.value[0], 0.0))
        return original(self, spec)

    monkeypatch.setattr(XGrammarEngine, "compile", slow)


def words(*words: str) -> list[Any]:
    """A request per word, of that name, that may say nothing else."""
    return [request(LETTERS, GrammarSpec.choice([word]), word) for word in words]


def work(watch: Watch) -> list[tuple[object, ...]]:
    """What was done for each request, step by step, whoever shared its batch."""
    return sorted(
        (each.request, each.step, each.draft_ids, each.fates, each.mask_rows, each.advanced)
        for each in watch.steps
    )


AS_NEEDED = GrammarConfig(ahead=False, threads=2, timeout_s=20.0)


def compiled_last(monkeypatch: pytest.MonkeyPatch, word: str, others: int) -> None:
    """The grammar of ``word`` is compiled when so many other requests are done, and no sooner."""
    original, finished = XGrammarEngine.compile, Watch.finished
    done = Event()

    def late(self: XGrammarEngine, spec: GrammarSpec) -> Any:
        assert spec.value[0] != word or done.wait(AS_NEEDED.timeout_s)
        return original(self, spec)

    def watched(self: Watch, *sequence_and_times: Any) -> None:
        finished(self, *sequence_and_times)
        if len(self.done) == others:
            done.set()

    monkeypatch.setattr(XGrammarEngine, "compile", late)
    monkeypatch.setattr(Watch, "finished", watched)


def test_a_request_waits_for_its_grammar_and_nobody_waits_with_it_v1_6b_s3b_d5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_last(monkeypatch, "abc", others=3)
    toy = Toy(LETTERS, says("abcabcabc"), says("abc"), slots=1, grammar=AS_NEEDED)
    watch = toy.run("vllm", words("abc", "abcabc", "abcabcabc", "ab"))
    assert list(watch.done) == ["abcabc", "abcabcabc", "ab", "abc"]
    assert not watch.errors
    assert watch.times["abc"].ttft_ms <= watch.times["abc"].wall_ms


def test_requests_without_a_grammar_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_last(monkeypatch, "abc", others=1)
    toy = Toy(LETTERS, says("abc"), says("abc"), slots=1, grammar=AS_NEEDED)
    watch = toy.run("vllm", [*words("abc"), request(LETTERS, None, "free")])
    assert list(watch.done) == ["free", "abc"]
    assert list(toy.run("unguided", words("abc")).done) == ["abc"]


def test_time_in_the_queue_behind_full_slots_is_no_time_to_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second grammar is compiled while the first request is decoded: it costs nobody."""
    slow_compiler(monkeypatch, ab=0.1)
    toy = Toy(LETTERS, says("abc"), says("abc"), slots=1, grammar=AS_NEEDED)
    target_forward = TableLM.forward

    def slow_forward(self: TableLM, inputs: Any) -> Any:
        time.sleep(0.1)
        return target_forward(self, inputs)

    monkeypatch.setattr(TableLM, "forward", slow_forward)
    watch = toy.run("plain", words("abc", "ab"))
    assert watch.times["ab"].compile_ms > 100.0
    # Its own forward, not the four of "abc".
    assert 100.0 < watch.times["ab"].ttft_ms < watch.times["abc"].wall_ms


def test_the_loop_sleeps_while_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_compiler(monkeypatch, abc=0.2)
    toy = Toy(LETTERS, says("abc"), says("abc"), grammar=AS_NEEDED)
    _, loop = toy.loop(toy.strategy("plain"))
    loop.submit(words("abc"))
    advances = 0
    while loop.advance():
        advances += 1
    assert advances <= 2 + len("abc$")


def test_a_grammar_that_is_never_compiled_fails_its_request_alone_s3f_d4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_compiler(monkeypatch, abc=4.0)
    limits = GrammarConfig(ahead=False, threads=1, timeout_s=2.0)
    toy = Toy(LETTERS, says("abcabc"), says("abc"), slots=2, grammar=limits)
    watch = toy.run("trtllm", words("abc", "abcabc", "ab"))
    assert set(watch.done) == {"abc", "abcabc", "ab"}
    assert list(watch.errors) == ["abc"]
    assert "grammar.timeout_s" in watch.errors["abc"]


def test_more_requests_than_are_looked_ahead_at_are_all_served() -> None:
    toy = Toy(LETTERS, says("abc"), says("abc"), slots=1, grammar=AS_NEEDED)
    many = [request(LETTERS, GrammarSpec.regex(f"[abc]{{1,{n}}}"), f"{n}") for n in range(1, 30)]
    assert len(toy.run("vllm", many).done) == 29


def test_grammars_compiled_ahead_leave_batches_and_times_to_no_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_compiler(monkeypatch, abc=1.0)
    toy = Toy(LETTERS, says("abcabc"), says("abc"), slots=2)
    watch = toy.run("vllm", words("abc", "abcabc", "ab"))
    first = [trace for trace in watch.steps if trace.tick == 0]
    assert [(trace.request, trace.batch) for trace in first] == [("abc", 2), ("abcabc", 2)]
    compile_ms = watch.times["abc"].compile_ms
    assert compile_ms > 1000.0
    assert all(times.wall_ms < compile_ms for times in watch.times.values())


@pytest.mark.parametrize("strategy", ["plain", "vllm", "trtllm", "llamacpp", "sglang", "deepinfer"])
def test_outputs_and_counts_do_not_depend_on_when_grammars_are_ready(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    slow_compiler(monkeypatch, abc=0.02, ab=0.01, abcabc=0.03)
    laws = random_law(LETTERS, 1), random_law(LETTERS, 2)
    requests = [*words("abc", "a", "abcabc"), request(LETTERS, GrammarSpec.choice(["ab", "b"]))]
    ahead, as_needed = (
        Toy(LETTERS, *laws, slots=2, sampling=Sampling(temperature=1.0), grammar=grammar).run(
            strategy, requests
        )
        for grammar in (GrammarConfig(), AS_NEEDED)
    )
    assert ahead.outputs == as_needed.outputs
    assert work(ahead) == work(as_needed)


def test_a_request_tells_which_engine_followed_it_v1_6e() -> None:
    table = toy_table("p0123456789")
    toy = Toy(table, random_law(table, 1), random_law(table, 2), engine="auto")
    odd, even = ({"enum": [1, 2]}, {"type": "number", "multipleOf": 2})
    grammars = [GrammarSpec.json_schema(odd), GrammarSpec.json_schema(even), None]
    watch = toy.run("vllm", [request(toy.table, g, f"{i}") for i, g in enumerate(grammars)])
    assert [watch.done[f"{i}"].engine for i in range(3)] == ["xgrammar", "llguidance", ""]


def test_an_engine_that_cannot_take_back_enough_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(XGrammarEngine, "max_rollback", 4)
    fits, more = (Toy(LETTERS, says("abc"), says("abc"), draft_tokens=k) for k in (3, 4))
    fits.loop(fits.strategy("vllm"))
    fits.loop(fits.strategy("sglang", jump_forward=False))
    more.loop(more.strategy("unguided"))
    with pytest.raises(ConfigError, match=r"^grammar\.engine: xgrammar .* 4 .* vllm .*5 tokens"):
        more.loop(more.strategy("vllm"))
    with pytest.raises(ConfigError, match="strategy sglang needs whole outputs"):
        fits.loop(fits.strategy("sglang"))


def test_looking_up_why_drafts_died_is_nobodys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(LETTERS, says("abc"), says("abc"))
    watch, loop = toy.loop(toy.strategy("llamacpp"))
    prepare = DecodeLoop._prepare

    def slowed(self: DecodeLoop, sequence: Sequence, times: Any) -> None:
        prepare(self, sequence, times)
        assert sequence.matcher is not None
        validate = sequence.matcher.inner.validate

        def slow(tokens: Any) -> int:
            time.sleep(0.05)
            return validate(tokens)

        sequence.matcher.inner.validate = slow  # type: ignore[method-assign]

    monkeypatch.setattr(DecodeLoop, "_prepare", slowed)
    loop.run([request(LETTERS, GrammarSpec.choice(["abc"]))])
    assert sum(trace.drafted for trace in watch.steps) > 0
    assert all(trace.host_us + trace.grammar_us < 40_000 for trace in watch.steps)
