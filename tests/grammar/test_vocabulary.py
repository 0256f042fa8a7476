"""The bytes of tokens: from the tokenizer's own encoding, and the same to every engine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness.errors import ConfigError
from harness.grammar.matcher import TokenTable
from harness.grammar.service import grammar_engine
from harness.grammar.vocabulary import check_token_bytes, token_table

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ENGINES = [
    *("xgrammar", "llguidance", "auto"),
    pytest.param(
        "outlines",
        marks=pytest.mark.skipif(
            find_spec("outlines_core") is None, reason="outlines-core is not installed"
        ),
    ),
]


def wrap(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level(*words: str, added: tuple[AddedToken, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose vocabulary is all bytes, ``words`` and EOS."""
    pieces = [*ALPHABET, *words]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([*added])
    return wrap(backend, eos_token="<|end|>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """A tokenizer that spells a space as ▁ and single bytes as <0xXX>, in Llama's way."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "▁", "▁né", "▁▁"]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(backend, eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁a", -1.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    return wrap(backend, eos_token="</s>", unk_token="<unk>")


def test_byte_level_characters_are_read_back_as_bytes():
    tokenizer = byte_level("Ġthe", "Ã©", "ĊĊ")
    table = token_table(tokenizer)
    ids = tokenizer.get_vocab()
    assert table.tokens[ids["Ġthe"]] == b" the"
    assert table.tokens[ids["Ã©"]] == "é".encode()
    assert table.tokens[ids["ĊĊ"]] == b"\n\n"
    assert sorted(table.tokens[:256]) == [bytes([byte]) for byte in range(256)]


def test_a_split_character_keeps_its_single_bytes():
    tokenizer = byte_level()
    table = token_table(tokenizer)
    assert table.tokens[tokenizer.get_vocab()["Ã"]] == b"\xc3"


def test_sentence_pieces_are_read_back_as_bytes():
    tokenizer = sentence_piece()
    table = token_table(tokenizer)
    ids = tokenizer.get_vocab()
    assert table.tokens[ids["▁né"]] == " né".encode()
    assert table.tokens[ids["▁▁"]] == b"  "
    assert table.tokens[ids["<0x0A>"]] == b"\n"
    assert table.tokens[ids["<0xC3>"]] == b"\xc3"
    assert table.tokens[ids["<unk>"]] == b""


def test_pieces_of_a_metaspace_tokenizer_have_no_byte_tokens():
    tokenizer = metaspace()
    assert token_table(tokenizer).tokens[tokenizer.get_vocab()["▁a"]] == b" a"


def test_control_tokens_have_no_bytes_and_other_added_tokens_have_theirs():
    added = (
        AddedToken("<tool>", special=False),
        AddedToken("[INST]", special=False),
        AddedToken("pad", special=True),
        AddedToken("é é", special=False),
    )
    tokenizer = byte_level(added=added)
    table, ids = token_table(tokenizer), tokenizer.get_vocab()
    assert [table.tokens[ids[token.content]] for token in added] == [b"", b"", b"", "é é".encode()]


def test_the_tokenizers_end_and_the_extra_stops_are_one_set_r19():
    tokenizer = byte_level("stop")
    stop = tokenizer.get_vocab()["stop"]
    table = token_table(tokenizer, [stop])
    assert table.stop_ids == {stop, tokenizer.eos_token_id}
    assert table.eos_id == tokenizer.eos_token_id
    assert table.tokens[stop] == b""


@pytest.mark.parametrize("stop", [-1, 10_000])
def test_a_stop_id_that_is_no_token_is_refused(stop):
    with pytest.raises(ConfigError, match=f"stop id {stop} is no token"):
        token_table(byte_level(), [stop])


def test_a_tokenizer_without_an_end_needs_a_stop_id():
    tokenizer = byte_level("stop")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end token"):
        token_table(tokenizer)
    assert token_table(tokenizer, [256]).eos_id == 256


def test_an_unknown_spelling_is_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="decoder \\['WordPiece'\\]"):
        token_table(wrap(backend, eos_token="</s>"))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "tokenizer", [byte_level("Ġthe", "Ã©", "ï¿½"), sentence_piece(), metaspace()]
)
def test_every_engine_sees_the_bytes_that_the_tokenizer_decodes(name, tokenizer):
    check_token_bytes(grammar_engine(name, token_table(tokenizer)), tokenizer)


@pytest.mark.parametrize("name", ENGINES)
def test_a_table_of_raw_byte_level_text_is_caught(name):
    tokenizer = byte_level("Ġthe")
    right = token_table(tokenizer)
    wrong = tokenizer.get_vocab()["Ġthe"]
    tokens = list(right.tokens)
    tokens[wrong] = "Ġthe".encode()
    engine = grammar_engine(name, TokenTable(tuple(tokens), right.stop_ids, right.eos_id))
    with pytest.raises(ConfigError, match=f"token {wrong} is .* decodes to ' the'"):
        check_token_bytes(engine, tokenizer)


@pytest.mark.parametrize("name", ENGINES)
def test_special_tokens_have_no_bytes_to_any_engine(name):
    table = token_table(byte_level())
    assert grammar_engine(name, table).token_bytes(table.eos_id) == b""
