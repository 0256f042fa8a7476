"""xgrammar behind the matcher contract."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Self

import torch
import xgrammar

from harness.errors import GrammarError
from harness.grammar.adapter import CompiledMatcher, EngineMatcher, Vocabulary, one_line
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, TokenTable, Whitespace
from harness.grammar.schemas import subschemas
from harness.grammar.spec import GrammarSpec

# fmt: off
FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6",
    "json-pointer", "relative-json-pointer", "time", "uri",
    "uri-reference", "uri-template", "uuid",
})
# fmt: on
"""String formats that xgrammar turns into a grammar; it takes any other for a free string."""

MAX_MULTIPLE = 1024
"""The largest ``multipleOf`` of integers that xgrammar follows."""

_RULE, _SEQUENCE, _CHOICES, _REPEAT = 4, 5, 6, 8
"""Kinds of expressions that contain others, in xgrammar's serialised grammars."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LOOKAHEAD = re.compile(r"\(\?[=!]")
_LENGTHS = ("minLength", "maxLength")
_SOURCE_POSITION = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class XGrammarEngine(GrammarEngine):
    """Compiles with xgrammar, which follows bytes with an Earley parser.

    Objects take no properties but those that their schema names (xgrammar's strict mode).
    """

    name = "xgrammar"

    def __init__(self, table: TokenTable, whitespace: Whitespace = "compact") -> None:
        super().__init__(table, whitespace)
        self._vocabulary = Vocabulary(table)
        info = xgrammar.TokenizerInfo(
            self._vocabulary.text, xgrammar.VocabType.RAW, stop_token_ids=sorted(table.stop_ids)
        )
        self._token_bytes: list[bytes] = info.decoded_vocab
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind == "json_schema" and (problem := unsupported(spec.value)):
            raise GrammarError(f"grammar.json_schema: {problem}; reword it or use llguidance")
        try:
            rule = endless(self._recursive(spec))
            compiled = self._compile(spec) if rule is None else None
        except (RuntimeError, ValueError) as error:
            reason = _SOURCE_POSITION.sub("", one_line(str(error)))
            raise GrammarError(f"grammar.{spec.kind}: xgrammar refuses it: {reason}") from None
        if compiled is None:
            raise GrammarError(
                f"grammar.{spec.kind}: no finite text fits its rule {rule}, which contains itself; "
                "give it a way out"
            )
        start = XGrammarMatcher(self._vocabulary, xgrammar.GrammarMatcher(compiled))
        return CompiledMatcher(start, self.name, compiled.memory_size_bytes)

    @property
    def _json(self) -> dict[str, Any]:
        """How JSON is written."""
        return {"any_whitespace": self.whitespace == "free", "separators": self.separators}

    def _recursive(self, spec: GrammarSpec) -> xgrammar.Grammar | None:
        """The rules of a grammar that may contain themselves; None = they cannot."""
        if spec.kind == "ebnf":
            return xgrammar.Grammar.from_ebnf(spec.text)
        if spec.kind == "json_schema" and any("$ref" in part for part in subschemas(spec.value)):
            return xgrammar.Grammar.from_json_schema(spec.text, **self._json)
        return None

    def _compile(self, spec: GrammarSpec) -> Any:
        if spec.kind == "json_schema":
            return self._compiler.compile_json_schema(spec.text, **self._json)
        if spec.kind == "regex":
            return self._compiler.compile_regex(spec.text)
        source = _alternatives(spec.value) if spec.kind == "choice" else spec.text
        return self._compiler.compile_grammar(source)

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes[token_id]


class XGrammarMatcher(EngineMatcher):
    """Walks one ``xgrammar.GrammarMatcher``."""

    def __init__(self, vocabulary: Vocabulary, inner: Any) -> None:
        super().__init__(vocabulary)
        self._inner = inner

    def _engine_accept(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))

    def _engine_rollback(self, n: int) -> None:
        self._inner.rollback(n)

    def _engine_fill(self, mask: torch.Tensor, row: int) -> None:
        words = self._vocabulary.words
        if mask.shape[1] > words:  # it takes rows of its own width only
            mask, row = mask[row : row + 1, :words], 0
        self._inner.fill_next_token_bitmask(mask, row)

    def _engine_may_stop(self) -> bool:
        return bool(self._inner.is_completed())

    def forced_text(self) -> str:
        return str(self._inner.find_jump_forward_string())

    def _clone(self) -> Self:
        return type(self)(self._vocabulary, self._inner.fork())


def _alternatives(choices: list[str]) -> str:
    """EBNF of a choice; code points as escapes, so that no character needs care."""
    literals = ("".join(f"\\U{ord(char):08X}" for char in choice) for choice in choices)
    return "root ::= " + " | ".join(f'"{literal}"' for literal in literals)


def endless(grammar: xgrammar.Grammar | None) -> str | None:
    """The first rule that no finite text fits, such as that of an object which requires itself.

    Where it is all that may follow, the forced text has no end, and xgrammar 0.2.9 never returns
    from looking for that. An expression is finite once so many of its parts are; it is spread from
    those without parts. Expressions are numbered in ``serialize_json``: ``[kind, length, parts…]``.
    (That of a compiled grammar has its automata, too: up to 200 MB of them.)
    """
    if grammar is None:
        return None
    fields = json.loads(grammar.serialize_json())
    data, starts = fields["grammar_expr_data"], fields["grammar_expr_indptr"]
    bodies = [rule[1] for rule in fields["rules"]]
    users: dict[int, list[int]] = {}
    missing: list[int] = []
    for number, (start, end) in enumerate(pairwise([*starts, len(data)])):
        kind, _, *parts = data[start:end]
        needed = {_SEQUENCE: len(parts), _CHOICES: 1, _RULE: 1, _REPEAT: 1}.get(kind, 0)
        if kind in (_RULE, _REPEAT):
            needed = needed if kind == _RULE or parts[1] else 0
            parts = [bodies[parts[0]]]
        missing.append(needed)
        for part in parts if needed else ():
            users.setdefault(part, []).append(number)
    finite = [number for number, needed in enumerate(missing) if not needed]
    while finite:
        for user in users.get(finite.pop(), ()):
            missing[user] -= 1
            if missing[user] == 0:
                finite.append(user)
    names = (rule[0] for rule in fields["rules"])
    return next((name for name, body in zip(names, bodies, strict=True) if missing[body] > 0), None)


def unsupported(schema: Mapping[str, Any] | bool) -> str | None:
    """What xgrammar would drop without an error, so that outputs break the schema (V1.6g)."""
    return next((problem for part in subschemas(schema) for problem in _problems(part)), None)


def _problems(schema: Mapping[str, Any]) -> Iterator[str]:
    """The keywords of one schema, without its subschemas, that xgrammar gets wrong."""
    yield from _multiple_problems(schema)
    if _may_be(schema, "array"):
        if schema.get("uniqueItems"):
            yield "xgrammar ignores uniqueItems"
        for keyword in ("contains", "minContains", "maxContains"):
            if keyword in schema:
                yield f"xgrammar ignores {keyword}"
    if _may_be(schema, "string"):
        if "format" in schema and schema["format"] not in FORMATS:
            yield f"xgrammar does not know the format {schema['format']!r}"
        if _LOOKAHEAD.search(schema.get("pattern", "")):
            yield "xgrammar ignores lookahead in a pattern"
        for keyword in ("pattern", "format"):
            if keyword in schema and any(length in schema for length in _LENGTHS):
                yield f"xgrammar ignores length bounds beside {keyword}"
    if _may_be(schema, "object"):
        yield from _key_problems(schema)
    if len(schema.get("allOf", ())) > 1:
        yield "xgrammar ignores an allOf of several branches"


def _multiple_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    """xgrammar follows multiples of integers, within limits."""
    if "multipleOf" in schema and _may_be(schema, "number"):
        yield "xgrammar ignores multipleOf on numbers"
    elif not 0 < schema.get("multipleOf", 1) <= MAX_MULTIPLE:
        yield f"xgrammar ignores multipleOf above {MAX_MULTIPLE}"
    elif "multipleOf" in schema and any(bound in schema for bound in _BOUNDS):
        yield "xgrammar ignores multipleOf beside minimum or maximum"


def _key_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    """A key is held to just one of properties, patterns, propertyNames, additionalProperties."""
    for keyword in ("propertyNames", "patternProperties"):
        if keyword in schema and "type" not in schema:
            yield f"xgrammar ignores {keyword} without type: object"
    if "propertyNames" in schema:
        for keyword in ("properties", "patternProperties"):
            if keyword in schema:
                yield f"xgrammar ignores propertyNames beside {keyword}"
    if "patternProperties" in schema:
        if len(schema["patternProperties"]) > 1:
            yield "xgrammar holds a key to one pattern of patternProperties only"
        if schema.get("properties"):
            yield "xgrammar ignores patternProperties for the keys in properties"
        if schema.get("additionalProperties"):
            yield "xgrammar lets additionalProperties override patternProperties"


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    """True if the schema allows values of the JSON type ``kind``."""
    types = schema.get("type", kind)
    return kind == types or (isinstance(types, list) and kind in types)
