"""What the adapters of all grammar engines share, so that each states only what differs.

The engines disagree most about the stop token: xgrammar consumes it and then refuses to be
asked anything (V1.2g); llguidance consumes it in open states but not in closed ones, where a
rollback then undoes a real token (V1.4f, T11). Here **no engine ever sees a stop token**: it
is booked in this class, on top of the engine's own state, and costs one rollback step always.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from harness.bitmask import WORD_BITS, words
from harness.errors import MatcherError
from harness.grammar.matcher import ALL, CompiledGrammar, Matcher, TokenTable


class Vocabulary:
    """A token table in the shape that engines take.

    Attributes:
        table: the tokenizer's vocabulary.
        text: bytes of each id that a grammar may produce; ``b""`` for special **and stop** ids,
            so that no engine takes a stop id for text.
        text_ids: the ids that have such bytes.
        words: mask words that the vocabulary fills.
        last_word: the bits of the last of these words that stand for tokens.
        stop_row: int32 ``[words]``, the mask of a completed matcher.
    """

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.text = [
            b"" if token_id in table.stop_ids else token
            for token_id, token in enumerate(table.tokens)
        ]
        self.text_ids = frozenset(token_id for token_id, text in enumerate(self.text) if text)
        self.words = words(len(table))
        bits = np.zeros(self.words * WORD_BITS, dtype=np.uint8)
        bits[list(table.stop_ids)] = 1
        self.stop_row = np.packbits(bits, bitorder="little").view("<i4")
        spare = len(table) % WORD_BITS
        self.last_word = (1 << spare) - 1 if spare else ALL


class EngineMatcher(Matcher):
    """A matcher over an engine that knows text tokens only.

    Adapters implement the four ``_engine_*`` methods, ``_clone`` and ``forced_text``: no text is
    forced where the output may end, so this one needs no word on stop tokens either. Once a
    stop token was accepted no engine is asked for a mask (R9, Q10) or a token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._terminated = False
        self._held = 0

    @abstractmethod
    def _engine_accept(self, token: int) -> bool:
        """Advance over one text token, or refuse it and stay."""

    @abstractmethod
    def _engine_rollback(self, n: int) -> None:
        """Undo ``n >= 1`` text tokens, no more than were accepted."""

    @abstractmethod
    def _engine_fill(self, mask: torch.Tensor, row: int) -> None:
        """Write what is legal, stop tokens included, into the vocabulary's words of a row."""

    @abstractmethod
    def _engine_may_stop(self) -> bool:
        """The text so far is a whole output."""

    @abstractmethod
    def _clone(self) -> Self:
        """A copy with an independent engine state; ``fork`` adds what this class keeps."""

    @property
    def terminated(self) -> bool:
        return self._terminated

    @property
    def completed(self) -> bool:
        if self._terminated or not self._engine_may_stop():
            return False
        mask = torch.empty((1, self._vocabulary.words), dtype=torch.int32)
        self.fill(mask, 0)
        return np.array_equal(mask.numpy()[0], self._vocabulary.stop_row)

    @property
    def held(self) -> int:
        return self._held

    def accept(self, tokens: Sequence[int]) -> bool:
        if len(tokens) == 1:  # by far the most calls, and nothing to undo
            return self._step(tokens[0])
        advanced = self._advance(tokens)
        if advanced == len(tokens):
            return True
        self.rollback(advanced)
        return False

    def validate(self, tokens: Sequence[int]) -> int:
        advanced = self._advance(tokens)
        self.rollback(advanced)
        return advanced

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._held:
            raise MatcherError(
                f"rollback({n}): the matcher holds {self._held} tokens; ask for 0 to {self._held}"
            )
        if n == 0:
            return
        text = n - self._terminated
        if text:
            self._engine_rollback(text)
        self._terminated = False
        self._held -= n

    def fill(self, mask: torch.Tensor, row: int) -> None:
        if self._terminated:
            mask[row] = ALL
            return
        self._engine_fill(mask, row)
        used, last_word = self._vocabulary.words, self._vocabulary.last_word
        # An engine fills a row in 1 to 10 µs; each torch operation on one would add 2 to 9 µs.
        if last_word != ALL or mask.shape[1] > used:
            line = mask.numpy()[row]
            line[used - 1] &= last_word
            line[used:] = 0

    def forced_tokens(self) -> list[int]:
        try:
            tokens = self._vocabulary.table.encode_greedily(self.forced_text().encode())
        except MatcherError:  # the vocabulary cannot spell it: nothing to insert
            return []
        return tokens[: self.validate(tokens)]

    def fork(self) -> Self:
        copy = self._clone()
        copy._terminated, copy._held = self._terminated, self._held
        return copy

    def _advance(self, tokens: Sequence[int]) -> int:
        """Advance over the legal prefix of ``tokens``; its length."""
        for count, token in enumerate(tokens):
            if not self._step(token):
                return count
        return len(tokens)

    def _step(self, token: int) -> bool:
        if self._terminated:
            return False
        if token in self._vocabulary.text_ids:
            accepted = self._engine_accept(token)
        else:
            stop = token in self._vocabulary.table.stop_ids
            accepted = self._terminated = stop and self._engine_may_stop()
        self._held += accepted
        return accepted


class CompiledMatcher(CompiledGrammar):
    """A compiled grammar, kept as a matcher at its start that is forked for each use."""

    def __init__(self, start: EngineMatcher, engine: str, memory_bytes: int = 0) -> None:
        self._start = start
        self.engine, self.memory_bytes = engine, memory_bytes

    def matcher(self) -> Matcher:
        return self._start.fork()


def one_line(message: str) -> str:
    """An engine's error message without its line breaks."""
    return " ".join(message.split())
