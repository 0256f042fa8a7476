"""Walking JSON schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SCHEMA_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose values map names to schemas."""

_DATA = ("enum", "const", "default", "examples")


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas inside it; names of properties and data are not keywords."""
    if isinstance(schema, list):
        for item in schema:
            yield from subschemas(item)
    elif isinstance(schema, Mapping):
        yield schema
        for keyword, value in schema.items():
            if keyword in SCHEMA_MAPS and isinstance(value, Mapping):
                for item in value.values():
                    yield from subschemas(item)
            elif keyword not in _DATA:
                yield from subschemas(value)
