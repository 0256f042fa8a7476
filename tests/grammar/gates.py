"""A grammar that is a list of token sequences, to put gates in front of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.grammar.matcher import Matcher


class AnyOf(Matcher):
    """The grammar of a finite set of token sequences, each followed by ``stop``."""

    def __init__(self, language: Sequence[Sequence[int]], stop: int) -> None:
        self.language = [[*words, stop] for words in language]
        self.stop = stop
        self.seen: list[int] = []

    def _next(self) -> set[int]:
        n = len(self.seen)
        return {word[n] for word in self.language if word[:n] == self.seen and len(word) > n}

    def accept(self, tokens: Sequence[int]) -> bool:
        before = [*self.seen]
        for token in tokens:
            if token not in self._next():
                self.seen = before
                return False
            self.seen.append(token)
        return True

    def validate(self, tokens: Sequence[int]) -> int:
        twin = self.fork()
        return next((i for i, token in enumerate(tokens) if not twin.accept([token])), len(tokens))

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self.seen)
        del self.seen[len(self.seen) - n :]

    def fill(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = 0
        for token in self._next():
            mask[row, token // 32] |= 1 << token % 32

    @property
    def terminated(self) -> bool:
        return self.stop in self.seen

    @property
    def completed(self) -> bool:
        return self._next() == {self.stop}

    @property
    def held(self) -> int:
        return len(self.seen)

    def forced_text(self) -> str:
        return "forced"

    def forced_tokens(self) -> list[int]:
        return [0]

    def fork(self) -> AnyOf:
        twin = AnyOf([], self.stop)
        twin.language, twin.seen = self.language, [*self.seen]
        return twin


def row_of(matcher: Matcher, words: int = 1) -> list[int]:
    mask = torch.full((2, words), 7, dtype=torch.int32)
    matcher.fill(mask, 1)
    assert mask[0].tolist() == [7] * words  # no other row is touched
    return mask[1].tolist()
