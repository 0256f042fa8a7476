"""The text of the tokens that a run used: ``tokens.json`` of its folder."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.grammar.matcher import TokenTable
from harness.text import Codec

ID_COLUMNS = ("draft_ids", "emitted_ids", "trimmed_ids", "jump_ids")
"""The step columns that hold token ids."""

TokenTexts = dict[str, dict[str, str]]
"""``texts`` and ``special``, each by token id. A text is the token's UTF-8; a byte of it that is
none by itself is a lone surrogate (Python's ``surrogateescape``), so that the texts of an output
add up to its bytes. Special tokens add nothing to an output; theirs is their name."""


def used_ids(steps: pd.DataFrame) -> list[int]:
    """All token ids in the step rows, in order; padding is none."""
    ids = {token for name in ID_COLUMNS for row in steps[name] for token in row}
    return sorted(int(token) for token in ids if token >= 0)


def token_texts(table: TokenTable, codec: Codec, ids: Iterable[int]) -> TokenTexts:
    """What ``tokens.json`` says of these tokens."""
    texts: TokenTexts = {"texts": {}, "special": {}}
    for token in ids:
        if piece := table.tokens[token]:
            texts["texts"][str(token)] = piece.decode("utf-8", "surrogateescape")
        else:
            texts["special"][str(token)] = codec.decode([token])
    return texts
