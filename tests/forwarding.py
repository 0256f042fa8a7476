"""A matcher that hands every call on, for tests that change a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.grammar.matcher import Matcher


class ForwardingMatcher(Matcher):
    """Does what ``inner`` does; a fork is that of ``inner``."""

    def __init__(self, inner: Matcher) -> None:
        self.inner = inner

    def accept(self, tokens: Sequence[int]) -> bool:
        return self.inner.accept(tokens)

    def validate(self, tokens: Sequence[int]) -> int:
        return self.inner.validate(tokens)

    def rollback(self, n: int) -> None:
        self.inner.rollback(n)

    def fill(self, mask: torch.Tensor, row: int) -> None:
        self.inner.fill(mask, row)

    @property
    def terminated(self) -> bool:
        return self.inner.terminated

    @property
    def completed(self) -> bool:
        return self.inner.completed

    @property
    def started(self) -> bool:
        return self.inner.started

    @property
    def constrained(self) -> bool:
        return self.inner.constrained

    @property
    def held(self) -> int:
        return self.inner.held

    def forced_text(self) -> str:
        return self.inner.forced_text()

    def forced_tokens(self) -> list[int]:
        return self.inner.forced_tokens()

    def fork(self) -> Matcher:
        return self.inner.fork()
