"""Token bytes of a Hugging Face tokenizer, and the check that every engine sees the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from harness.errors import ConfigError
from harness.grammar.matcher import GrammarEngine, TokenTable

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_CONTROL_PIECE = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_REPLACEMENT = "\ufffd"


def token_table(tokenizer: Any, extra_stop_ids: Iterable[int] = ()) -> TokenTable:
    """The bytes of every token of a fast tokenizer.

    Special tokens, added tokens that look like markup (``<…>``, ``[…]``), stop tokens and
    unused ids get ``b""``.

    Args:
        tokenizer: a ``PreTrainedTokenizerFast`` with a byte-level or SentencePiece-like model.
        extra_stop_ids: ids that end an output besides the tokenizer's EOS, such as those of
            the generation config.

    Raises:
        ConfigError: the tokenizer is not fast, spells its tokens in another way, or has no
            end token; or a stop id is out of range.
    """
    pieces: dict[str, int] = tokenizer.get_vocab()
    size = max(pieces.values()) + 1
    stop_ids = _stop_ids(tokenizer, extra_stop_ids, size)
    plain = _added_text(tokenizer)
    silent = stop_ids | set(tokenizer.all_special_ids)
    spell = _speller(tokenizer)
    tokens = [b""] * size
    for piece, token_id in pieces.items():
        if token_id in silent:
            continue
        tokens[token_id] = plain[token_id] if token_id in plain else spell(piece)
    eos = tokenizer.eos_token_id
    return TokenTable(tuple(tokens), frozenset(stop_ids), min(stop_ids) if eos is None else eos)


def check_token_bytes(engine: GrammarEngine, tokenizer: Any) -> None:
    """The engine's bytes of every token are what the tokenizer decodes it to.

    Tokens without bytes and tokens that are no whole UTF-8 characters are left out. A token is
    decoded behind another one, since SentencePiece decoders strip the first space of a text.

    Raises:
        ConfigError: naming the first token that differs.
    """
    anchor = _anchor(engine.table)
    decoder = tokenizer.backend_tokenizer
    ids = [token_id for token_id, token in enumerate(engine.table.tokens) if token]
    prefix: str = decoder.decode([anchor])
    texts: list[str] = decoder.decode_batch(
        [[anchor, token_id] for token_id in ids], skip_special_tokens=False
    )
    for token_id, text in zip(ids, texts, strict=True):
        decoded = text.removeprefix(prefix)
        if _REPLACEMENT not in decoded and decoded.encode() != engine.token_bytes(token_id):
            raise ConfigError(
                f"pair.tokenizer: token {token_id} is {engine.token_bytes(token_id)!r} to "
                f"{engine.name} but decodes to {decoded!r}; load the tokenizer as a fast one"
            )


def _stop_ids(tokenizer: Any, extra: Iterable[int], size: int) -> set[int]:
    eos = tokenizer.eos_token_id
    stop_ids = {*extra} | (set() if eos is None else {eos})
    if not stop_ids:
        raise ConfigError("pair.tokenizer: it has no end token; give extra stop ids")
    for token_id in stop_ids:
        if not 0 <= token_id < size:
            raise ConfigError(f"pair: stop id {token_id} is no token; use ids below {size}")
    return stop_ids


def _added_text(tokenizer: Any) -> dict[int, bytes]:
    """Added tokens stand for their text as it is, in no encoding; control tokens for nothing."""
    return {
        token_id: b""
        if added.special or _CONTROL_PIECE.fullmatch(added.content)
        else added.content.encode()
        for token_id, added in tokenizer.added_tokens_decoder.items()
    }


def _speller(tokenizer: Any) -> Callable[[str], bytes]:
    """What turns a vocabulary entry into bytes, by what the tokenizer decodes with."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("pair.tokenizer: it is a slow tokenizer; load its fast version")
    decoder = tokenizer.backend_tokenizer.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = {step["type"] for step in state.get("decoders", [state]) if step}
    if "ByteLevel" in steps:
        return _spell_byte_level
    if "ByteFallback" in steps:
        return _spell_byte_fallback
    if "Metaspace" in steps:
        return _spell_metaspace
    raise ConfigError(
        f"pair.tokenizer: cannot tell the bytes of its tokens (decoder {sorted(steps)}); use a "
        "byte-level or SentencePiece tokenizer"
    )


def _byte_level_map() -> dict[str, int]:
    """GPT-2's printable character of each byte: itself, or the next free one from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(0x100 + index): byte for index, byte in enumerate(moved)
    }


_BYTE_OF = _byte_level_map()


def _spell_byte_level(piece: str) -> bytes:
    if any(char not in _BYTE_OF for char in piece):
        return piece.encode()  # as the decoder does
    return bytes([_BYTE_OF[char] for char in piece])


def _spell_metaspace(piece: str) -> bytes:
    return piece.replace("▁", " ").encode()


def _spell_byte_fallback(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else _spell_metaspace(piece)


def _anchor(table: TokenTable) -> int:
    """A token of one ASCII letter."""
    for token_id, token in enumerate(table.tokens):
        if len(token) == 1 and token.isalpha():
            return token_id
    raise ConfigError("pair.tokenizer: no token is a single letter; its bytes cannot be checked")
