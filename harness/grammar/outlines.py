"""outlines-core behind the matcher contract, within its limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Self

import torch

from harness.errors import ConfigError, GrammarError
from harness.grammar.adapter import CompiledMatcher, EngineMatcher, Vocabulary, one_line
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, TokenTable, Whitespace
from harness.grammar.schemas import subschemas
from harness.grammar.spec import GrammarSpec

MAX_ROLLBACK = 32
"""Tokens that a ``Guide`` keeps to be taken back; the default of outlines-core."""

FORMATS = frozenset({"date", "date-time", "email", "time", "uri", "uuid"})
"""String formats that outlines-core has an expression for."""

# fmt: off
_KNOWN = frozenset({
    "type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions",
    "properties", "required", "additionalProperties", "items", "prefixItems",
    "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
    "$schema", "$id", "$comment", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
})
# fmt: on
_OVERRIDES = {
    "properties": ("additionalProperties", "enum", "const", "anyOf", "oneOf", "$ref"),
    "prefixItems": ("items", "minItems", "maxItems"),
    "minLength": ("pattern", "format"),
    "maxLength": ("pattern", "format"),
    "pattern": ("format",),
    "anyOf": ("oneOf", "enum", "const", "$ref"),
    "oneOf": ("enum", "const", "$ref"),
    "enum": ("const", "$ref"),
    "const": ("$ref",),
}
"""By keyword, those of the same schema that outlines-core has no regard to then, or the reverse."""

_SPACE = "\ue000"
"""Stands for white space in an expression until it is known what precedes it."""


class OutlinesEngine(GrammarEngine):
    """Compiles with outlines-core: every grammar becomes a regular expression, that an automaton
    over the whole vocabulary, so a compilation takes long and a mask next to nothing.

    Its limits, as seen with outlines-core 0.2.14:

    - no EBNF; schemas without recursion; expressions without anchors, word boundaries and
      look-around;
    - alternatives are leftmost-first: ``ab|abc`` never accepts ``abc``. Choices are compiled
      longest first, which makes them exact;
    - it loses tokens whose last byte leads from a whole output to one that is not, so ``a(bb)?``
      cannot go on with ``b`` (nor a bare JSON number with ``.``), only with ``bb``;
    - of a schema it drops what it does not know without a word: such keywords are refused here
      (V1.6g). What is left is not exact: objects take no properties but those that their schema
      names, a ``pattern`` must match the whole string, and values without a schema are nested
      three levels deep at most, so outputs are fewer than the schema allows; ``oneOf`` is
      ``anyOf``, and ``enum`` and ``const`` have no regard to ``type``, so they are more;
    - a grammar that needs bytes of which no token is made is refused when it is compiled,
      where other engines run into a dead end (T7);
    - the last 32 tokens can be taken back, and nothing is forced, so there is no jump-forward (as
      in SGLang): strategies that need more are refused by name.

    Raises:
        ConfigError: outlines-core is not installed.
    """

    name = "outlines"
    max_rollback = MAX_ROLLBACK

    def __init__(self, table: TokenTable, whitespace: Whitespace = "compact") -> None:
        super().__init__(table, whitespace)
        try:
            self._core = import_module("outlines_core")
        except ImportError:
            raise ConfigError(
                "grammar.engine: outlines is not installed; pip install outlines-core"
            ) from None
        self._vocabulary = Vocabulary(table)
        ids: dict[bytes, list[int]] = {}
        for token_id in sorted(self._vocabulary.text_ids):
            ids.setdefault(self._vocabulary.text[token_id], []).append(token_id)
        self._tokens = self._core.Vocabulary(table.eos_id, ids)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            index = self._core.Index(self._expression(spec), self._tokens)
        except ValueError as error:
            reason = one_line(str(error))
            raise GrammarError(f"grammar.{spec.kind}: outlines refuses it: {reason}") from None
        return CompiledMatcher(
            OutlinesMatcher(self._vocabulary, self._core.Guide, index), self.name
        )

    def _expression(self, spec: GrammarSpec) -> str:
        if spec.kind == "ebnf":
            raise GrammarError("grammar.ebnf: outlines knows regular grammars only; use xgrammar")
        if spec.kind == "choice":
            longest_first = sorted(spec.value, key=len, reverse=True)
            return "|".join(f"(?:{_escaped(choice)})" for choice in longest_first)
        if spec.kind == "regex":
            return spec.text
        if problem := unsupported(spec.value):
            raise GrammarError(f"grammar.json_schema: {problem}; reword it or use llguidance")
        return self._spaced(self._core.json_schema.build_regex_from_schema(spec.text, _SPACE))

    def _spaced(self, expression: str) -> str:
        """outlines has one pattern for all white space: put what ``whitespace`` means instead."""
        if self.whitespace == "free":
            return expression.replace(_SPACE, r"[ \t\n\r]*")
        for separator in self.separators:
            expression = expression.replace(separator.strip() + _SPACE, separator)
        return expression.replace(_SPACE, "")

    def token_bytes(self, token_id: int) -> bytes:
        text = self._vocabulary.text[token_id]
        return text if token_id in (self._tokens.get(text) or ()) else b""


class OutlinesMatcher(EngineMatcher):
    """Walks one ``outlines_core.Guide``, which has no copies: a fork replays the tokens."""

    def __init__(
        self, vocabulary: Vocabulary, guide: Any, index: Any, history: Sequence[int] = ()
    ) -> None:
        super().__init__(vocabulary)
        self._guide, self._index = guide, index
        self._inner = guide(index, max_rollback=MAX_ROLLBACK)
        self._history: list[int] = []
        for token in history:
            self._engine_accept(token)

    def _engine_accept(self, token: int) -> bool:
        try:
            self._inner.advance(token, return_tokens=False)
        except ValueError:  # its way to refuse a token
            return False
        self._history.append(token)
        return True

    def _engine_rollback(self, n: int) -> None:
        self._inner.rollback_state(n)
        del self._history[-n:]

    def _engine_fill(self, mask: torch.Tensor, row: int) -> None:
        words = self._vocabulary.words
        address = mask.data_ptr() + row * mask.stride(0) * mask.itemsize
        self._inner.write_mask_into(address, words, mask.itemsize)
        if self._engine_may_stop():  # it knows one end token only
            mask.numpy()[row, :words] |= self._vocabulary.stop_row

    def _engine_may_stop(self) -> bool:
        return bool(self._inner.is_finished())

    def forced_text(self) -> str:
        """Nothing, ever: an automaton over tokens knows no text to come."""
        return ""

    def _clone(self) -> Self:
        return type(self)(self._vocabulary, self._guide, self._index, self._history)


def _escaped(text: str) -> str:
    """A literal of Rust's expressions; ``re.escape`` escapes what those do not let it."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text)


def unsupported(schema: Any) -> str | None:
    """What outlines-core would drop without an error, so that outputs break the schema."""
    return next((problem for part in subschemas(schema) for problem in _problems(part)), None)


def _problems(schema: Mapping[str, Any]) -> Iterator[str]:
    """What outlines-core gets wrong in one schema, without its subschemas."""
    for keyword in sorted(schema.keys() - _KNOWN):
        yield f"outlines does not know {keyword}"
    for keyword, others in _OVERRIDES.items():
        for other in others:
            if keyword in schema and schema.get(other) not in (None, True, False):
                yield f"outlines ignores {other} beside {keyword}"
    if "format" in schema and schema["format"] not in FORMATS:
        yield f"outlines does not know the format {schema['format']!r}"
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in properties:
            yield f"outlines ignores that {name!r} is required: properties does not name it"
    for name in properties:
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            yield f"outlines does not escape the name {name!r}"
