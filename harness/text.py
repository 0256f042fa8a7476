"""Between text and tokens, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from harness.grammar.matcher import TokenTable


class Codec(Protocol):
    """A tokenizer as the loop needs it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens written in it become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens spelled out, broken UTF-8 as U+FFFD."""
        ...


class HFCodec:
    """A Hugging Face tokenizer behind ``Codec``."""

    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(  # type: ignore[attr-defined]
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def output_text(table: TokenTable, ids: Sequence[int]) -> str:
    """The text of an output: stop and other special tokens have none."""
    return b"".join(table.tokens[token] for token in ids).decode("utf-8", errors="replace")


def canonical_share(table: TokenTable, codec: Codec, ids: Sequence[int]) -> float:
    """Share of an output's tokens that its text, encoded again, has at the same bytes."""
    spans = _spans(table, ids)
    if not spans:
        return 1.0
    again = set(_spans(table, codec.encode(output_text(table, ids))))
    return sum(span in again for span in spans) / len(spans)


def _spans(table: TokenTable, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end byte of each token that has text."""
    ends = list(accumulate(len(table.tokens[token]) for token in ids))
    return [
        (end - len(table.tokens[token]), end)
        for token, end in zip(ids, ends, strict=True)
        if table.tokens[token]
    ]
