"""llguidance behind the matcher contract."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Self

import llguidance
import torch
from llguidance.gbnf_to_lark import gbnf_to_lark

from harness.errors import GrammarError
from harness.grammar.adapter import CompiledMatcher, EngineMatcher, Vocabulary, one_line
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, TokenTable, Whitespace
from harness.grammar.spec import GrammarSpec

_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it a mask allows, of a forced text, just the tokens that the tokenizer would choose:
a narrower language than ``accept`` and ``validate`` follow, and than xgrammar masks."""

_SOURCE_LISTING = re.compile(r"\n +\d+ \| ")


class LLGuidanceEngine(GrammarEngine):
    """Compiles with llguidance: a lexer of regex derivatives below an Earley parser.

    Regular grammars are compiled to one lexeme, which makes them exact. In others the lexer
    prefers the longest lexeme, where xgrammar follows all splits.
    """

    name = "llguidance"

    def __init__(self, table: TokenTable, whitespace: Whitespace = "compact") -> None:
        super().__init__(table, whitespace)
        self._vocabulary = Vocabulary(table)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TableTokenizer(self._vocabulary))
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            inner = llguidance.LLMatcher(self._tokenizer, _HEADER + self._lark(spec), log_level=0)
        except Exception as error:  # gbnf_to_lark raises bare Exceptions
            raise GrammarError(f"grammar.{spec.kind}: {one_line(str(error))}; fix it") from None
        if inner.is_error():
            reason = one_line(_SOURCE_LISTING.split(inner.get_error())[0])
            raise GrammarError(f"grammar.{spec.kind}: llguidance refuses it: {reason}")
        return CompiledMatcher(LLGuidanceMatcher(self._vocabulary, inner), self.name)

    def _lark(self, spec: GrammarSpec) -> str:
        if spec.kind == "json_schema":
            schema = {} if spec.value is True else spec.value
            if isinstance(schema, dict):
                item, key = self.separators
                options = {
                    "whitespace_flexible": self.whitespace == "free",
                    "item_separator": item,
                    "key_separator": key,
                }
                schema = {**schema, "x-guidance": options}
            return f"start: %json {json.dumps(schema)}"
        if spec.kind == "regex":
            return f"start: TEXT\nTEXT: /{_lark_regex(spec.text)}/"
        if spec.kind == "choice":
            return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, spec.value))
        return _lark_rules(spec.text)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes(self._tokenizer.decode_bytes([token_id]))


class LLGuidanceMatcher(EngineMatcher):
    """Walks one ``llguidance.LLMatcher``.

    It enters an error state for good where the vocabulary has no legal token, and there allows
    EOS. Such a state is undone by replaying the tokens so far on a fresh copy.
    """

    def __init__(
        self, vocabulary: Vocabulary, start: Any, inner: Any = None, history: Sequence[int] = ()
    ) -> None:
        super().__init__(vocabulary)
        self._start = start
        self._inner = inner or start.deep_copy()
        self._history = list(history)

    def _engine_accept(self, token: int) -> bool:
        accepted: bool = self._inner.try_consume_tokens([token]) == 1
        if accepted:
            self._history.append(token)
        return accepted

    def _engine_rollback(self, n: int) -> None:
        self._inner.rollback(n)
        del self._history[-n:]

    def _engine_fill(self, mask: torch.Tensor, row: int) -> None:
        words = self._vocabulary.words
        address = mask.data_ptr() + row * mask.stride(0) * mask.itemsize
        self._inner.unsafe_compute_mask_ptr(address, words * mask.itemsize)
        if self._inner.is_error():
            mask[row] = 0
            self._inner = self._start.deep_copy()
            self._inner.try_consume_tokens(self._history)
        elif self._engine_may_stop():  # it knows one end token only
            mask.numpy()[row, :words] |= self._vocabulary.stop_row

    def _engine_may_stop(self) -> bool:
        return bool(self._inner.is_accepting())

    def forced_text(self) -> str:
        forced = self._inner.compute_ff_bytes()
        try:
            return str(forced, "utf-8")
        except UnicodeDecodeError as error:  # it starts or stops inside a character
            return str(forced[: error.start], "utf-8")

    def _clone(self) -> Self:
        return type(self)(self._vocabulary, self._start, self._inner.deep_copy(), self._history)


class _TableTokenizer:
    """A token table as the tokenizer that ``LLTokenizer`` wants.

    Not llguidance's Hugging Face adapter: that one guesses the byte encoding of the tokens,
    and guessed wrong for byte-level tokenizers read from a GGUF.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._table = vocabulary.table
        self.eos_token_id = vocabulary.table.eos_id
        self.tokens = vocabulary.text
        self.special_token_ids = [
            token_id for token_id, text in enumerate(vocabulary.text) if not text
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._table.encode_greedily(text)


def _lark_regex(pattern: str) -> str:
    """A pattern as the body of a Lark ``/regex/``: no bare slash, no line break."""

    def replace(match: re.Match[str]) -> str:
        text = match[0]
        return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(text, text)

    return re.sub(r"\\.|/|\n", replace, pattern, flags=re.DOTALL)


def _lark_rules(source: str) -> str:
    """Lark of a GBNF grammar.

    The converter makes a lexeme of every regular rule but ``root``; a root that only refers to
    the rule that was root lets it be one, too.
    """
    source = re.sub(r"^(\s*)root(\s*::=)", r"\1root-text\2", source, count=1, flags=re.MULTILINE)
    lark = gbnf_to_lark(f"root ::= root-text\n{_plain_escapes(source)}")
    return str(lark).removeprefix("%llguidance {}")


def _plain_escapes(source: str) -> str:
    r"""GBNF with characters for ``\xHH``, ``\uHHHH`` and ``\UHHHHHHHH``.

    The converter passes these on, but Lark strings and regexes read them in other ways.
    """

    def replace(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if not digits:
            return match[0]
        char = chr(int(digits, 16))
        if char in '"\\':
            return "\\" + char
        if char in "\n\r\t":
            return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
        special = char < " " or char in "[]^-\x7f"
        return f"\\x{ord(char):02x}" if special else char

    escape = r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)"
    return re.sub(escape, replace, source)
