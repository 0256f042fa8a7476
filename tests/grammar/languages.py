"""Finite languages: what a grammar engine must answer, worked out from the list of words.

Nothing here asks a grammar engine, so agreement with it means something.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from hypothesis import HealthCheck, settings

from harness.core import longest_common_prefix
from harness.grammar.matcher import GrammarEngine, Matcher, TokenTable
from harness.grammar.spec import GrammarSpec

SPECIAL = b""
TOKENS = (
    *(b"{", b"}", b'"a"', b":", b"1", b"a", b"b", b"ab", b"x", b"xx", b'"', b"\\", b"}}"),
    *(b"\xc3", b"\xa9", b"\xa8", "é".encode(), "éa".encode(), SPECIAL),
)
EOS, STOP = len(TOKENS), len(TOKENS) + 1
TABLE = TokenTable((*TOKENS, b"", b""), frozenset({EOS, STOP}), EOS)
quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def encode(text: str) -> list[int]:
    """Token ids of ``text``, longest match; ``$`` is EOS."""
    *parts, last = text.split("$")
    return [
        *(token for part in parts for token in (*TABLE.encode_greedily(part.encode()), EOS)),
        *TABLE.encode_greedily(last.encode()),
    ]


def legal(words: Iterable[str], prefix: list[int]) -> set[int]:
    """Token ids that may follow the text tokens ``prefix``."""
    text = b"".join(TABLE.tokens[token] for token in prefix)
    spelled = [word.encode() for word in words]
    stops = TABLE.stop_ids if text in spelled else frozenset[int]()
    return stops | {
        token
        for token, piece in enumerate(TABLE.tokens)
        if piece and any(word.startswith(text + piece) for word in spelled)
    }


def forced(words: Iterable[str], prefix: list[int]) -> str:
    """The certain continuation in whole characters; none where the text may end (S1d)."""
    text = b"".join(TABLE.tokens[token] for token in prefix)
    rests = [word[len(text) :] for word in map(str.encode, words) if word.startswith(text)]
    certain = reduce(lambda left, right: left[: longest_common_prefix(left, right)], rests)
    try:
        return certain.decode()
    except UnicodeDecodeError as error:
        return certain[: error.start].decode()


def allowed(mask: torch.Tensor, row: int = 0) -> set[int]:
    """Token ids whose bit is set in a row of a mask."""
    bits = (mask[row].unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    return {int(token) for token in bits.flatten().nonzero().flatten()}


def choice(*words: str) -> GrammarSpec:
    return GrammarSpec.choice(words)


def start(engine: GrammarEngine, spec: GrammarSpec, text: str = "") -> Matcher:
    """A matcher that has accepted ``text``."""
    matcher = engine.compile(spec).matcher()
    assert matcher.accept(encode(text))
    return matcher


def row(matcher: Matcher, words: int = 1) -> torch.Tensor:
    mask = torch.full((1, words), 0x5A5A5A5A, dtype=torch.int32)
    matcher.fill(mask, 0)
    return mask
