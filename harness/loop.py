"""The decode loop; the one place where time passes.

Life of a request: ① it waits until its grammar is compiled and a slot is free; ② a matcher is
made; ③ its prompt is fed and the first token sampled (a step without drafts); then, step by
step, ④ the strategy may jump, ⑤ drafts are proposed, ⑥ the target's forward is launched and the
mask rows are filled meanwhile, ⑦ the drafts are verified and the output grows up to its stop,
⑧ the matchers follow, while the next step's first forward runs already; until ⑨ it stops, is
long enough or fails, and its slot is free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass
from threading import get_ident
from typing import Protocol

import torch

from harness.accounting import Books, close_books, ledger, trace_step
from harness.admission import Admission, Grammars
from harness.clock import Clock
from harness.core import (
    PAD,
    Finish,
    Ledger,
    Proposal,
    Request,
    Sequence,
    StepTrace,
)
from harness.detail import DetailedVerifier
from harness.drafters.base import Drafter, SteppedDrafter
from harness.engine import EngineConfig
from harness.errors import ConfigError, DeadEnd
from harness.garbage import Garbage
from harness.grammar.masks import MaskBuffer
from harness.grammar.matcher import GrammarEngine
from harness.grammar.pool import GrammarPool
from harness.grammar.tracked import TrackedMatcher
from harness.invariants import Invariants
from harness.models.graphs import StaticLM
from harness.models.language_model import LanguageModel, RowInput
from harness.parallel.agreement import Agreement
from harness.parallel.ranks import ALONE, Ranks
from harness.static_logits import Places
from harness.step import Step, isolate
from strategies.base import Strategy


class Observer(Protocol):
    """Who writes down what the loop does."""

    def step(self, trace: StepTrace) -> None:
        """One sequence did one step; told while the next step runs, or before a request ends."""

    def finished(self, sequence: Sequence, times: Times) -> None:
        """One request is done, whatever its end."""


@dataclass(slots=True)
class Times:
    """When things happened to one request, ms.

    Attributes:
        compile_ms: what compiling its grammar took; 0 where that was done already.
        ttft_ms, wall_ms: to the first and the last token, from when it could have had a slot. A
            grammar that was not ready then delays its own request; others do not wait for it.
    """

    compile_ms: float = 0.0
    ttft_ms: float = 0.0
    wall_ms: float = 0.0


class DecodeLoop:
    """Decodes requests with one strategy.

    Args:
        target: the model whose law counts.
        drafter: where drafts come from; None for strategies that use none.
        strategy: how grammar and drafts share the loop.
        grammars: compiles specs.
        config: slots and draft length.
        observer: gets every trace.
        clock: shared with the models, so that their captures are not taken for work.
        places: where the models' logits stay, if they do.
        ranks: that run this same loop.

    Attributes:
        running: the sequences that are in a slot.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        strategy: Strategy,
        grammars: Grammars,
        config: EngineConfig,
        observer: Observer,
        clock: Clock,
        places: Places | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if strategy.uses_draft and drafter is None:
            raise ConfigError(f"drafter: strategy {strategy.name} drafts; give it a drafter")
        _check_rollback(strategy, grammars.engine)
        self.target, self.strategy, self.grammars = target, strategy, grammars
        self.drafter = drafter if strategy.uses_draft else None
        self.config, self.observer = config, observer
        self.clock, self._places = clock, places
        vocab_size, device = target.vocab_size, target.device
        self._masks = MaskBuffer(config.slots, strategy.reserve, vocab_size, device, places)
        pruned = drafter.draft_vocabulary if isinstance(drafter, SteppedDrafter) else None
        self._draft_masks = MaskBuffer(config.slots, 1, vocab_size, device, places, pruned)
        self._stop_ids = strategy.setup.table.stop_ids
        self._free = list(range(config.slots - 1, -1, -1))
        self._queue = Admission(grammars, strategy.constrained, config.slots)
        self._times: dict[int, Times] = {}
        self._tick = 0
        self._unwritten: tuple[Step, list[Books], dict[str, float], int] | None = None
        self._pool = GrammarPool(config.grammar_threads, clock)
        self._detailed = DetailedVerifier(strategy.verifier, clock) if config.detail else None
        if self._detailed is not None:
            strategy.verifier = self._detailed
        self._invariants = Invariants(strategy.follows, vocab_size, clock, config.paranoid)
        self._ranks, self._agreement = ranks, Agreement(ranks)
        self._garbage = Garbage()
        self.running: list[Sequence] = []

    def run(self, requests: Iterable[Request]) -> None:
        """Decode all requests; a slot that becomes free is refilled at once."""
        self.submit(requests)
        try:
            with self._garbage.paused():
                while self.advance():
                    pass
        finally:
            self._write_traces()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests behind those that wait already; see ``grammar.ahead``."""
        self._queue.add(requests)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Fill the free slots, then do one step of everything that runs.

        Returns:
            False when there was nothing to do.
        """
        self.clock.thread = get_ident()
        if admitted := self._admit():
            self._iterate(admitted, prefill=True)
        elif self.running:
            self._iterate(self.running, prefill=False)
        elif len(self._queue):
            self._await_grammar()
        else:
            self._write_traces()
            return False
        self._retire()
        return True

    def _admit(self) -> list[Sequence]:
        """Move requests into free slots; one that cannot be served ends here."""
        admitted = []
        self._queue.look_ahead()
        while self._free and (waiting := self._queue.next_ready()):
            sequence = Sequence(waiting.request, self._free.pop())
            times = self._times[sequence.slot] = Times(wall_ms=waiting.delay_ms)
            self.running.append(sequence)
            with isolate(sequence):
                self._prepare(sequence, times)
            if sequence.error is None:
                admitted.append(sequence)
            else:
                self._retire()
        return admitted

    def _await_grammar(self) -> None:
        """Nothing runs and no grammar is ready: sleep until the first one is."""
        self._write_traces()
        with self.clock.span("wait") as span:
            self._queue.wait()
        self._queue.delay(span.us / 1e3, len(self._free))

    def _prepare(self, sequence: Sequence, times: Times) -> None:
        """Check the length and make the matcher.

        Raises:
            HarnessError: the request cannot be served.
        """
        request = sequence.request
        needed = len(request.prompt_ids) + request.max_new_tokens + self.strategy.reserve
        if not request.prompt_ids:
            raise ConfigError("prompt: it has no tokens; give at least one")
        if (unknown := _unknown(request.prompt_ids, 0, self.target.vocab_size)) is not None:
            raise ConfigError(
                f"prompt: {unknown} is no token of this vocabulary; encode it with the pair's own"
            )
        if needed > self.target.max_length:
            raise ConfigError(
                f"prompt: {len(request.prompt_ids)} tokens, {request.max_new_tokens} new ones "
                f"and {self.strategy.reserve} for drafts exceed the context of "
                f"{self.target.max_length}; shorten the prompt or raise engine.max_length"
            )
        if request.grammar is not None and self.strategy.constrained:
            compiled, times.compile_ms = self.grammars.compile(request.grammar)
            sequence.engine = compiled.engine
            matcher = self.strategy.matcher(compiled, request.trigger)
            sequence.matcher = TrackedMatcher(matcher, self.clock)

    def _iterate(self, sequences: list[Sequence], prefill: bool) -> None:
        """One step of one batch."""
        self.clock.resume("step")
        name = f"step {self._tick} of {self.strategy.name}"
        with self.clock.span("step"), self._ranks.step(name):
            if prefill:
                self._invariants.begin(sequences)
            step, before, hidden_us = self._step(sequences, prefill)
            self._invariants.check(step.sequences)
            self._agreement.check(step)
            closed = [close_books(step, index, was) for index, was in enumerate(before)]
        self._close(step, closed, hidden_us)
        if step.ran_ahead and any(each.finish is None for each in self.running):
            self.clock.leave()  # the device works, so the time until their next step counts

    def _step(self, sequences: list[Sequence], prefill: bool) -> tuple[Step, list[Ledger], float]:
        """Draft, verify, emit and commit.

        Returns:
            The step, the ledgers before it, and the grammar time that the device did not wait for.
        """
        step = Step(
            sequences=list(sequences),
            masks=self._masks,
            draft_masks=self._draft_masks,
            drafter=self.drafter,
            prefill=prefill,
            pool=self._pool,
            places=self._places,
        )
        before = [ledger(sequence) for sequence in step.sequences]
        self._masks.clear()
        self._propose(step)
        launched = self._grammar_us
        with self.clock.span("verify"):
            logits = self.target.forward(_row_inputs(step.sequences, step.proposals))
        self.strategy.verify_rows(step)
        hidden_us = self._hidden(launched)
        self._write_traces()
        doomed = {i for i, each in enumerate(step.sequences) if each.error is not None}
        with self.clock.span("verify"):
            step.verdicts = self.strategy.verify(step, logits)
        if self._detailed is not None:
            step.details = self._detailed.take(step.masks)
        self._emit(step, doomed)
        step.ran_ahead = self._run_ahead()
        launched = self._grammar_us
        self.strategy.commit(step)
        return step, before, hidden_us + self._hidden(launched)

    def _propose(self, step: Step) -> None:
        """Jump and draft; in the prefill step the drafter reads the prompts."""
        if not step.prefill:
            self.strategy.before_step(step)
        with self.clock.span("draft"):
            if not step.prefill:
                self.strategy.propose(step)
            elif self.drafter is not None:
                self.drafter.prefill(step.sequences)
        most = self.strategy.reserve - 1
        for index, (sequence, proposal) in enumerate(
            zip(step.sequences, step.proposals, strict=True)
        ):
            # Any of these would end the verification of the whole batch.
            if fault := _fault(proposal, most, self.target.vocab_size):
                sequence.fail(fault)
                step.proposals[index] = Proposal()

    def _run_ahead(self) -> bool:
        """Launch what the next step begins with, so that the device works while this one is
        booked: not where a request ends and perhaps another begins, or outputs may change, nor
        where what is checked meanwhile is not timed."""
        if self.config.paranoid or self.strategy.rewrites:
            return False
        if any(each.finish is not None for each in self.running):
            return False
        if self._free and len(self._queue):  # whose grammar may be ready then
            return False
        if self.drafter is not None:
            with self.clock.span("draft"):
                return self.drafter.run_ahead(self.running)
        if not isinstance(self.target, StaticLM):
            return False
        with self.clock.span("verify"):
            plain = [Proposal()] * len(self.running)
            return self.target.run_ahead(_row_inputs(self.running, plain))

    @property
    def _grammar_us(self) -> float:
        return self.clock.us.get("grammar", 0.0)

    def _hidden(self, launched: float) -> float:
        """Grammar time since a launch that the device did not wait for, µs.

        On the CPU the forward is over when it returns: nothing is hidden. On CUDA all of it
        is if the device is still busy now, else none is counted (a lower bound).

        Args:
            launched: grammar time at the launch.
        """
        if self.target.device.type != "cuda":
            return 0.0
        busy = not torch.cuda.current_stream(self.target.device).query()
        return self._grammar_us - launched if busy else 0.0

    def _emit(self, step: Step, doomed: set[int]) -> None:
        """Append to each output what was emitted, up to its stop (V1.4a, leftmost stop: R11).

        Args:
            doomed: sequences that failed before the verification, whose rows mean nothing.
        """
        for index, (sequence, verdict) in enumerate(
            zip(step.sequences, step.verdicts, strict=True)
        ):
            if index in doomed:
                continue
            kept, finish = self._cut(verdict.emitted, sequence.remaining)
            legal = _before_dead_end(step, index)
            if len(kept) > legal:
                kept, finish = kept[:legal], None
                sequence.fail(str(DeadEnd()))
            elif not kept:
                sequence.fail("no token has a finite logit; check the model")
            sequence.finish = sequence.finish or finish
            step.kept[index] = kept
            # The last token has no keys and values yet, also where a draft of its name has.
            cached = min(verdict.accepted, max(0, len(kept) - 1))
            if step.proposals[index].parents is not None:
                self.target.keep_path(sequence.slot, sequence.length, verdict.path[:cached])
            sequence.target_length = sequence.length + cached
            if self.drafter is not None:
                self.drafter.settle(sequence, step.proposals[index], verdict, kept)
            sequence.drawn = sequence.draw_position + len(kept)
            sequence.output_ids.extend(kept)
            sequence.gaps.extend(verdict.gaps[: len(kept)])

    def _cut(self, tokens: list[int], remaining: int) -> tuple[list[int], Finish | None]:
        for count, token in enumerate(tokens[:remaining], start=1):
            if token in self._stop_ids:
                return tokens[:count], Finish.STOP
        return tokens[:remaining], Finish.LENGTH if len(tokens) >= remaining else None

    def _close(self, step: Step, closed: list[Books], hidden_us: float) -> None:
        """Take the times of a step; its traces are written later."""
        times = self.clock.take()
        for phase in ("capture", "audit", "wait"):  # no part of the step
            times.pop(phase, None)
        share = 1 / len(step.sequences)
        grammar_us = times.get("grammar", 0.0)
        spent = {
            "draft_us": times.get("draft", 0.0) * share,
            "verify_us": times.get("verify", 0.0) * share,
            "grammar_us": grammar_us * share,
            "exposed_us": (grammar_us - hidden_us) * share,
            "host_us": times.get("step", 0.0) * share,
        }
        step_ms = sum(times.values()) / 1e3
        for other in self.running:
            self._times[other.slot].wall_ms += step_ms
        self._queue.delay(step_ms, len(self._free))
        for sequence in step.sequences:
            sequence.steps += 1
            if step.prefill:
                self._times[sequence.slot].ttft_ms = self._times[sequence.slot].wall_ms
        self._unwritten = step, closed, spent, self._tick
        self._tick += 1

    def _write_traces(self) -> None:
        """Hand the last step's traces to the observer: while the device is busy, or where a
        request has ended between two steps, which is nobody's time."""
        if self._unwritten is None:
            return
        step, closed, spent, tick = self._unwritten
        self._unwritten = None
        for index, books in enumerate(closed):
            trace = trace_step(step, index, books, self.strategy.name, tick)
            for name, value in spent.items():
                setattr(trace, name, value)
            self.observer.step(trace)

    def _retire(self) -> None:
        """Free the slots of finished sequences; their last traces come before their end."""
        finished = [each for each in self.running if each.finish is not None]
        if finished:
            self._write_traces()
        for sequence in finished:
            self.running.remove(sequence)
            self._free.append(sequence.slot)
            self.observer.finished(sequence, self._times.pop(sequence.slot))
        # Only one that failed behind a launch ends while the device works on, for the others.
        if finished and not self.clock.left:
            self._garbage.collect()


def _check_rollback(strategy: Strategy, engine: GrammarEngine) -> None:
    """A strategy takes back its drafts and one more token, or all that it wrote (S1).

    Raises:
        ConfigError: the engine's matchers cannot take back as many.
    """
    limit = engine.max_rollback
    if limit is None or not strategy.constrained:
        return
    needed = 1 + strategy.setup.draft_tokens
    if strategy.rewrites or needed > limit:
        what = "whole outputs" if strategy.rewrites else f"{needed} tokens"
        raise ConfigError(
            f"grammar.engine: {engine.name} can take back {limit} tokens, strategy {strategy.name} "
            f"needs {what}; use xgrammar or llguidance"
        )


def _fault(proposal: Proposal, most: int, vocab_size: int) -> str | None:
    """Why this proposal cannot be verified, if so."""
    drafts = len(proposal.tokens)
    if drafts > most:
        return f"{drafts} drafts where there is room for {most}"
    if proposal.q is not None and len(proposal.q) != drafts:
        return f"laws of {len(proposal.q)} drafts beside {drafts} drafts"
    if proposal.parents is not None and len(proposal.parents) != drafts:
        return f"parents of {len(proposal.parents)} drafts beside {drafts} drafts"
    unknown = _unknown(proposal.tokens, PAD, vocab_size)
    return None if unknown is None else f"draft {unknown} is no token of this vocabulary"


def _unknown(tokens: SequenceOf[int], least: int, vocab_size: int) -> int | None:
    """The first token that is neither in the vocabulary nor padding that ``least`` allows."""
    return next((token for token in tokens if not least <= token < vocab_size), None)


def _row_inputs(sequences: SequenceOf[Sequence], proposals: SequenceOf[Proposal]) -> list[RowInput]:
    """Pending tokens, then drafts; padding is fed as token 0, its row is never reached."""
    return [
        RowInput(
            slot=sequence.slot,
            start=sequence.target_length,
            tokens=sequence.target_pending + [max(token, 0) for token in proposal.tokens],
            logits=1 + len(proposal.tokens),
            parents=proposal.parents,
        )
        for sequence, proposal in zip(sequences, proposals, strict=True)
    ]


def _before_dead_end(step: Step, index: int) -> int:
    """How many emitted tokens come from rows in which something is legal (T7)."""
    path = step.verdicts[index].path
    if not step.masks.any_dead:
        return 1 + len(path)
    alive = [not step.masks.dead(index, row) for row in (0, *(node + 1 for node in path))]
    return alive.index(False) if False in alive else len(alive)
