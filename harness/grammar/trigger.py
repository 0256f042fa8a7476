"""What starts a grammar inside an output: the end of the model's thinking (V1.5, S4), tokens
(DeepInfer, D2) or text (llama.cpp, L20, L21)."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from harness.errors import GrammarError, MatcherError
from harness.grammar.matcher import Matcher

TriggerKind = Literal["reasoning", "tokens", "token", "word", "pattern", "pattern_full"]
TRIGGER_KINDS: tuple[TriggerKind, ...] = get_args(TriggerKind)


@dataclass(frozen=True)
class Trigger:
    """What starts a grammar inside the output.

    - ``reasoning``: the model thinks first; ``tokens`` in this order end that, and the grammar
      begins behind them. ``ReasoningMatcher`` follows this kind.
    - ``tokens``: all of ``tokens`` in this order; the grammar begins behind them. Without any,
      it holds at once. ``TokenTriggerMatcher`` follows this kind, ``LazyMatcher`` those below.
    - ``token``: any one of ``tokens``; the grammar begins with it, so it must be legal there.
    - ``word``: ``text`` as it stands.
    - ``pattern``: the regular expression ``text``, over UTF-8 bytes, anywhere in the output.
    - ``pattern_full``: the same, but it must match all of the output so far.

    With the last three, the grammar begins with the first capture group that is not empty, or
    else with the match.

    Attributes:
        kind: one of these.
        tokens: token ids.
        bound: of ``tokens``: once this token appears, the trigger must follow at once.
        text: what to look for.
        implicit: of ``reasoning``: tokens that end it as well and begin the grammar's text, as
            the start of a tool call does (V1.5d).
        budget: of ``reasoning``: once so many tokens were thought, its end is forced (S4e).

    Raises:
        GrammarError: a field is missing, malformed, or belongs to another kind.
    """

    kind: TriggerKind
    tokens: tuple[int, ...] = ()
    bound: int | None = None
    text: str = ""
    implicit: tuple[int, ...] = ()
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in TRIGGER_KINDS:
            raise GrammarError(f"trigger.kind: {self.kind!r} is none of {', '.join(TRIGGER_KINDS)}")
        if self.kind in ("reasoning", "tokens", "token"):
            self._check_tokens()
        else:
            self._check_text()
        if self.kind == "reasoning":
            self._check_reasoning()
        elif self.implicit or self.budget is not None:
            raise GrammarError(
                f"trigger.implicit, trigger.budget: kind {self.kind!r} has none; "
                "remove them or use kind 'reasoning'"
            )

    def _check_tokens(self) -> None:
        """The rules of D2."""
        _check_token_ids("tokens", self.tokens)
        if self.kind != "tokens" and not self.tokens:
            raise GrammarError(f"trigger.tokens: empty; kind {self.kind!r} needs a token at least")
        if self.bound is not None:
            if self.kind != "tokens" or not self.tokens:
                raise GrammarError("trigger.bound: needs kind 'tokens' and a non-empty trigger")
            if not _is_token_id(self.bound):
                raise GrammarError(f"trigger.bound: {self.bound!r}; give a token id, integer >= 0")
        if self.text:
            raise GrammarError(f"trigger.text: kind {self.kind!r} has none; remove it")

    def _check_reasoning(self) -> None:
        _check_token_ids("implicit", self.implicit)
        if self.budget is not None and not _is_token_id(self.budget):
            raise GrammarError(
                f"trigger.budget: {self.budget!r}; give a number of tokens, an integer >= 0"
            )

    def _check_text(self) -> None:
        if self.tokens or self.bound is not None:
            raise GrammarError(f"trigger.tokens, trigger.bound: kind {self.kind!r} has none")
        if not isinstance(self.text, str) or not self.text:
            raise GrammarError(
                f"trigger.text: {self.text!r}; kind {self.kind!r} needs what to look for"
            )
        try:
            self.find(b"")
        except re.error as error:
            raise GrammarError(f"trigger.text: not a regular expression ({error})") from None

    def find(self, output: bytes) -> int | None:
        """Where in ``output`` the grammar's text begins; None = nothing found (L20, L21)."""
        source = (re.escape(self.text) if self.kind == "word" else self.text).encode()
        pattern = re.compile(source)  # from the cache of ``re``
        match = None
        if self.kind == "pattern_full" or (source.startswith(b"^") and source.endswith(b"$")):
            match = pattern.fullmatch(output)
        if match is None and self.kind != "pattern_full":
            match = pattern.search(output)
        if match is None:
            return None
        groups = range(1, pattern.groups + 1)
        return next((match.start(group) for group in groups if match[group]), match.start())


def _check_token_ids(field: str, ids: object) -> None:
    if not isinstance(ids, tuple) or not all(map(_is_token_id, ids)):
        raise GrammarError(f"trigger.{field}: {ids!r}; give token ids, integers >= 0")


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class TriggeredMatcher(Matcher):
    """A matcher whose grammar starts late: ``inner``, moved token by token, all or nothing.

    A draft may hold the boundary anywhere, and a rollback may cross it: the state is always that
    of a fresh matcher which was fed the tokens that are left.
    """

    inner: Matcher

    @abstractmethod
    def _step(self, token: int) -> bool:
        """Accept one token; on refusal nothing changes."""

    @abstractmethod
    def _save(self) -> Any:
        """What ``_restore`` needs to come back to this state."""

    @abstractmethod
    def _restore(self, saved: Any) -> None:
        """Undo every step since ``saved``."""

    def accept(self, tokens: Sequence[int]) -> bool:
        if len(tokens) == 1:  # by far the most calls, and nothing to undo
            return self._step(tokens[0])
        saved = self._save()
        if all(map(self._step, tokens)):
            return True
        self._restore(saved)
        return False

    def validate(self, tokens: Sequence[int]) -> int:
        saved = self._save()
        legal = 0
        for token in tokens:
            if self.terminated or not self._step(token):
                break
            legal += 1
        self._restore(saved)
        return legal

    def _check_rollback(self, n: int) -> None:
        if not 0 <= n <= self.held:
            raise MatcherError(f"rollback of {n} tokens, but the matcher holds {self.held}")


def allow_only(mask: torch.Tensor, row: int, token: int) -> None:
    """A row of one token, as ``Matcher.fill`` writes it."""
    word, bit = _place(token)
    mask[row] = 0
    mask[row, word] = bit


def forbid(mask: torch.Tensor, row: int, tokens: Iterable[int]) -> None:
    """Take ``tokens`` out of a row."""
    for token in tokens:
        word, bit = _place(token)
        mask[row, word] &= ~bit


def _place(token: int) -> tuple[int, int]:
    """Word and bit of a token; the highest bit of an int32 is its sign."""
    word, bit = divmod(token, 32)
    return word, -(1 << 31) if bit == 31 else 1 << bit
