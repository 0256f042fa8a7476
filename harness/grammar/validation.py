"""What no engine should be given, refused with the reason before anything is compiled.

Engines follow references and groups by recursion, and one that overflows its thread's stack takes
the whole process along. xgrammar 0.2.9 and llguidance 1.9.1 do so from about 1,500 references on
that lead into each other (in a stack of 8 MiB), and xgrammar in patterns of some 10,000 groups; the
bounds here are far below, and far above what schemas need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

from harness.errors import GrammarError
from harness.grammar.adapter import one_line
from harness.grammar.schemas import SCHEMA_MAPS, subschemas
from harness.grammar.spec import GrammarSpec

MAX_LEVELS = 512
"""Schemas inside each other, references followed; a recursive one counts once."""

MAX_GROUPS = 256
"""Groups and quantifiers of a pattern around each other."""

_NO_FORMATS = FormatChecker(())
"""A pattern is ECMA's, and up to the engine: Python's ``re`` knows no ``\\p{Lu}``, for one."""

_DEFINITIONS = ("$defs", "definitions")
_SYNTAX = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|(\()|(\))|([*+?]|\{[\d,]*\})", re.DOTALL)


def validate(spec: GrammarSpec) -> None:
    """Refuse what no engine should be given (V1.6f).

    ``GrammarSpec`` has refused blank grammars, empty choices, NULs and deep nesting already, and
    each engine's adapter refuses what that engine would drop in silence (V1.6g). A blank regex is
    legal.

    Raises:
        GrammarError: the text is no Unicode, or the schema is invalid, or something is so deep
            that engines crash.
    """
    try:
        spec.text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"grammar.{spec.kind}: it holds a lone surrogate; remove it") from None
    if spec.kind == "json_schema":
        _validate_schema(spec.value)
    elif spec.kind == "regex":
        _validate_patterns(spec.kind, [spec.text])


def _validate_schema(schema: Any) -> None:
    """Depth first, since the check against the meta-schema recurses as well, and takes long."""
    if isinstance(schema, dict) and not isinstance(schema.get("$schema", ""), str):
        raise GrammarError("grammar.json_schema: $schema is no string; name a dialect or omit it")
    if _levels(schema) > MAX_LEVELS:
        raise GrammarError(
            f"grammar.json_schema: more than {MAX_LEVELS} schemas inside each other, references "
            "followed; shorten its chain of $ref"
        )
    _validate_patterns("json_schema", _patterns(schema))
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema, format_checker=_NO_FORMATS)
    except SchemaError as error:
        raise GrammarError(
            f"grammar.json_schema: invalid at {error.json_path}: {one_line(error.message)}; fix it"
        ) from None


def _validate_patterns(kind: str, patterns: Iterable[str]) -> None:
    if any(_groups(pattern) > MAX_GROUPS for pattern in patterns):
        raise GrammarError(
            f"grammar.{kind}: a pattern nests more than {MAX_GROUPS} groups and quantifiers; "
            "flatten it"
        )


def _levels(schema: Any) -> int:
    """How deep a walk gets that goes into each reference once, as those of the engines do."""
    resolver = EMPTY_REGISTRY.with_resource("", DRAFT202012.create_resource(schema)).resolver()
    seen: set[int] = set()

    def inside(part: Any) -> Iterator[Any]:
        yield from _parts(part)
        if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
            try:
                target = resolver.lookup(part["$ref"]).contents
            except (Unresolvable, ValueError):  # for the engine to refuse
                return
            if id(target) not in seen:
                seen.add(id(target))
                yield target

    walk, deepest = [iter([schema])], 0
    while walk and deepest <= MAX_LEVELS:
        part = next(walk[-1], None)
        if part is None:
            walk.pop()
            continue
        deepest = max(deepest, len(walk))
        walk.append(inside(part))
    return deepest


def _parts(schema: Any) -> Iterator[Any]:
    """The schemas, and lists of them, right inside one; not its definitions."""
    if isinstance(schema, list):
        yield from schema
    elif isinstance(schema, Mapping):
        for keyword, value in schema.items():
            if keyword in SCHEMA_MAPS - {*_DEFINITIONS} and isinstance(value, Mapping):
                yield from value.values()
            elif keyword not in _DEFINITIONS and isinstance(value, (Mapping, list)):
                yield value


def _patterns(schema: Any) -> Iterator[str]:
    """All regular expressions of a schema, valid or not."""
    for part in subschemas(schema):
        if isinstance(part.get("pattern"), str):
            yield part["pattern"]
        if isinstance(part.get("patternProperties"), Mapping):
            yield from part["patternProperties"]


def _groups(pattern: str) -> int:
    """How many groups are open at most, each quantifier right behind another one added: they
    nest, too."""
    deepest = depth = row = end = 0
    for match in _SYNTAX.finditer(pattern):
        opening, closing, quantifier = match.groups()
        depth += bool(opening) - bool(closing)
        row = 0 if not quantifier else row + 1 if match.start() == end else 1
        end = match.end()
        deepest = max(deepest, depth + row)
    return deepest
