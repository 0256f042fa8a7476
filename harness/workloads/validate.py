"""Checks outputs with ``jsonschema`` and ``re``, which know nothing of the grammar engines."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

from harness.grammar.spec import GrammarSpec
from harness.workloads.item import Item

FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
"""The formats that ``jsonschema`` checks by itself; others need packages that may be absent."""


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
        outside of what ``jsonschema`` and ``re`` know.
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
        return re.fullmatch(pattern, text) is not None
    except re.error:
        return None


def _fits_schema(schema: str, text: str) -> bool | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        return bool(_validator(schema).is_valid(value))
    except (SchemaError, Unresolvable, re.error, RecursionError, OverflowError):
        return None
    except ValueError:  # from json.loads: no JSON, or text behind it
        return False


def _refuse_constant(name: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Any:
    """The validator of a schema's own draft, 2020-12 by default; never loads a remote schema.

    Raises:
        SchemaError: the schema is not one.
    """
    schema = json.loads(schema_text)
    draft = validator_for(schema, default=Draft202012Validator)
    draft.check_schema(schema)
    return draft(schema, registry=EMPTY_REGISTRY, format_checker=FORMATS)
