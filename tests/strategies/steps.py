"""A step made by hand, what its mask rows say, and models that say what a test wants."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import torch

from harness.clock import Clock
from harness.core import PAD, Proposal, RollbackKind, Sequence
from harness.grammar.masks import MaskBuffer
from harness.grammar.matcher import TokenTable
from harness.grammar.pool import GrammarPool
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.step import Step
from strategies.base import Strategy
from tests.toys import Law, Toy, request

CPU = torch.device("cpu")
STALE = 0x5A5A5A5A
"""What rows hold that nobody wrote in this step."""


class LoggedMatcher(TrackedMatcher):
    """Writes down each accepted list (``[3, 1]``) and rollback (``-2``); may break on a fill."""

    def __init__(self, toy: Toy, grammar: GrammarSpec, before: SequenceOf[int] = ()) -> None:
        super().__init__(toy.grammar_engine().compile(grammar).matcher(), Clock())
        assert self.accept(before)
        self.log: list[list[int] | int] = []
        self.fills_left = math.inf

    def accept(self, tokens: SequenceOf[int]) -> bool:
        accepted = super().accept(tokens)
        if accepted and hasattr(self, "log"):
            self.log.append(list(tokens))
        return accepted

    def rollback(self, n: int, kind: RollbackKind) -> None:
        super().rollback(n, kind)
        if n:
            self.log.append(-n)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        self.fills_left -= 1
        if self.fills_left < 0:
            raise RuntimeError("the engine broke")
        super().fill(mask, row)

    def state(self) -> tuple[int, bool, list[int]]:
        """All that a preview must leave as it was: tokens held, the end, and the next row."""
        mask = torch.zeros(1, 1, dtype=torch.int32)
        self.inner.fill(mask, 0)
        return self.held, self.terminated, mask.tolist()[0]


def step_of(
    strategy: Strategy,
    matchers: SequenceOf[TrackedMatcher | None],
    proposals: SequenceOf[Proposal],
) -> Step:
    """A step with one sequence per proposal, in a mask buffer full of stale bits."""
    table, count = strategy.setup.table, len(proposals)
    sequences = [
        Sequence(request(table, None, f"r{slot}", seed=slot), slot, matcher)
        for slot, matcher in enumerate(matchers)
    ]
    rows, draft_rows = (MaskBuffer(count, each, len(table), CPU) for each in (strategy.reserve, 1))
    rows.host.fill_(STALE)
    pool = GrammarPool(1, Clock())
    step = Step(sequences, rows, draft_rows, drafter=None, prefill=False, pool=pool)
    step.proposals = list(proposals)
    return step


def rows_of(strategy: Strategy, step: Step) -> list[str]:
    """What the target may choose in each row of logits: tokens, or ``ALL``."""
    table = strategy.setup.table
    count = sum(1 + len(proposal.tokens) for proposal in step.proposals)
    logits = torch.zeros(count, len(table))
    strategy.apply_masks(step, logits)
    return [_spell(table, (row == 0).nonzero().flatten().tolist()) for row in logits]


def _spell(table: TokenTable, tokens: list[int]) -> str:
    if len(tokens) == len(table):
        return "ALL"
    return " ".join(
        "$" if token in table.stop_ids else table.tokens[token].decode() for token in tokens
    )


def drafts(table: TokenTable, text: str) -> list[int]:
    """Token ids of words between spaces; ``$`` is EOS, ``-1`` is padding."""
    names = {"$": table.eos_id, "-1": PAD}
    return [
        names[word] if word in names else table.ids_by_bytes[word.encode()] for word in text.split()
    ]


def says(table: TokenTable, text: str, otherwise: str = "$") -> Law:
    """A model that says these words, one by output position, behind a prompt of one token."""
    script = drafts(table, text)

    def law(tokens: tuple[int, ...]) -> list[float]:
        at = len(tokens) - 1
        word = script[at] if at < len(script) else drafts(table, otherwise)[0]
        return [float(token == word) for token in range(len(table))]

    return law
