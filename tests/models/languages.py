"""A grammar that is a finite list of token sequences, as a verifier's constraint."""

from __future__ import annotations

import torch


class Language:
    """Accepts prefixes of ``sentences``; the last token of one terminates if it is id 7."""

    STOP = 7

    def __init__(self, sentences: list[list[int]], held: list[int] | None = None) -> None:
        self.sentences = sentences
        self.held = held or []
        self.asked: list[int] = []
        self.filled = 0

    @property
    def terminated(self) -> bool:
        return self.held[-1:] == [self.STOP]

    @property
    def legal(self) -> set[int]:
        n = len(self.held)
        return {s[n] for s in self.sentences if len(s) > n and s[:n] == self.held}

    def accept(self, token: int) -> bool:
        self.asked.append(token)
        if token not in self.legal:
            return False
        self.held.append(token)
        return True

    def fill(self, mask: torch.Tensor, row: int) -> bool:
        self.filled += 1
        mask[row] = 0
        mask[row, 0] = sum(1 << token for token in self.legal)
        return bool(self.legal)
