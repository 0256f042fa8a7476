"""One key for all spellings of a grammar, so that they share one compilation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from harness.grammar.schemas import SCHEMA_MAPS
from harness.grammar.spec import GrammarSpec

SUBSCHEMAS = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "contains", "prefixItems"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("not", "if", "then", "else", "allOf", "anyOf", "oneOf"),
    }
)
"""Keywords whose values are a schema or a list of schemas."""


@lru_cache(maxsize=1024)
def canonical(spec: GrammarSpec) -> GrammarSpec:
    """The spec under which ``spec`` is compiled and cached (S3a asks for equal texts).

    Only what can change neither the language nor the order in which an engine writes it:

    - the order of a schema's keywords. Names in ``properties`` keep theirs, since engines write
      properties in that order; so does data (``const``, ``enum``, …), and so do all lists;
    - order and repetition of choices.

    White space of JSON is gone already (``GrammarSpec``).
    """
    if spec.kind == "choice":
        return GrammarSpec.choice(sorted(set(spec.value)))
    if spec.kind == "json_schema":
        return GrammarSpec.json_schema(_sorted_keywords(spec.value))
    return spec


def _sorted_keywords(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_sorted_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: _sorted_value(keyword, schema[keyword]) for keyword in sorted(schema)}


def _sorted_value(keyword: str, value: Any) -> Any:
    if keyword in SCHEMA_MAPS and isinstance(value, dict):
        return {name: _sorted_keywords(item) for name, item in value.items()}
    return _sorted_keywords(value) if keyword in SUBSCHEMAS else value
