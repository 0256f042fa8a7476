"""A grammar that starts behind a sequence of tokens, and its ledgers (DeepInfer, D6-D9)."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from harness.errors import GrammarError, MatcherError
from harness.grammar.matcher import ALL, Matcher
from harness.grammar.sequence import TokenSequence
from harness.grammar.trigger import Trigger, TriggeredMatcher, allow_only


class TokenTriggerMatcher(TriggeredMatcher):
    """Free text, then a token sequence, then the grammar, then anything (D6-D9).

    No token of the trigger is fed to the grammar. After the end of the output every token is
    accepted and counted, and can be rolled back, since a verification may emit junk behind a
    stop token.

    Args:
        inner: the grammar, at its start.
        trigger: of kind ``tokens``; without tokens the grammar holds at once.
        drafts: the most drafts per step; with a trigger, at most ``drafts + 2`` grammar and
            trigger tokens can be rolled back. None = all of them.

    Attributes:
        trigger_progress: tokens of the trigger matched so far.
        progress_history: the progress before each token that can be rolled back.
        tokens_after_bound: -1 until the bound token appears, then the tokens since.
        tokens_in_matcher: tokens that the grammar was fed, the stop token included.
        tokens_after_eos: -1 until a stop token is accepted, then the tokens since.
    """

    def __init__(self, inner: Matcher, trigger: Trigger, drafts: int | None = None) -> None:
        if trigger.kind != "tokens":
            raise GrammarError(f"trigger.kind: {trigger.kind!r} is not for a TokenTriggerMatcher")
        self.inner = inner
        self.trigger = trigger
        self.trigger_progress = 0
        self.progress_history: list[int] = []
        self.tokens_after_bound = -1
        self.tokens_in_matcher = 0
        self.tokens_after_eos = -1
        self._capacity = None if drafts is None else drafts + 2
        self._sequence = TokenSequence(trigger.tokens)
        self._held = 0

    @property
    def started(self) -> bool:
        return not self._pending

    @property
    def constrained(self) -> bool:
        """The bound token has appeared or the trigger is complete (D6)."""
        return self._bound_fired or not self._pending

    @property
    def terminated(self) -> bool:
        return self.tokens_after_eos >= 0

    @property
    def completed(self) -> bool:
        return not self._pending and not self.terminated and self.inner.completed

    @property
    def held(self) -> int:
        """All accepted tokens: free text, trigger, grammar, and those after the end."""
        return self._held

    @property
    def _pending(self) -> bool:
        return self.trigger_progress < len(self.trigger.tokens)

    @property
    def _bound_fired(self) -> bool:
        return self.tokens_after_bound >= 0

    def _step(self, token: int) -> bool:
        if token < 0:
            return False
        if self._pending and self._bound_fired:  # D7.1
            if token != self.trigger.tokens[self.trigger_progress]:
                return False
            self._record(self.trigger_progress + 1)
        elif self._pending:  # D7.2
            self._record(self._sequence.after(self.trigger_progress, token))
            if token == self.trigger.bound:
                self.tokens_after_bound = 0
        elif self.terminated:  # D7.3
            self.tokens_after_eos += 1
        else:  # D7.4
            if not self.inner.accept([token]):
                return False
            self.tokens_in_matcher += 1
            self._record(self.trigger_progress)
            if self.inner.terminated:
                self.tokens_after_eos = 0
        self._held += 1
        return True

    def _record(self, progress: int) -> None:
        """Count a token in the ledgers and move the trigger's progress."""
        if self.trigger.tokens:
            self.progress_history.append(self.trigger_progress)
            if self._capacity is not None:
                del self.progress_history[: -self._capacity]
        self.trigger_progress = progress
        if self._bound_fired:
            self.tokens_after_bound += 1

    def rollback(self, n: int) -> None:
        self._check_rollback(n)
        after_eos = min(n, max(self.tokens_after_eos, 0))
        rest = n - after_eos  # D9: tokens behind the stop token go first, the rest is one number
        if self.trigger.tokens and rest > len(self.progress_history):
            raise MatcherError(
                f"rollback of {n} tokens, but the trigger remembers {len(self.progress_history)}; "
                "give TokenTriggerMatcher the largest draft length"
            )
        self._held -= n
        self.tokens_after_eos -= after_eos
        if not rest:
            return  # the stop token itself stays
        self.tokens_after_eos = -1
        fed = min(rest, self.tokens_in_matcher)
        self.inner.rollback(fed)
        self.tokens_in_matcher -= fed
        if self.trigger.tokens:
            self.trigger_progress = self.progress_history[-rest]
            del self.progress_history[-rest:]
        if self._bound_fired:
            self.tokens_after_bound = max(self.tokens_after_bound - rest, -1)

    def _save(self) -> dict[str, Any]:
        return {**vars(self), "progress_history": [*self.progress_history]}

    def _restore(self, saved: dict[str, Any]) -> None:
        # Not by rollback: a refused list may be longer than the history.
        self.inner.rollback(self.tokens_in_matcher - saved["tokens_in_matcher"])
        vars(self).update(saved)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        """D8; before the trigger, and after the end, every token is allowed."""
        if self._pending and self._bound_fired:
            allow_only(mask, row, self.trigger.tokens[self.trigger_progress])
        elif self._pending or self.terminated:
            mask[row] = ALL
        else:
            self.inner.fill(mask, row)

    def forced_text(self) -> str:
        """Empty until the trigger is complete: it is no text of the grammar."""
        return "" if self._pending or self.terminated else self.inner.forced_text()

    def forced_tokens(self) -> list[int]:
        return [] if self._pending or self.terminated else self.inner.forced_tokens()

    def fork(self) -> TokenTriggerMatcher:
        twin = copy(self)
        twin.inner = self.inner.fork()
        twin.progress_history = [*self.progress_history]
        return twin
