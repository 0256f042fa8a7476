"""Real grammars over the real vocabulary, decoded by models that cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch

from experiments.faults.cases import Draw, Outcome
from experiments.faults.scene import VICTIM
from harness.core import Finish, Request, Sequence as Decoded
from harness.grammar.matcher import GrammarEngine, TokenTable
from harness.grammar.service import GrammarConfig, grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.vocabulary import token_table
from harness.loop import DecodeLoop
from harness.models.checkpoint import locate, read_tokenizer
from harness.models.language_model import LanguageModel, RowInput
from harness.text import HFCodec, output_text
from harness.workloads.item import Item
from harness.workloads.validate import validate
from strategies.base import Setup, Strategy
from tests.toys import Law, Toy, Watch, request

TIMEOUT_S = 5.0
"""How long one grammar may compile."""

TOKENS = 24
"""The most tokens of an output, unless there is a text to write."""

ROWS = 64
LEAD = 40.0
"""Logits by which a model wants the next token of its text."""

NEIGHBOURS = {
    "name": GrammarSpec.choice(["Ada Lovelace", "Alan Turing"]),
    "date": GrammarSpec.regex("20[0-9]{2}-[01][0-9]"),
    "free": None,
}


@cache
def codec() -> HFCodec:
    """The default pair's tokenizer."""
    return HFCodec(_tokenizer())


@cache
def _tokenizer() -> Any:
    return read_tokenizer(locate("smollm2", "pair.target"), "pair.target")


@cache
def vocabulary() -> TokenTable:
    return token_table(_tokenizer())


@cache
def _engine(name: str) -> GrammarEngine:
    return grammar_engine(name, vocabulary())


@cache
def _rows() -> torch.Tensor:
    """``[ROWS, vocab]``: what a model may think; an end is likelier than any other token."""
    table = vocabulary()
    rows = torch.randn(ROWS, len(table), generator=torch.Generator().manual_seed(0)) * 2
    rows[:, sorted(table.stop_ids)] += 6.0
    return rows


def writes(text: Sequence[int], seed: int, wrong: float = 0.0) -> Law:
    """A law that names a row, and the token that it wants: the next one of ``text``, once the
    output has left that, or in ``wrong`` of all cases, none (-1)."""

    def law(tokens: tuple[int, ...]) -> Sequence[float]:
        random = Random(f"{seed} {tokens[-3:]}")
        output = list(tokens[1:])  # the prompt is one token
        on = output == list(text[: len(output)]) and len(output) < len(text)
        wanted = text[len(output)] if on and random.random() >= wrong else -1
        return random.randrange(ROWS), wanted

    return law


class Wide:
    """Makes logits of what a law of ``writes`` names."""

    def __init__(self, inner: LanguageModel) -> None:
        self.inner, self.device = inner, inner.device
        self.vocab_size, self.max_length = inner.vocab_size, inner.max_length
        self.draft_vocabulary = inner.draft_vocabulary

    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        rows, wanted = self.inner.forward(inputs).long().unbind(1)
        logits = _rows()[rows]
        meant = (wanted >= 0).nonzero().flatten()
        logits[meant, wanted[meant]] += LEAD
        return logits

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        self.inner.keep_path(slot, start, path)


@dataclass
class TextToy(Toy):
    """A toy over the real vocabulary, with laws of ``writes``."""

    @property
    def setup(self) -> Setup:
        return Setup(self.sampling, self.draft_tokens, self.table, codec())

    def grammar_engine(self) -> GrammarEngine:
        return _engine(self.engine)

    def loop(self, strategy: Strategy) -> tuple[Watch, DecodeLoop]:
        watch, loop = super().loop(strategy)
        loop.target = Wide(loop.target)
        if loop.drafter is not None:
            loop.drafter.model = Wide(loop.drafter.model)
        return watch, loop


def toy(settings: Draw, random: Random, text: Sequence[int] = ()) -> TextToy:
    """A pair that writes ``text`` where the grammar lets it; the draft model errs more often."""
    return TextToy(
        vocabulary(),
        writes(text, random.getrandbits(32), wrong=0.02),
        writes(text, random.getrandbits(32), wrong=0.2),
        engine=settings.engine,
        sampling=settings.sampling,
        grammar=GrammarConfig(timeout_s=TIMEOUT_S, ahead=random.random() < 0.5),
        **settings.fields,
    )


def among(random: Random, grammar: GrammarSpec, tokens: int = TOKENS) -> list[Request]:
    """A victim at a random place among sound requests."""
    table = vocabulary()
    requests = [
        request(table, spec, name, max_new_tokens=12, seed=len(name))
        for name, spec in NEIGHBOURS.items()
    ]
    victim = request(table, grammar, VICTIM, max_new_tokens=tokens, seed=1)
    requests.insert(random.randint(0, len(requests)), victim)
    return requests


def judge(outcome: Outcome, victims: Sequence[Decoded]) -> Outcome:
    """Count the outputs that are complete and do not fit their grammar."""
    for victim in victims:
        if victim.finish is Finish.STOP and victim.matcher is not None:
            item = Item(VICTIM, "fault", (), victim.request.grammar)
            text = output_text(vocabulary(), victim.output_ids)
            outcome.invalid += validate(item, text) is False
    return outcome
