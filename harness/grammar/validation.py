"""What no engine should be given, refused with the reason before anything is compiled."""

from __future__ import annotations

from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

from harness.errors import GrammarError
from harness.grammar.adapter import one_line
from harness.grammar.spec import GrammarSpec


def validate(spec: GrammarSpec) -> None:
    """Refuse what no engine should be given (V1.6f).

    ``GrammarSpec`` has refused blank grammars, empty choices, NULs and deep nesting already, and
    each engine's adapter refuses what that engine would drop in silence (V1.6g). A blank regex is
    legal.

    Raises:
        GrammarError: the text is no Unicode, or the schema is invalid.
    """
    try:
        spec.text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"grammar.{spec.kind}: it holds a lone surrogate; remove it") from None
    if spec.kind == "json_schema":
        _validate_schema(spec.value)


def _validate_schema(schema: Any) -> None:
    if isinstance(schema, dict) and not isinstance(schema.get("$schema", ""), str):
        raise GrammarError("grammar.json_schema: $schema is no string; name a dialect or omit it")
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise GrammarError(
            f"grammar.json_schema: invalid at {error.json_path}: {one_line(error.message)}; fix it"
        ) from None
