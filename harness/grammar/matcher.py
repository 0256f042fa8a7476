"""The matcher contract that every grammar engine is adapted to (spec/comparison.md).

A matcher follows one output through one grammar. Three names recur: it is ``completed``
when only stop tokens are legal, ``terminated`` once a stop token was accepted, and it
``holds`` every accepted token that was not rolled back, the stop token included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from harness.errors import MatcherError
from harness.grammar.spec import GrammarSpec

Whitespace = Literal["compact", "minimal", "free"]
"""Between the tokens of JSON: ``compact`` is one space behind each separator and none elsewhere
(what xgrammar's ``any_whitespace=False`` and vLLM's ``disable_any_whitespace`` mean), ``minimal``
is none at all, ``free`` is any amount."""
WHITESPACES: tuple[str, ...] = get_args(Whitespace)

ALL = -1
"""A mask word that allows all of its 32 tokens."""


@dataclass(frozen=True)
class TokenTable:
    """What the grammar engines need to know of a tokenizer.

    Attributes:
        tokens: the bytes of each token id; ``b""`` for special tokens, which no grammar text
            may produce.
        stop_ids: the ids that end an output; the finish check uses the same set.
        eos_id: the one of them that engines which know a single end token are given.
    """

    tokens: tuple[bytes, ...]
    stop_ids: frozenset[int]
    eos_id: int

    def __post_init__(self) -> None:
        if self.eos_id not in self.stop_ids:
            raise MatcherError(f"eos_id {self.eos_id} is not among stop_ids; add it")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The lowest id of each byte string; special tokens are left out."""
        table: dict[bytes, int] = {}
        for token_id, token in enumerate(self.tokens):
            if token:
                table.setdefault(token, token_id)
        return table

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.tokens))

    def encode_greedily(self, text: bytes) -> list[int]:
        """Longest-match encoding: canonical for no real tokenizer, always defined for these bytes.

        Raises:
            MatcherError: a byte of ``text`` begins no token.
        """
        ids: list[int] = []
        while text:
            for length in range(min(self.longest, len(text)), 0, -1):
                token_id = self.ids_by_bytes.get(text[:length])
                if token_id is not None:
                    break
            else:
                raise MatcherError(f"no token begins with byte {text[0]:#04x}")
            ids.append(token_id)
            text = text[length:]
        return ids


class Matcher(ABC):
    """One output's walk through one compiled grammar."""

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance over ``tokens``, all or nothing.

        On refusal (an illegal, negative, out-of-range or special token, or any token after
        termination) the state is what it was and the matcher stays usable.
        """

    @abstractmethod
    def validate(self, tokens: Sequence[int]) -> int:
        """Length of the legal prefix of ``tokens``; changes nothing. A stop token ends it."""

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Undo the last ``n`` accepted tokens; the stop token is one of them.

        Raises:
            MatcherError: ``n`` is negative or more than the matcher holds.
        """

    @abstractmethod
    def fill(self, mask: torch.Tensor, row: int) -> None:
        """Write what is legal next into ``mask[row]``.

        Args:
            mask: int32 ``[rows, words]`` on the CPU, ``words >= ceil(vocab / 32)``; bit
                ``b`` of word ``w`` stands for token ``32 w + b``, 1 = allowed. Bits at or
                above the vocabulary are cleared. A terminated matcher writes ``ALL`` words.
            row: the row to write; no other row is touched.
        """

    @property
    @abstractmethod
    def terminated(self) -> bool:
        """A stop token was accepted."""

    @property
    @abstractmethod
    def completed(self) -> bool:
        """Only stop tokens are legal now. False once terminated."""

    @property
    def started(self) -> bool:
        """The grammar has begun. False before a late start; see ``harness.grammar.gate``."""
        return True

    @property
    def constrained(self) -> bool:
        """A mask is needed: the grammar, or the gate in front of it, may forbid something (D6)."""
        return True

    @property
    @abstractmethod
    def held(self) -> int:
        """Number of tokens accepted and not rolled back."""

    @abstractmethod
    def forced_text(self) -> str:
        """The text that the grammar forces next: whole UTF-8 characters, never a stop token.

        Empty where a choice begins or the output may end. No state change (S1d).
        """

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """Tokens of a legal tokenisation of ``forced_text``; no state change."""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent copy over the shared compiled grammar, in the same state."""


class CompiledGrammar(ABC):
    """A grammar compiled for one vocabulary; shared by any number of matchers.

    Attributes:
        engine: name of the engine that compiled it.
        memory_bytes: what it takes, by the engine's own figure; 0 if that has none.
    """

    engine: str
    memory_bytes: int

    @abstractmethod
    def matcher(self) -> Matcher:
        """A fresh matcher at the start of the grammar."""


class GrammarEngine(ABC):
    """Compiles specs for one token table.

    Args:
        table: the tokenizer's vocabulary.
        whitespace: of JSON.

    Attributes:
        name: what the user calls it.
        max_rollback: the most tokens that its matchers can take back at once; None = all.
    """

    name: str
    max_rollback: int | None = None

    def __init__(self, table: TokenTable, whitespace: Whitespace = "compact") -> None:
        self.table = table
        self.whitespace = whitespace

    @property
    def separators(self) -> tuple[str, str]:
        """What must stand between items and behind keys of JSON."""
        return (", ", ": ") if self.whitespace == "compact" else (",", ":")

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``.

        Raises:
            GrammarError: the engine refuses the grammar; the message says why.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The engine's own idea of a token's bytes (special tokens: ``b""``)."""
