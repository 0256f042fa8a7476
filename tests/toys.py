"""A vocabulary of a few tokens and a model made of a table: any rule in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import strategies
from harness.clock import Clock
from harness.core import Finish, Request, RequestTrace, Sequence, StepTrace
from harness.draft_vocabulary import DraftVocabulary
from harness.drafters.base import Drafter
from harness.drafters.model import ModelDrafter
from harness.engine import EngineConfig
from harness.grammar.matcher import GrammarEngine, TokenTable
from harness.grammar.service import GrammarConfig, GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.loop import DecodeLoop, Times
from harness.models.language_model import LanguageModel, RowInput
from harness.models.sampling import Sampling
from strategies.base import Setup, Strategy

Law = Callable[[tuple[int, ...]], SequenceOf[float]]
"""Logits ``[vocab]`` from all tokens so far."""

ENGINES = ("xgrammar", "llguidance")


def toy_table(tokens: Iterable[str]) -> TokenTable:
    """A table of the given tokens, then EOS as the last id."""
    pieces = [token.encode() for token in tokens]
    eos = len(pieces)
    return TokenTable((*pieces, b""), frozenset({eos}), eos)


def ids(table: TokenTable, *tokens: str) -> list[int]:
    """Ids of tokens written as text; ``$`` is EOS."""
    return [
        table.eos_id if token == "$" else table.ids_by_bytes[token.encode()] for token in tokens
    ]


class ToyCodec:
    """Longest-match tokenizer over a table."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table

    def encode(self, text: str) -> list[int]:
        return self.table.encode_greedily(text.encode())

    def decode(self, tokens: SequenceOf[int]) -> str:
        return b"".join(self.table.tokens[token] for token in tokens).decode(errors="replace")


def random_law(table: TokenTable, seed: int, memory: int = 3, scale: float = 2.0) -> Law:
    """Logits drawn from the last ``memory`` tokens: as arbitrary as a model can be."""
    known: dict[tuple[int, ...], list[float]] = {}

    def law(tokens: tuple[int, ...]) -> SequenceOf[float]:
        tail = tokens[-memory:]
        if tail not in known:
            rng = np.random.default_rng([seed, *tail])
            known[tail] = (rng.normal(size=len(table)) * scale).tolist()
        return known[tail]

    return law


class TableLM:
    """A ``LanguageModel`` whose cache holds the tokens themselves.

    A row's logits are the law of the tokens that it can see, so a wrong rollback, a hole in the
    cache or a wrong tree path changes the output or fails an assertion.
    """

    def __init__(self, law: Law, vocab_size: int, slots: int, max_length: int = 256) -> None:
        self.law, self.vocab_size, self.max_length = law, vocab_size, max_length
        self.device = torch.device("cpu")
        self.draft_vocabulary: DraftVocabulary | None = None
        self.cells: list[list[int]] = [[] for _ in range(slots)]
        self.forwards = 0

    def forward(self, inputs: SequenceOf[RowInput]) -> torch.Tensor:
        self.forwards += 1
        rows: list[SequenceOf[float]] = []
        for row in inputs:
            cells = self.cells[row.slot]
            assert row.tokens, "nothing to feed"
            assert row.start <= len(cells), "a hole in the cache"
            assert row.start + len(row.tokens) <= self.max_length, "the cache overflows"
            cells[row.start :] = row.tokens
            seen = self._seen(row, cells)
            rows += [self.law(tuple(prefix)) for prefix in seen[len(seen) - row.logits :]]
        return torch.tensor(rows, dtype=torch.float32)

    def _seen(self, row: RowInput, cells: list[int]) -> list[list[int]]:
        """What each fed token can see, itself included."""
        chain = len(row.tokens) - len(row.parents or ())
        seen = [cells[: row.start + i + 1] for i in range(chain)]
        for node, parent in enumerate(row.parents or ()):
            above = seen[chain + parent] if parent >= 0 else seen[chain - 1]
            seen.append([*above, row.tokens[chain + node]])
        return seen

    def keep_path(self, slot: int, start: int, path: SequenceOf[int]) -> None:
        cells = self.cells[slot]
        cells[start:] = [cells[start + node] for node in path]


@dataclass
class Watch:
    """An ``Observer`` that keeps everything."""

    steps: list[StepTrace] = field(default_factory=list)
    done: dict[str, Sequence] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)

    def step(self, trace: StepTrace) -> None:
        self.steps.append(trace)

    def finished(self, sequence: Sequence, times: Times) -> None:
        self.done[sequence.request.id] = sequence
        self.times[sequence.request.id] = times

    @property
    def outputs(self) -> dict[str, list[int]]:
        return {name: sequence.output_ids for name, sequence in self.done.items()}

    def request_traces(self, strategy: str) -> list[RequestTrace]:
        """A row per finished request, with the columns that the identities need."""
        return [
            RequestTrace(
                strategy,
                name,
                "toy",
                "none",
                "toy",
                each.request.seed,
                each.prompt_length,
                output_tokens=len(each.output_ids),
                output_ids=each.output_ids,
                finish=str(each.finish),
                complete=each.finish is Finish.STOP,
            )
            for name, each in self.done.items()
        ]

    @property
    def errors(self) -> dict[str, str]:
        return {name: each.error for name, each in self.done.items() if each.error}


@dataclass
class Toy:
    """A pair of table models, a grammar engine and a sampling law, ready to run strategies."""

    table: TokenTable
    target: Law
    draft: Law
    engine: str = "xgrammar"
    draft_tokens: int = 3
    slots: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    drafter: Callable[[LanguageModel, int], Drafter] = ModelDrafter
    grammar_threads: int = 1
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    detail: bool = False
    paranoid: bool = False

    @property
    def setup(self) -> Setup:
        return Setup(self.sampling, self.draft_tokens, self.table, ToyCodec(self.table))

    def grammar_engine(self) -> GrammarEngine:
        return grammar_engine(self.engine, self.table)

    def strategy(self, name: str, **options: Any) -> Strategy:
        found = strategies.find(name)
        return found(found.Options(**options), self.setup)

    def run(self, strategy: Strategy | str, requests: Iterable[Request]) -> Watch:
        """Decode the requests with one strategy on fresh models."""
        if isinstance(strategy, str):
            strategy = self.strategy(strategy)
        watch, loop = self.loop(strategy)
        loop.run(requests)
        return watch

    def loop(self, strategy: Strategy) -> tuple[Watch, DecodeLoop]:
        """A loop on fresh models, and who watches it."""
        vocab, watch = len(self.table), Watch()
        loop = DecodeLoop(
            TableLM(self.target, vocab, self.slots),
            self.drafter(TableLM(self.draft, vocab, self.slots), self.draft_tokens),
            strategy,
            GrammarService(self.grammar_engine(), self.grammar),
            EngineConfig(
                slots=self.slots,
                draft_tokens=self.draft_tokens,
                grammar_threads=self.grammar_threads,
                detail=self.detail,
                paranoid=self.paranoid,
            ),
            watch,
            Clock(),
        )
        return watch, loop


def request(
    table: TokenTable, grammar: GrammarSpec | None, name: str = "r", **fields: Any
) -> Request:
    """A request whose prompt is the first token of the table."""
    given = {"prompt_ids": (0,), "max_new_tokens": 24, "seed": 0, **fields}
    return Request(id=name, grammar=grammar, **given)
