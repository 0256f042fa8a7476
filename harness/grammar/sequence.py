"""Looks for a sequence of tokens in a stream of them."""

from __future__ import annotations


class TokenSequence:
    """Knuth, Morris and Pratt's automaton of ``tokens``; its state is what the caller keeps.

    The *progress* is the length of the longest prefix of ``tokens`` that the stream ends with.
    """

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._fallback = [0] * len(tokens)
        for i in range(1, len(tokens)):
            self._fallback[i] = self.after(self._fallback[i - 1], tokens[i])

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, progress: int, token: int) -> int:
        """The progress once ``token`` follows; ``progress`` is less than the length."""
        while progress and self.tokens[progress] != token:
            progress = self._fallback[progress - 1]
        return progress + (self.tokens[progress] == token)
