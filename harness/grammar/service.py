"""From a grammar spec to a compiled grammar: validated first, compiled once."""

from __future__ import annotations

from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

from harness.clock import Clock
from harness.errors import ConfigError, GrammarError
from harness.grammar.adapter import one_line
from harness.grammar.llguidance import LLGuidanceEngine
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, TokenTable, Whitespace
from harness.grammar.spec import GrammarSpec
from harness.grammar.xgrammar import XGrammarEngine

ENGINES: dict[str, type[GrammarEngine]] = {
    engine.name: engine for engine in (XGrammarEngine, LLGuidanceEngine)
}

MAX_DEPTH = 64
"""Nesting of arrays and objects in a JSON schema (V1.6f)."""


def grammar_engine(
    name: str, table: TokenTable, whitespace: Whitespace = "compact"
) -> GrammarEngine:
    """The engine called ``name``, for one vocabulary.

    Raises:
        ConfigError: there is no such engine.
    """
    if name not in ENGINES:
        raise ConfigError(f"grammar.engine: {name!r} is unknown; use one of {', '.join(ENGINES)}")
    return ENGINES[name](table, whitespace)


class GrammarService:
    """Compiles each spec once. A failure is not kept: it is one request's, each time (V1.6b)."""

    def __init__(self, engine: GrammarEngine) -> None:
        self.engine = engine
        self._compiled: dict[GrammarSpec, CompiledGrammar] = {}

    def compile(self, spec: GrammarSpec) -> tuple[CompiledGrammar, float]:
        """The compiled grammar, and the time that it took, ms; 0.0 from the cache.

        Raises:
            GrammarError: the spec is invalid, or the engine refuses it.
        """
        if spec in self._compiled:
            return self._compiled[spec], 0.0
        with Clock().span("compile") as span:
            validate(spec)
            compiled = self.engine.compile(spec)
        self._compiled[spec] = compiled
        return compiled, span.us / 1e3


def validate(spec: GrammarSpec) -> None:
    """Refuse what no engine should be given (V1.6f).

    Raises:
        GrammarError: the text is no Unicode; or the schema is nested too deep or invalid.
    """
    try:
        spec.text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"grammar.{spec.kind}: it holds a lone surrogate; remove it") from None
    if spec.kind != "json_schema":
        return
    schema = spec.value
    if _deeper_than(MAX_DEPTH, schema):
        raise GrammarError(
            f"grammar.json_schema: nested deeper than {MAX_DEPTH} levels; flatten it with $ref"
        )
    if isinstance(schema, dict) and not isinstance(schema.get("$schema", ""), str):
        raise GrammarError("grammar.json_schema: $schema is no string; name a dialect or omit it")
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise GrammarError(
            f"grammar.json_schema: invalid at {error.json_path}: {one_line(error.message)}; fix it"
        ) from None


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, child) for child in children)
