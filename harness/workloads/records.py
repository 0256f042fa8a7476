"""Turns one record, a decoded line of JSON, into an item: our own format and two data sets'."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from harness.errors import RequestError
from harness.grammar.gate import Trigger
from harness.grammar.spec import KINDS, GrammarSpec
from harness.workloads.item import Item, Message, Thinking

Record = Mapping[str, Any]
T = TypeVar("T")

OPTIONAL = ("max_new_tokens", "trigger", "thinking", "valid_regex", "kind", "smoke")
FIELDS = ("id", "prompt", "messages", *KINDS, *OPTIONAL)
TRIGGER_FIELDS = ("kind", "tokens", "bound", "text", "implicit", "budget")


def own_item(record: Record) -> Item:
    """An item of the format that ``harness.workloads.loaders`` documents.

    Raises:
        RequestError, GrammarError: a field is missing, malformed or unknown.
    """
    _refuse_unknown(record, FIELDS, "")
    grammar = _grammar(record)
    trigger = _trigger(record["trigger"]) if "trigger" in record else None
    thinking = _flag(record, "thinking")
    if trigger and thinking:
        raise RequestError("trigger, thinking: give at most one of them")
    if (trigger or thinking) and not grammar:
        late = "trigger" if trigger else "thinking"
        raise RequestError(f"{late}: there is no grammar to start; add one")
    default_kind = grammar.kind if grammar else "text"
    return Item(
        id=_text(record, "id"),
        kind=_text(record, "kind") if "kind" in record else default_kind,
        messages=_messages(record),
        grammar=grammar,
        max_new_tokens=_bound(record["max_new_tokens"]) if "max_new_tokens" in record else None,
        trigger=trigger,
        thinking=Thinking() if thinking else None,
        valid_regex=_pattern(record) if "valid_regex" in record else None,
        smoke=_flag(record, "smoke"),
    )


def bfcl_item(record: Record) -> Item:
    """An item of the function-calling leaderboard: the functions go into a system message.

    Raises:
        RequestError, GrammarError: a field is missing or malformed.
    """
    functions = json.dumps(_checked(record.get("functions"), list, "functions", "a list"))
    system = (
        f"You call functions. Functions: {functions}\n"
        "Answer with one JSON object that maps each function name to its arguments."
    )
    return Item(
        id=_text(record, "id"),
        kind=_text(record, "kind"),
        messages=({"role": "system", "content": system}, *_messages(record)),
        grammar=GrammarSpec.json_schema(record.get("schema", "")),
    )


def jsonschemabench_item(record: Record) -> Item:
    """An item of JSONSchemaBench, which has no prompts: the schema itself is the prompt.

    Raises:
        RequestError, GrammarError: a field is missing or malformed.
    """
    grammar = GrammarSpec.json_schema(record.get("schema", ""))
    prompt = f"Write a JSON value, and nothing else, that fits this JSON Schema:\n{grammar.text}"
    return Item(
        id=_text(record, "id"),
        kind=_text(record, "kind"),
        messages=({"role": "user", "content": prompt},),
        grammar=grammar,
    )


def bad_item(record: Any, line: int, reason: str) -> Item:
    """What stands for a line that no item could be made of; named as far as it names itself."""
    named = record if isinstance(record, dict) else {}
    item_id, kind = named.get("id"), named.get("kind")
    return Item(
        id=item_id if isinstance(item_id, str) and item_id else f"line-{line}",
        kind=kind if isinstance(kind, str) and kind else "invalid",
        messages=(),
        error=f"line {line}: {reason}",
    )


def _checked(value: object, kind: type[T], field: str, wanted: str) -> T:
    if not isinstance(value, kind):
        raise RequestError(f"{field}: give {wanted}")
    return value


def _text(record: Record, field: str) -> str:
    text = _checked(record.get(field), str, field, "a string")
    if not text.strip():
        raise RequestError(f"{field}: blank; write something there")
    return text


def _flag(record: Record, field: str) -> bool:
    return _checked(record.get(field, False), bool, field, "true or false")


def _refuse_unknown(record: Record, known: tuple[str, ...], prefix: str) -> None:
    for field in record:
        if field not in known:
            raise RequestError(f"{prefix}{field}: unknown field; known are {', '.join(known)}")


def _messages(record: Record) -> tuple[Message, ...]:
    if ("prompt" in record) == ("messages" in record):
        raise RequestError("prompt, messages: give exactly one of them")
    if "prompt" in record:
        return ({"role": "user", "content": _text(record, "prompt")},)
    wanted = 'a list of {"role", "content"}, not empty, both of them strings'
    messages = _checked(record["messages"], list, "messages", wanted)
    if not messages or not all(map(_is_message, messages)):
        raise RequestError(f"messages: give {wanted}")
    return tuple(messages)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


def _grammar(record: Record) -> GrammarSpec | None:
    kinds = [kind for kind in KINDS if kind in record]
    match kinds:
        case []:
            return None
        case ["json_schema"]:
            return GrammarSpec.json_schema(record["json_schema"])
        case ["regex"]:
            return GrammarSpec.regex(_text(record, "regex"))
        case ["choice"]:
            return GrammarSpec.choice(_checked(record["choice"], list, "choice", "a list"))
        case ["ebnf"]:
            return GrammarSpec.ebnf(_text(record, "ebnf"))
        case _:
            raise RequestError(f"{', '.join(kinds)}: give at most one grammar")


def _trigger(value: object) -> Trigger:
    record = _checked(value, dict, "trigger", "an object")
    _refuse_unknown(record, TRIGGER_FIELDS, "trigger.")
    kind: Any = record.get("kind")
    return Trigger(
        kind=kind,
        tokens=tuple(_checked(record.get("tokens", []), list, "trigger.tokens", "a list")),
        bound=record.get("bound"),
        text=_checked(record.get("text", ""), str, "trigger.text", "a string"),
        implicit=tuple(_checked(record.get("implicit", []), list, "trigger.implicit", "a list")),
        budget=record.get("budget"),
    )


def _bound(value: object) -> int:
    bound = _checked(value, int, "max_new_tokens", "an integer")
    if isinstance(value, bool) or bound < 1:
        raise RequestError(f"max_new_tokens: {value!r}; give an integer of at least 1")
    return bound


def _pattern(record: Record) -> str:
    pattern = _text(record, "valid_regex")
    try:
        re.compile(pattern)
    except re.error as error:
        raise RequestError(f"valid_regex: not a regular expression ({error})") from None
    return pattern
