"""What a request asks of its output, before any grammar engine sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.errors import GrammarError

Kind = Literal["json_schema", "regex", "choice", "ebnf"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "choice", "ebnf")

MAX_DEPTH = 64
"""Nesting of arrays and objects in a JSON schema (V1.6f)."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar in the words of its user. Build it with one of the class methods.

    ``text`` is canonical, so equal grammars are equal specs and share one compilation:
    JSON without spaces for ``json_schema`` (its key order is kept: engines emit properties
    in that order), a JSON array of strings for ``choice``, the source itself for ``regex``
    and ``ebnf`` (the EBNF dialect of xgrammar and llama.cpp; the start rule is ``root``).

    Raises:
        GrammarError: the grammar is blank, is not what its kind asks for, is nested too deep, or
            holds a NUL, which crashes engines' regex converters (S3g).
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"grammar.kind: {self.kind!r} is none of {', '.join(KINDS)}")
        if "\x00" in self.text or (self.kind in ("json_schema", "choice") and _nul(self.value)):
            raise GrammarError(f"grammar.{self.kind}: a NUL character is not allowed; remove it")
        if self.kind == "ebnf" and not self.text.strip():
            raise GrammarError("grammar.ebnf: the grammar is blank; define a rule named root")
        if self.kind == "choice" and not self.value:
            raise GrammarError("grammar.choice: the list is empty; name at least one choice")

    @property
    def value(self) -> Any:
        """The schema, the list of choices, or the source text."""
        return json.loads(self.text) if self.kind in ("json_schema", "choice") else self.text

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> GrammarSpec:
        if isinstance(schema, str):
            if not schema.strip():
                raise GrammarError("grammar.json_schema: the schema is blank; give a JSON object")
            try:
                schema = json.loads(schema)
            except (json.JSONDecodeError, RecursionError) as error:
                raise GrammarError(f"grammar.json_schema: not JSON ({error}); fix it") from None
        if not isinstance(schema, (Mapping, bool)):
            raise GrammarError("grammar.json_schema: a schema is a JSON object or a boolean")
        if _deeper_than(MAX_DEPTH, schema):  # before anything that recurses without a bound
            raise GrammarError(
                f"grammar.json_schema: nested deeper than {MAX_DEPTH} levels; flatten it with $ref"
            )
        return cls("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise GrammarError("grammar.choice: give a list of strings")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def ebnf(cls, source: str) -> GrammarSpec:
        return cls("ebnf", source)


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, (Mapping, list)):
        return False
    children = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(_deeper_than(levels - 1, child) for child in children)


def _nul(value: Any) -> bool:
    """True if any key or string inside a decoded JSON value holds a NUL (S3g)."""
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(_nul(key) or _nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_nul(item) for item in value)
