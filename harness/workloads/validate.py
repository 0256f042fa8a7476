"""Checks outputs with ``jsonschema`` and RE2, which know nothing of the grammar engines.

Judging always ends. Patterns are matched by RE2 (Arrow brings it along) in a time that is linear in
the text, whatever the pattern; Python's ``re`` backtracks, for ever if need be, and no other thread
can stop it. What is lost: look-around, back references and bounds above 1000 are not in RE2, nor
are they in the engines' grammars, so outputs of such patterns get no verdict. ``\\d``, ``\\w`` and
``\\b`` are ASCII, as in ECMA 262, whose patterns JSON Schema speaks of. A schema whose references
fan out without end gets no verdict either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend, validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

from harness.grammar.schemas import subschemas
from harness.grammar.spec import GrammarSpec
from harness.workloads.item import Item

FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
"""The formats that ``jsonschema`` checks by itself; others need packages that may be absent."""

MAX_REFERENCES = 20_000
"""References that are followed to judge one output: about a second. ``$ref`` is the only way in
which a short schema can ask for endless work."""

_left: ContextVar[Iterator[int]] = ContextVar("references left")
_CODE_UNIT = re.compile(r"(\\\\)|\\u([0-9a-fA-F]{4})")
_Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError]]


class Undecided(Exception):
    """The judge does not know; the message says why."""


def validate(item: Item, text: str, answer: str | None = None) -> bool | None:
    """Whether ``text``, the whole output, is what the item asked for.

    Args:
        item: its grammar says how to check: strict JSON and the schema for ``json_schema``, the
            whole answer for ``regex`` and ``choice``. ``ebnf`` has no independent reader. With a
            trigger that needs not appear, or that is a part of the answer, only ``valid_regex``,
            which is checked wherever an item has it, can judge.
        text: the output without its stop token.
        answer: of a model that thinks first, the text behind that; None = all of ``text``.

    Returns:
        None if no check applies: there is nothing to check, or the schema or the pattern is
        outside of what ``jsonschema`` and RE2 know.
    """
    late = item.trigger is not None and item.trigger.kind != "reasoning"
    grammar = None if late else item.grammar
    verdicts = [
        None if grammar is None else _follows(grammar, text if answer is None else answer),
        None if item.valid_regex is None else _matches(item.valid_regex, text),
    ]
    known = [verdict for verdict in verdicts if verdict is not None]
    return all(known) if known else None


def _follows(grammar: GrammarSpec, text: str) -> bool | None:
    match grammar.kind:
        case "json_schema":
            return _fits_schema(grammar.text, text)
        case "regex":
            return _matches(grammar.text, text)
        case "choice":
            return text in grammar.value
        case "ebnf":
            return None


def _matches(pattern: str, text: str) -> bool | None:
    try:
        _found(pattern, "")  # by itself: inside of a group its brackets might close that
        return _found(rf"\A(?:{pattern})\z", text)
    except Undecided:
        return None


def _found(pattern: str, text: str) -> bool:
    """Whether a part of ``text`` matches.

    Raises:
        Undecided: RE2 does not know the pattern, or the text is no Unicode.
    """
    pattern = _CODE_UNIT.sub(lambda escape: escape[1] or rf"\x{{{escape[2]}}}", pattern)
    try:
        return bool(pc.match_substring_regex(pa.array([text]), pattern)[0].as_py())
    except (pa.ArrowInvalid, UnicodeEncodeError) as error:
        raise Undecided(str(error)) from None


def _fits_schema(schema: str, text: str) -> bool | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return None
    except ValueError:  # no JSON, or text behind it
        return False
    _left.set(iter(range(MAX_REFERENCES)))
    try:
        return bool(_validator(schema).is_valid(value))
    except (SchemaError, Undecided, Unresolvable, RecursionError, OverflowError):
        return None


def _refuse_constant(name: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Any:
    """The validator of a schema's own draft, 2020-12 by default; never loads a remote schema.

    Raises:
        SchemaError: the schema is not one.
        Undecided: it asks which properties others have not evaluated, a question that
            ``jsonschema`` settles with ``re`` where there are ``patternProperties``.
    """
    schema = json.loads(schema_text)
    draft = validator_for(schema, default=Draft202012Validator)
    draft.check_schema(schema, format_checker=FORMATS)  # not whether patterns are Python's
    keywords: set[str] = set()
    for part in subschemas(schema):
        keywords |= part.keys()
        # It would bring the draft's own validator back.
        cast(dict[str, Any], part).pop("$schema", None)
    if keywords >= {"unevaluatedProperties", "patternProperties"}:
        raise Undecided("unevaluatedProperties beside patternProperties")
    return _bounded(draft)(schema, registry=EMPTY_REGISTRY, format_checker=FORMATS)


@lru_cache
def _bounded(draft: Any) -> Any:
    """A draft's validator with RE2 in place of ``re``, and an end of references."""
    references = [name for name in draft.VALIDATORS if name.lower().endswith("ref")]
    return extend(
        draft,
        {
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
            **{name: _counted(draft.VALIDATORS[name]) for name in references},
        },
    )


def _counted(follow: _Keyword) -> _Keyword:
    """A keyword that refers to a schema, within ``MAX_REFERENCES``."""

    def keyword(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if next(_left.get(), None) is None:
            raise Undecided(f"more than {MAX_REFERENCES} references")
        yield from follow(validator, value, instance, schema)

    return keyword


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _found(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, _: Any
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, schema in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, additional: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    """Of names that neither ``properties`` nor ``patternProperties`` beside it speak of."""
    if validator.is_type(instance, "object"):
        patterns = schema.get("patternProperties", ())
        for name in instance.keys() - schema.get("properties", {}).keys():
            if not any(_found(pattern, name) for pattern in patterns):
                yield from validator.descend(instance[name], additional, path=name)
