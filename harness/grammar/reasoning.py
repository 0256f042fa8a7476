"""A grammar that sleeps while a model thinks (vLLM, V1.5; SGLang, S4)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from harness.errors import GrammarError
from harness.grammar.matcher import ALL, Matcher, TokenTable
from harness.grammar.sequence import TokenSequence
from harness.grammar.trigger import Trigger, TriggeredMatcher, allow_only, forbid


class ReasoningMatcher(TriggeredMatcher):
    """Thinking, its end, then the grammar (V1.5, S4).

    Thinking ends behind the tokens of the trigger, none of which the grammar is fed (S4b), or with
    an *implicit* end, which is the grammar's first token as well (V1.5d). An implicit end that the
    grammar refuses cannot end anything: it is forbidden while the model thinks (V1.5g). So is
    everything but the next token of the end once the budget is spent (S4e).

    vLLM computes its two bounds once per list of tokens; here each token is judged in the state
    that those before it lead to, which gives the same rows and feeds the same tokens.

    Args:
        inner: the grammar, at its start.
        trigger: of kind ``reasoning``.
        table: the vocabulary; other ids are refused.

    Attributes:
        tokens_in_think: tokens that are neither the end nor the beginning of it, so far.
        tokens_after_end: -1 while thinking, then the tokens that the grammar was fed.
        progress: tokens of the end matched so far.
        masked: implicit ends that the grammar refuses.
    """

    def __init__(self, inner: Matcher, trigger: Trigger, table: TokenTable) -> None:
        if trigger.kind != "reasoning":
            raise GrammarError(f"trigger.kind: {trigger.kind!r} is not for a ReasoningMatcher")
        self.inner = inner
        self.trigger = trigger
        self.table = table
        self.masked = [token for token in trigger.implicit if not inner.validate([token])]
        self.tokens_in_think = 0
        self.tokens_after_end = -1
        self.progress = 0
        self._end = TokenSequence(trigger.tokens)
        self._before: list[int] = []  # the progress before each token, up to the end of thinking
        self._shared = 0  # 1 if the end is the grammar's first token too

    @property
    def started(self) -> bool:
        return self.tokens_after_end >= 0

    @property
    def constrained(self) -> bool:
        return self.started or self._spent or bool(self.masked)

    @property
    def terminated(self) -> bool:
        """The grammar's; never while thinking (S4d)."""
        return self.started and self.inner.terminated

    @property
    def completed(self) -> bool:
        return self.started and self.inner.completed

    @property
    def held(self) -> int:
        return len(self._before) + self._answered

    @property
    def _answered(self) -> int:
        """Tokens behind the end of thinking."""
        return self.tokens_after_end - self._shared if self.started else 0

    @property
    def _spent(self) -> bool:
        budget = self.trigger.budget
        return budget is not None and self.tokens_in_think >= budget

    def _step(self, token: int) -> bool:
        if self.started:
            accepted = self.inner.accept([token])
            self.tokens_after_end += accepted
            return accepted
        if not 0 <= token < len(self.table):
            return False
        if self._spent and token != self.trigger.tokens[self.progress]:
            return False
        progress = self._end.after(self.progress, token)
        ends = progress == len(self._end)
        shared = not ends and not self._spent and token in self.trigger.implicit
        if shared and not self.inner.accept([token]):
            return False
        self._before.append(self.progress)
        if ends or shared:
            self._shared = self.tokens_after_end = int(shared)
            self.progress = 0
        else:
            self.tokens_in_think += self.progress + 1 - progress
            self.progress = progress
        return True

    def rollback(self, n: int) -> None:
        """Undo ``n`` tokens, perhaps back into the thinking (S4c)."""
        self._check_rollback(n)
        answered = min(n, self._answered)
        self.inner.rollback(answered)
        if self.started:
            self.tokens_after_end -= answered
        thought = n - answered
        if thought and self.started:
            self.inner.rollback(self._shared)
            self.tokens_after_end, self._shared = -1, 0
            self.progress = self._before.pop()
            thought -= 1
        for _ in range(thought):
            before = self._before.pop()
            self.tokens_in_think -= before + 1 - self.progress
            self.progress = before

    def _save(self) -> int:
        return self.held

    def _restore(self, saved: int) -> None:
        self.rollback(self.held - saved)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        if self.started:
            self.inner.fill(mask, row)
        elif self._spent:
            allow_only(mask, row, self.trigger.tokens[self.progress])
        else:
            mask[row] = ALL
            forbid(mask, row, self.masked)

    def forced_text(self) -> str:
        """Empty while the model thinks (S4f)."""
        return self.inner.forced_text() if self.started else ""

    def forced_tokens(self) -> list[int]:
        return self.inner.forced_tokens() if self.started else []

    def fork(self) -> ReasoningMatcher:
        twin = copy(self)
        twin.inner = self.inner.fork()
        twin._before = [*self._before]
        return twin


def answer_ids(trigger: Trigger | None, ids: Sequence[int]) -> Sequence[int]:
    """The part of an output that a grammar behind a ``reasoning`` trigger was for.

    Returns:
        What stands behind the end of thinking, or begins with an implicit one; nothing if the
        thinking did not end. Without such a trigger, all of ``ids``.
    """
    if trigger is None or trigger.kind != "reasoning":
        return ids
    end, progress = TokenSequence(trigger.tokens), 0
    for index, token in enumerate(ids):
        progress = end.after(progress, token)
        if progress == len(end):
            return ids[index + 1 :]
        if token in trigger.implicit:
            return ids[index:]
    return []
