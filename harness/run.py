"""One run: a pair, a workload and some strategies in, a run folder out."""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, cast

import pandas as pd
import torch
from transformers import PreTrainedModel

from harness.admission import Grammars
from harness.captures import Captures
from harness.clock import Clock
from harness.config import Config, chosen, options_of
from harness.core import Finish, Request, RequestTrace, Sequence, StepTrace
from harness.data_parallel.shard import WHOLE, Shard
from harness.drafters.base import Drafter
from harness.drafters.build import Parts, make_drafter, needed_pair
from harness.drafters.costs import step_costs
from harness.drafters.length import Costs
from harness.drafters.oracle import check_references, references_of
from harness.errors import ConfigError, RequestError
from harness.garbage import forget_set_up
from harness.grammar.matcher import TokenTable, Whitespace
from harness.grammar.reasoning import answer_ids
from harness.grammar.service import GrammarService, grammar_engine
from harness.grammar.vocabulary import check_token_bytes, token_table
from harness.loop import DecodeLoop, Times
from harness.models.causal_lm import CausalLM
from harness.models.graphs import StaticLM
from harness.models.language_model import LanguageModel
from harness.models.pair import Pair, load_pair
from harness.parallel.grammars import AgreedGrammars
from harness.parallel.ranks import ALONE, Ranks
from harness.results.record import Recorder
from harness.results.table import Table
from harness.results.viewer.tokens import TokenTexts, token_texts, used_ids
from harness.static_logits import Places
from harness.text import Codec, HFCodec, canonical_share, output_text
from harness.workloads.item import Item, to_request
from harness.workloads.loaders import load
from harness.workloads.validate import validate
from strategies.base import Setup, Strategy

Progress = Callable[[str], None]
"""Called with a strategy's name whenever it has finished a request."""


@dataclass(slots=True)
class Judge:
    """Turns what the loop saw into rows: an ``Observer`` for one strategy."""

    strategy: str
    engine: str
    items: dict[str, Item]
    table: TokenTable
    codec: Codec
    recorder: Recorder
    progress: Progress

    def step(self, trace: StepTrace) -> None:
        """See ``Observer``."""
        self.recorder.step(trace)

    def finished(self, sequence: Sequence, times: Times) -> None:
        """See ``Observer``."""
        item, ids = self.items[sequence.request.id], sequence.output_ids
        trace = self.blank(item, sequence.request)
        trace.output_tokens, trace.output_ids, trace.gaps = len(ids), list(ids), sequence.gaps
        trace.engine = sequence.engine or self.engine
        trace.text = output_text(self.table, ids)
        trace.finish, trace.error = str(sequence.finish), sequence.error or ""
        trace.complete = sequence.finish is Finish.STOP
        answer = output_text(self.table, answer_ids(sequence.request.trigger, ids))
        trace.valid = validate(item, trace.text, answer) if trace.complete else None
        trace.compile_ms, trace.ttft_ms, trace.wall_ms = (
            times.compile_ms,
            times.ttft_ms,
            times.wall_ms,
        )
        trace.tpot_ms = (times.wall_ms - times.ttft_ms) / max(1, len(ids) - 1)
        trace.jump_tokens, trace.retokenized = sequence.jump_tokens, sequence.retokenized
        trace.canonical_share = canonical_share(self.table, self.codec, ids)
        self.recorder.finished(trace)
        self.progress(self.strategy)

    def refused(self, item: Item) -> None:
        """An item that never became a request."""
        trace = self.blank(item, None)
        trace.finish, trace.error = str(Finish.FAILED), item.error
        self.recorder.finished(trace)
        self.progress(self.strategy)

    def blank(self, item: Item, request: Request | None) -> RequestTrace:
        """The columns that are known before anything runs."""
        return RequestTrace(
            strategy=self.strategy,
            request=item.id,
            kind=item.kind,
            grammar=item.grammar.kind if item.grammar else "none",
            engine=self.engine,
            seed=request.seed if request else 0,
            prompt_tokens=len(request.prompt_ids) if request else 0,
        )


class Run:
    """Everything of a run that is loaded once: pair, grammars, requests, one loop per strategy.

    Args:
        config: what to run.
        recorder: where the rows go.
        progress: called as requests finish.
        shard: the part of the workload that this process decodes; all is loaded, so that the
            caches of each are those of a run in one.
        ranks: that run it together; what only rank 0 knows (``recorder``) it tells.

    Raises:
        HarnessError: something in the config cannot be served.
    """

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        progress: Progress,
        shard: Shard = WHOLE,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self._recorder, self._shard = config, recorder, shard
        self._ranks = ranks
        self._clock = Clock()
        self._places = Places(Captures(self._clock), ranks)
        self._classes = chosen(config)
        drafts = any(each.uses_draft for each in self._classes)
        references = references_of(config.drafter, config.sampling) if drafts else {}
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        pair = load_pair(needed_pair(config.pair, config.drafter if drafts else None), ranks)
        self._pair_name = pair.name
        self._dtype = str(pair.target.dtype).removeprefix("torch.")
        items = load(config.workload, pair.tokenizer)
        table = token_table(pair.tokenizer, pair.stop_ids)
        whitespace = cast(Whitespace, config.grammar.whitespace)
        self._grammars = grammar_engine(config.grammar.engine, table, whitespace)
        check_token_bytes(self._grammars, pair.tokenizer)
        codec = HFCodec(pair.tokenizer)
        self._setup = Setup(config.sampling, config.engine.draft_tokens, table, codec)
        self.items, self.requests = self._requests(items, pair)
        if references:
            check_references(references, self.requests, str(config.drafter.reference))
        made = self._make_strategies()
        self._check_context(pair, made)
        self._target, self.draft_model = self._models(pair)
        self.costs = self._step_costs() if drafts else None
        self._parts = Parts(
            config.engine.draft_tokens,
            self._target.vocab_size,
            codec,
            self.draft_model,
            self._places,
            references,
            self.costs,
        )
        self.loops, self._judges = self._start(made, recorder, progress)

    @property
    def names(self) -> list[str]:
        """The strategies of this run, in the order of their turns."""
        return [loop.strategy.name for loop in self.loops]

    @property
    def mine(self) -> list[str]:
        """Ids of the items of this shard."""
        decoded = [request.id for turn in self._turns() for request in turn]
        return [*(item.id for item in self._refused()), *decoded]

    @property
    def workload(self) -> str:
        """Stands for all that is decoded, the items that cannot be among it."""
        refused = [(item.id, item.error) for item in self.items if item.error]
        return sha256(repr((self.requests, refused)).encode(errors="surrogatepass")).hexdigest()

    def go(self) -> None:
        """Decode everything that the recorder has not yet, strategies in turn: a few requests
        each, so that drift of the machine hits all alike."""
        done = self._ranks.gather(self._recorder.done)[0]
        for judge in self._judges:
            for item in self._refused():
                if (judge.strategy, item.id) not in done:
                    judge.refused(item)
        for requests in self._turns():
            for loop in self.loops:
                name = loop.strategy.name
                loop.run([each for each in requests if (name, each.id) not in done])

    def warm_up(self) -> None:
        """Run the first requests unrecorded where shapes are captured and kernels are loaded:
        whoever came first would pay for all. Nothing of it but the captures is kept."""
        if isinstance(self._target, StaticLM):
            loops, _ = self._start(self._make_strategies(), Recorder(), lambda _: None)
            for loop in loops:
                loop.run(self.requests[: self.config.engine.slots])
            forget_set_up()

    def _make_strategies(self) -> list[Strategy]:
        return [each(options_of(each, self.config), self._setup) for each in self._classes]

    def _start(
        self, made: SequenceOf[Strategy], recorder: Recorder, progress: Progress
    ) -> tuple[list[DecodeLoop], list[Judge]]:
        """A loop and its judge for each strategy, over the same models and one grammar cache."""
        own = GrammarService(self._grammars, self.config.grammar)
        service: Grammars = own if self._ranks.size == 1 else AgreedGrammars(own, self._ranks)
        by_id = {item.id: item for item in self.items}
        table, codec = self._setup.table, self._setup.codec
        judges = [
            Judge(each.name, self._grammars.name, by_id, table, codec, recorder, progress)
            for each in made
        ]
        loops = [
            DecodeLoop(
                self._target,
                self._drafter(each),
                each,
                service,
                self.config.engine,
                judge,
                self._clock,
                self._places,
                self._ranks,
            )
            for each, judge in zip(made, judges, strict=True)
        ]
        return loops, judges

    def setup(self) -> dict[str, Any]:
        """What a reader of the numbers has to know of the run, as it was resolved."""
        engine, sampling = self.config.engine, self.config.sampling
        return {
            "pair": self._pair_name,
            "dtype": self._dtype,
            "device": self._target.device.type,  # which of several is no setting
            "slots": engine.slots,
            "K": engine.draft_tokens,
            "drafter": self.config.drafter.label,
            "grammar": f"{self._grammars.name} ({self._grammars.whitespace} JSON)",
            "temperature": sampling.temperature,
            "workload": f"{self.config.workload.name} ({len(self.items)} items)",
        }

    def statistics(self) -> dict[str, dict[str, Any]]:
        """By strategy, what it counts as the engine that it mirrors would, if it does."""
        counted = {loop.strategy.name: loop.strategy.statistics() for loop in self.loops}
        return {name: own for name, own in counted.items() if own}

    def tables(self) -> list[Table]:
        """What is to be shown beside the comparison: nothing."""
        return []

    def vocabulary(self) -> TokenTexts:
        """The texts of all tokens."""
        table = self._setup.table
        return token_texts(table, self._setup.codec, range(len(table)))

    def token_texts(self, steps: pd.DataFrame) -> TokenTexts:
        """The texts of all tokens in the step rows, for readers without the tokenizer."""
        return token_texts(self._setup.table, self._setup.codec, used_ids(steps))

    def facts(self) -> dict[str, Any]:
        """What the engine did besides decoding: captured graphs, their time, the peak memory, and
        what an adaptive length took for the costs of a step."""
        captures = self._places.captures
        cuda = self._target.device.type == "cuda"
        return {
            "graphs": captures.graphs,
            "capture_s": captures.capture_s,
            "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
            **({} if self.costs is None else {"step_costs": asdict(self.costs)}),
        }

    def _turns(self) -> SequenceOf[SequenceOf[Request]]:
        """This shard's slices of the workload, ``engine.turn`` requests each. They are dealt out
        whole, so that who shares a batch does not depend on the number of shards. Alone, and
        without such a size, a strategy has all requests of the shard at once."""
        engine = self.config.engine
        size = engine.turn or (engine.slots if len(self.loops) > 1 else 0)
        if not size:
            return [self._shard.take(self.requests)]
        starts = range(0, len(self.requests), size)
        return self._shard.take([self.requests[start : start + size] for start in starts])

    def _refused(self) -> SequenceOf[Item]:
        """This shard's items that cannot be served."""
        return self._shard.take([item for item in self.items if item.error])

    def _requests(self, items: SequenceOf[Item], pair: Pair) -> tuple[list[Item], list[Request]]:
        """All items, and the requests of those that can be served; the others get an error."""
        kept, requests = [], []
        bound, seed = self.config.workload.max_new_tokens, self.config.seed
        for item in items:
            refused = item.error
            try:
                if not refused:
                    requests.append(to_request(item, pair.tokenizer, bound, seed))
            except RequestError as error:
                refused = str(error)
            kept.append(replace(item, error=refused))
        return kept, requests

    def _check_context(self, pair: Pair, made: SequenceOf[Strategy]) -> None:
        """Size the caches: what the workload needs, within what the models can.

        Raises:
            ConfigError: not one request fits.
        """
        self.reserve = max(each.reserve for each in made)
        needed = [len(r.prompt_ids) + r.max_new_tokens + self.reserve for r in self.requests]
        context = min(
            model.config.get_text_config(decoder=True).max_position_embeddings
            for model in (pair.target, pair.draft)
            if model is not None
        )
        limit = self.config.engine.max_length or context
        if limit > context:
            raise ConfigError(
                f"engine.max_length: {limit} exceeds the models' context of {context}; lower it"
            )
        if self.reserve >= limit:
            raise ConfigError(
                f"engine.draft_tokens: {self.config.engine.draft_tokens} drafts do not fit the "
                f"context of {limit}; draft fewer"
            )
        self.max_length = min(limit, max(needed, default=1))

    def _models(self, pair: Pair) -> tuple[LanguageModel, LanguageModel | None]:
        """The two models over caches of the workload's size."""
        target = self._engine(pair, pair.target)
        return target, self._engine(pair, pair.draft) if pair.draft is not None else None

    def _step_costs(self) -> Costs | None:
        """What an adaptive length reckons with: what rank 0 has measured, on all."""
        drafter, engine = self.config.drafter, self.config.engine
        if drafter.length != "adaptive":
            return None
        self._ranks.meet()  # one may read its weights still, and forwards wait less long for it
        costs = step_costs(
            drafter, self._target, self.draft_model, engine.slots, engine.draft_tokens
        )
        return self._ranks.gather(costs)[0]

    def _drafter(self, strategy: Strategy) -> Drafter | None:
        """One of its own, for a drafter learns from what became of its drafts."""
        return make_drafter(self.config.drafter, self._parts) if strategy.uses_draft else None

    def _engine(self, pair: Pair, model: PreTrainedModel) -> LanguageModel:
        """A model as ``engine.mode`` wants it."""
        engine = self.config.engine
        eager = CausalLM(model, pair.vocab_size, engine.slots, self.max_length)
        on_cuda = eager.device.type == "cuda"
        if engine.mode == "graphs" or (engine.mode == "auto" and on_cuda):
            return StaticLM(eager, 1 + engine.draft_tokens, self._places, engine.compile)
        return eager


def all_failed(recorder: Recorder) -> str | None:
    """The first reason, if not one request could be served."""
    requests = recorder.requests
    if requests and all(trace.error for trace in requests):
        return f"no request could be served; the first reason: {requests[0].error}"
    return None if requests else "workload: it has no items; choose another or raise its limits"
