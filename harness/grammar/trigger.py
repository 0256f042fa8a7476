"""What starts a grammar inside an output: tokens (DeepInfer, D2) or text (llama.cpp, L20, L21)."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.errors import GrammarError, MatcherError
from harness.grammar.matcher import Matcher

TriggerKind = Literal["tokens", "token", "word", "pattern", "pattern_full"]
TRIGGER_KINDS: tuple[TriggerKind, ...] = ("tokens", "token", "word", "pattern", "pattern_full")


@dataclass(frozen=True)
class Trigger:
    """What starts a grammar inside the output.

    - ``tokens``: all of ``tokens`` in this order; the grammar begins behind them. Without any,
      it holds at once. ``TokenTriggerMatcher`` follows this kind, ``LazyMatcher`` the others.
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

    Raises:
        GrammarError: a field is missing, malformed, or belongs to another kind.
    """

    kind: TriggerKind
    tokens: tuple[int, ...] = ()
    bound: int | None = None
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in TRIGGER_KINDS:
            raise GrammarError(f"trigger.kind: {self.kind!r} is none of {', '.join(TRIGGER_KINDS)}")
        if self.kind in ("tokens", "token"):
            self._check_tokens()
        else:
            self._check_text()

    def _check_tokens(self) -> None:
        """The rules of D2."""
        if not isinstance(self.tokens, tuple) or not all(map(_is_token_id, self.tokens)):
            raise GrammarError(f"trigger.tokens: {self.tokens!r}; give token ids, integers >= 0")
        if self.kind == "token" and not self.tokens:
            raise GrammarError("trigger.tokens: empty; name a token that starts the grammar")
        if self.bound is not None:
            if self.kind == "token" or not self.tokens:
                raise GrammarError("trigger.bound: needs kind 'tokens' and a non-empty trigger")
            if not _is_token_id(self.bound):
                raise GrammarError(f"trigger.bound: {self.bound!r}; give a token id, integer >= 0")
        if self.text:
            raise GrammarError(f"trigger.text: kind {self.kind!r} has none; remove it")

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


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class TriggeredMatcher(Matcher):
    """A matcher whose grammar starts late: ``inner``, moved token by token, all or nothing."""

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
