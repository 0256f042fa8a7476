"""Outputs of the target itself, by the harness's own decode loop: strategy ``plain``, no drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import strategies
from experiments.distill.masks import Governed, Grammars, MaskTable
from experiments.distill.prompts import Record, source, to_item
from experiments.distill.sequences import TokenSequence, sequence
from harness.captures import Captures
from harness.clock import Clock
from harness.core import Request, Sequence, StepTrace
from harness.engine import EngineConfig
from harness.errors import HarnessError
from harness.grammar.matcher import Whitespace
from harness.grammar.vocabulary import token_table
from harness.loop import DecodeLoop, Times
from harness.models.causal_lm import CausalLM
from harness.models.graphs import StaticLM
from harness.models.language_model import LanguageModel
from harness.models.pair import Pair
from harness.models.sampling import Sampling
from harness.static_logits import Places
from harness.text import HFCodec
from harness.workloads.item import to_request
from strategies.base import Setup

STRATEGY = "plain"


class Mode(NamedTuple):
    """How outputs are made.

    Attributes:
        whitespace: of JSON under a grammar; None = no grammar at all, a free sample.
        temperature: 0 = greedy.
    """

    whitespace: Whitespace | None
    temperature: float

    @property
    def name(self) -> str:
        """For tables, and for the ``source`` of sequences."""
        law = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{self.whitespace or 'no grammar'}, {law}"


@dataclass(slots=True)
class _Outputs:
    """An ``Observer`` that keeps what was decoded."""

    by_request: dict[str, list[int]] = field(default_factory=dict)
    ended: int = 0
    requests: int = 0
    told: Callable[[str], None] = lambda what: None

    def begin(self, requests: int, told: Callable[[str], None]) -> None:
        """Forget the last requests."""
        self.by_request, self.ended, self.requests, self.told = {}, 0, requests, told

    def step(self, trace: StepTrace) -> None:
        """See ``Observer``."""

    def finished(self, sequence: Sequence, times: Times) -> None:
        """See ``Observer``. A request that failed has no output."""
        if sequence.error is None:
            self.by_request[sequence.request.id] = sequence.output_ids
        self.ended += 1
        self.told(f"{self.ended} of {self.requests} requests")


class Decoder:
    """The target behind decode loops, one for each way of making outputs.

    Args:
        pair: only its target is used.
        slots: sequences decoded at once.
        max_length: tokens a slot holds.
        max_new_tokens: bound of an output.

    Attributes:
        grammars: of the target's vocabulary.
    """

    def __init__(self, pair: Pair, slots: int, max_length: int, max_new_tokens: int) -> None:
        self._pair, self._slots = pair, slots
        self._max_length, self._max_new_tokens = max_length, max_new_tokens
        self._clock = Clock()
        self._places = Places(Captures(self._clock))
        eager = CausalLM(pair.target, pair.vocab_size, slots, max_length)
        self._target: LanguageModel = eager
        if eager.device.type == "cuda":
            self._target = StaticLM(eager, decode_width=1, places=self._places)
        self._table = token_table(pair.tokenizer, pair.stop_ids)
        self.grammars = Grammars(self._table)
        self._loops: dict[Mode, tuple[DecodeLoop, _Outputs]] = {}

    def decode(
        self,
        records: SequenceOf[Record],
        mode: Mode,
        seed: int,
        table: MaskTable,
        told: Callable[[str], None],
    ) -> list[TokenSequence]:
        """The outputs of one mode behind their prompts, in the order of the records.

        A record is left out if its prompt does not fit a slot, or its grammar does not compile.

        Args:
            records: with ids of their own.
            mode: of all of them.
            seed: of the draws.
            table: takes the masks.
            told: called when a request has ended, with how many have.
        """
        if mode not in self._loops:
            self._loops[mode] = self._loop(mode)
        loop, outputs = self._loops[mode]
        made = [(record, self._request(record, mode, seed)) for record in records]
        requests = {request.id: (record, request) for record, request in made if request}
        outputs.begin(len(requests), told)
        loop.run([request for _, request in requests.values()])
        found = [
            (each, Governed(each.output, request.grammar, mode.whitespace or "compact"))
            for name, (record, request) in requests.items()
            if (output := outputs.by_request.get(name))
            and (each := self._sequence(record, request, mode, output))
        ]
        rows = self.grammars.follow([governed for _, governed in found], table)
        return [each._replace(rows=own) for (each, _), own in zip(found, rows, strict=True)]

    def _sequence(
        self, record: Record, request: Request, mode: Mode, output: list[int]
    ) -> TokenSequence | None:
        made_by, length = source(record, mode.name), self._max_length
        return sequence(request.id, made_by, request.prompt_ids, output, length)

    def _request(self, record: Record, mode: Mode, seed: int) -> Request | None:
        """The request of a record, without its grammar if the mode has none; None if there is no
        such request."""
        try:
            tokenizer = cast(Any, self._pair.tokenizer)
            made = to_request(to_item(record), tokenizer, self._max_new_tokens, seed)
        except HarnessError:
            return None
        if len(made.prompt_ids) + made.max_new_tokens >= self._max_length:
            return None
        return made if mode.whitespace else replace(made, grammar=None)

    def _loop(self, mode: Mode) -> tuple[DecodeLoop, _Outputs]:
        """Kept for the rounds to come: what it captures on its way stays captured."""
        strategy, observer = strategies.find(STRATEGY), _Outputs()
        setup = Setup(Sampling(mode.temperature), 1, self._table, HFCodec(self._pair.tokenizer))
        loop = DecodeLoop(
            self._target,
            None,
            strategy(strategy.Options(), setup),
            self.grammars.service(mode.whitespace or "compact"),
            EngineConfig(slots=self._slots, draft_tokens=1),
            observer,
            self._clock,
            self._places,
        )
        return loop, observer
