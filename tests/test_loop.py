"""What the loop does for every strategy alike: failures, draws, times."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness.core import Finish, Sequence
from harness.grammar.service import GrammarService
from harness.grammar.spec import GrammarSpec
from harness.loop import DecodeLoop
from harness.models.sampling import Sampling
from harness.step import Step
from strategies.sglang import Sglang
from tests.toys import Toy, random_law, request, toy_table

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


def test_compiling_counts_into_the_time_to_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = GrammarService.compile
    spans: dict[str, float] = {}

    def slow(self: GrammarService, spec: GrammarSpec) -> Any:
        compiled, _ = original(self, spec)
        return compiled, 1_000.0

    monkeypatch.setattr(GrammarService, "compile", slow)
    toy = Toy(LETTERS, says("abc"), says("abc"))
    watch, loop = toy.loop(toy.strategy("plain"))
    finished = watch.finished

    def note(sequence: Sequence, times: Any) -> None:
        spans.update(ttft=times.ttft_ms, wall=times.wall_ms)
        finished(sequence, times)

    monkeypatch.setattr(watch, "finished", note)
    loop.run([request(LETTERS, GrammarSpec.choice(["abc"]))])
    assert 1_000.0 < spans["ttft"] <= spans["wall"]


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
