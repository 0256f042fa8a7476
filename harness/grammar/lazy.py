"""A grammar that starts with a text or a token of its own (llama.cpp, L20-L23)."""

from __future__ import annotations

from copy import copy

import torch

from harness.errors import GrammarError, MatcherError
from harness.grammar.matcher import ALL, Matcher, TokenTable
from harness.grammar.trigger import Trigger, TriggeredMatcher


class LazyMatcher(TriggeredMatcher):
    """Free text until a trigger appears; then the grammar, from the trigger's text on (L20-L23).

    Tokens that reach behind the start of the grammar's text are replayed into the grammar; the
    first of them is cut there and what is left of it re-encoded. Where the grammar refuses
    the replay, which the unmasked trigger token may cause, so does ``accept`` (L22).

    Args:
        inner: the grammar, at its start.
        trigger: of kind ``token``, ``word``, ``pattern`` or ``pattern_full``.
        table: bytes and stop tokens of the vocabulary.
    """

    def __init__(self, inner: Matcher, trigger: Trigger, table: TokenTable) -> None:
        if trigger.kind in ("reasoning", "tokens"):
            raise GrammarError(f"trigger.kind: {trigger.kind!r} is not for a LazyMatcher")
        self.inner = inner
        self.trigger = trigger
        self.table = table
        self._start = inner.fork()
        self._awake = False
        self._free: list[int] = []  # accepted while asleep, the waking token included
        self._guided = 0  # accepted since

    @property
    def started(self) -> bool:
        """The trigger has appeared."""
        return self._awake

    @property
    def constrained(self) -> bool:
        return self._awake

    @property
    def terminated(self) -> bool:
        """A stop token was accepted; one before the trigger ends the output as well."""
        if self._awake:
            return self.inner.terminated
        return bool(self._free) and self._free[-1] in self.table.stop_ids

    @property
    def completed(self) -> bool:
        return self._awake and self.inner.completed

    @property
    def held(self) -> int:
        return len(self._free) + self._guided

    def _step(self, token: int) -> bool:
        if self._awake:
            accepted = self.inner.accept([token])
            self._guided += accepted
            return accepted
        if self.terminated or not 0 <= token < len(self.table):
            return False
        try:
            replay = self._replay([*self._free, token])
        except MatcherError:  # no token spells the rest of the cut one
            return False
        if replay is not None:
            if not self.inner.accept(replay):
                return False
            self._awake = True
        self._free.append(token)
        return True

    def _replay(self, free: list[int]) -> list[int] | None:
        """What the grammar is fed once ``free`` is accepted; None = it sleeps on (L21)."""
        if self.trigger.kind == "token":
            return free[-1:] if free[-1] in self.trigger.tokens else None
        pieces = [self.table.tokens[token] for token in free]
        start = self.trigger.find(b"".join(pieces))
        if start is None:
            return None
        replay: list[int] = []
        end = 0
        for token, piece in zip(free, pieces, strict=True):
            begin, end = end, end + len(piece)
            if begin >= start and end > start:
                replay.append(token)
            elif end > start:
                replay += self.table.encode_greedily(piece[start - begin :])
        return replay

    def rollback(self, n: int) -> None:
        self._check_rollback(n)
        if n <= self._guided:
            self.inner.rollback(n)
            self._guided -= n
            return
        # The waking token goes too: what stays in front of it woke nothing, so all sleeps again.
        if self._awake:
            self.inner, self._awake = self._start.fork(), False
        del self._free[len(self._free) + self._guided - n :]
        self._guided = 0

    def _save(self) -> int:
        return self.held

    def _restore(self, saved: int) -> None:
        self.rollback(self.held - saved)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        if self._awake:
            self.inner.fill(mask, row)
        else:
            mask[row] = ALL

    def forced_text(self) -> str:
        """Empty until the trigger appears."""
        return self.inner.forced_text() if self._awake else ""

    def forced_tokens(self) -> list[int]:
        return self.inner.forced_tokens() if self._awake else []

    def fork(self) -> LazyMatcher:
        twin = copy(self)
        twin.inner = self.inner.fork()
        twin._free = [*self._free]
        return twin
