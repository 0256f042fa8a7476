"""Work on many sequences at once: each job done once, failing alone, with the same results."""

from __future__ import annotations

import gc
import subprocess
import sys
from random import Random
from threading import (
    Barrier,
    current_thread,
    enumerate as live_threads,
    get_ident,
    main_thread,
)
from weakref import ref

import pytest

from harness.clock import Clock
from harness.core import Request, Sequence
from harness.errors import ConfigError
from harness.grammar.pool import GrammarPool, Job
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from tests.grammar.languages import allowed, row

GRAMMARS = [
    GrammarSpec.regex('(a|b|ab|"é"){0,30}x'),
    GrammarSpec.regex("(x(Q|a)?|b){0,30}"),  # with dead ends: no token spells Q
    GrammarSpec.ebnf('root ::= "{" root* "}" | "a:" [ab"]*'),
    GrammarSpec.json_schema({"type": "object", "properties": {"a": {"enum": [1, 11]}}}),
]

INTERRUPTED = """
from threading import Barrier, current_thread, main_thread
from time import sleep
from harness.clock import Clock
from harness.core import Request, Sequence
from harness.grammar.pool import GrammarPool
from harness.grammar.service import grammar_engine
from harness.grammar.spec import GrammarSpec
from tests.grammar.languages import TABLE

def work(index, sequence, matcher):
    both.wait()
    if current_thread() is main_thread():
        sleep(0.05)
        raise SystemExit
    matcher._inner.accept_string("a" * 1_000_000)

both = Barrier(2)
grammar = grammar_engine("xgrammar", TABLE).compile(GrammarSpec.regex("a*"))
pool = GrammarPool(2, Clock())
jobs = [(i, Sequence(Request("r", (0,), None, 1), i), grammar.matcher()) for i in range(2)]
pool.each(jobs, work)
"""
"""A process that ends while a helper is in an engine's code, half a second before it is out."""


def batch(engine, count, clock, grammar=GRAMMARS[0]):
    """Jobs on forks of one compiled grammar."""
    compiled = engine.compile(grammar)
    return [
        (
            slot,
            Sequence(Request(f"r{slot}", (0,), None, 1), slot),
            TrackedMatcher(compiled.matcher(), clock),
        )
        for slot in range(count)
    ]


def wander(matcher: TrackedMatcher, seed: int) -> list[tuple[object, ...]]:
    """Random accepts and rollbacks, and what the matcher says on the way."""
    random, said = Random(seed), []
    for _ in range(60):
        may = sorted(allowed(row(matcher)) if not matcher.terminated else ())
        tokens = [random.choice(may)] if may else []
        accepted = matcher.accept(tokens)
        back = random.randrange(1 + min(3, matcher.held)) if random.random() < 0.4 else 0
        matcher.rollback(back, "preview")
        said.append((may, tokens, accepted, matcher.validate([1, 5, 8]), back, matcher.held))
    return said


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text)
def test_forks_of_one_grammar_answer_many_threads_as_they_answer_one(engine, grammar):
    results = []
    for threads in (1, 8):
        pool, said = GrammarPool(threads, Clock()), {}

        def work(index, sequence, matcher, said=said):
            said[index] = wander(matcher, index)

        jobs = batch(engine, 24, Clock(), grammar)
        pool.each(jobs, work)
        assert not any(sequence.error for _, sequence, _ in jobs)
        results.append(said)
    assert len(results[0]) == 24
    assert results[0] == results[1]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_every_job_is_done_once_before_the_batch_returns(engine, threads, count):
    pool, clock = GrammarPool(threads, Clock()), Clock()
    jobs = batch(engine, count, clock)
    for _ in range(20):
        done: list[Job] = []
        pool.each(iter(jobs), lambda *job, done=done: done.append(job))
        assert sorted(done, key=lambda job: job[0]) == jobs


def test_as_many_jobs_as_threads_run_at_once(engine):
    meeting = Barrier(3, timeout=20)
    jobs = batch(engine, 3, Clock())
    GrammarPool(3, Clock()).each(jobs, lambda *_: meeting.wait())
    assert [sequence.error for _, sequence, _ in jobs] == [None] * 3


@pytest.mark.parametrize(("threads", "count"), [(1, 4), (4, 1)])
def test_one_thread_or_one_job_is_not_handed_over(engine, threads, count, monkeypatch):
    pool, seen = GrammarPool(threads, Clock()), []
    monkeypatch.setattr(pool, "_inbox", None)  # handing over would fail
    pool.each(batch(engine, count, Clock()), lambda *_: seen.append(get_ident()))
    assert seen == [get_ident()] * count


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_job_raises_ends_its_own_sequence(engine, threads):
    def work(index, sequence, matcher):
        if index % 2:
            raise RuntimeError("the engine broke")

    pool = GrammarPool(threads, Clock())
    for _ in range(3):  # no helper is lost by it
        jobs = batch(engine, 6, Clock())
        pool.each(jobs, work)
        broken = [index for index, sequence, _ in jobs if sequence.error]
        assert broken == [1, 3, 5]
    assert jobs[1][1].error == "RuntimeError: the engine broke"


@pytest.mark.parametrize("threads", [1, 2])
def test_what_no_sequence_answers_for_is_raised_to_whoever_waits(engine, threads):
    meeting = Barrier(threads, timeout=20)

    def work(index, sequence, matcher):
        meeting.wait()
        if threads == 1 or current_thread() is not main_thread():
            raise KeyboardInterrupt

    pool, jobs = GrammarPool(threads, Clock()), batch(engine, threads, Clock())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pool.each(jobs, work)
    assert not any(sequence.error for _, sequence, _ in jobs)


def test_a_batch_is_one_stretch_of_grammar_time_however_many_threads_share_it(engine):
    clock, meeting = Clock(), Barrier(2, timeout=20)
    pool = GrammarPool(2, clock)

    def work(index, sequence, matcher):
        meeting.wait()  # two at once, so that their times overlap
        for _ in range(200):
            row(matcher)

    jobs = batch(engine, 2, clock)
    with clock.span("verify") as whole:
        pool.each(jobs, work)
    assert clock.us.keys() == {"verify", "grammar"}
    assert sum(clock.us.values()) == pytest.approx(whole.us)
    for _, sequence, matcher in jobs:
        assert sequence.error is None
        assert len(matcher.fill_us) == 200
        assert sum(matcher.fill_us) < clock.us["grammar"]


@pytest.mark.parametrize("threads", [0, -1])
def test_a_pool_of_no_threads_is_refused(threads):
    with pytest.raises(ConfigError, match=r"engine\.grammar_threads"):
        GrammarPool(threads, Clock())


def test_helpers_end_with_their_pool_and_keep_nothing_of_its_batches(engine):
    before = set(live_threads())
    pool, meeting = GrammarPool(4, Clock()), Barrier(4, timeout=20)
    assert len(set(live_threads()) - before) == 3
    jobs = batch(engine, 4, Clock())
    pool.each(jobs, lambda *_, pool=pool: meeting.wait())
    gone = ref(jobs[0][2])
    del pool, jobs
    gc.collect()
    assert gone() is None
    assert set(live_threads()) <= before


def test_a_process_that_is_interrupted_waits_for_its_helpers_to_leave_the_engine():
    """A thread that the interpreter ends inside an engine's code takes the process with it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
