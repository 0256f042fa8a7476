"""New prompts from old ones: a few hundred records are too few to learn from.

A draft that sees the same 641 calls for thousands of steps knows them by heart. What it has to
learn is to copy names and values from the prompt, so a variant of a call has others: its parameters
and functions get new names, the values that its question mentions are swapped for those of other
records, and functions of other records stand beside its own. Its reference answer changes with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from experiments.distill.prompts import Record, is_call
from harness.workloads.item import derive_seed

MOST_DISTRACTORS = 2
RENAMED = 0.5
"""Chance of each name to be replaced."""
COMPOSED = 0.5
"""Chance that a new name is made of words instead of taken as a whole."""

Pool = Mapping[tuple[int, bool, bool], Sequence[str]]


class Variants:
    """Makes variants of records from what is in others.

    Args:
        records: whose functions, names and values are used: of the training, none other.
        seed: of the draws.
    """

    def __init__(self, records: Sequence[Record], seed: int) -> None:
        self._calls = [record for record in records if is_call(record)]
        self._seed = seed
        functions = [function for record in self._calls for function in record["functions"]]
        self._functions = sorted({function["name"] for function in functions})
        self._parameters = sorted({name for each in functions for name in _parameters(each)})
        self._values: dict[tuple[int, bool, bool], list[str]] = {}
        for value in sorted({value for record in self._calls for value in _texts(record)}):
            self._values.setdefault(_look(value), []).append(value)

    def __call__(self, records: Sequence[Record], variant: int) -> list[Record]:
        """A variant of each call among the records; other records stay. In variant 0 all do."""
        return [
            self._varied(record, Random(derive_seed(self._seed, f"{variant}/{record['id']}")))
            if variant and is_call(record)
            else record
            for record in records
        ]

    def _varied(self, record: Record, random: Random) -> Record:
        revalued = with_values(record, self._values, random)
        renamed = with_names(revalued, self._parameters, self._functions, random)
        return with_distractors(renamed, self._calls, random)


def with_values(record: Record, pool: Pool, random: Random) -> Record:
    """Other values where its question has those of its reference answer word for word."""
    if "instance" not in record:
        return record
    swaps = {
        written: _digits(written, random) if isinstance(value, int | float) else other
        for value in _mentioned(record)
        if (written := _written(value))
        and (other := random.choice(pool.get(_look(written), [written])))
    }
    if not swaps:
        return record
    longest_first = sorted(swaps, key=len, reverse=True)
    found = re.compile("|".join(map(_as_word, longest_first)))
    messages = [
        {**each, "content": found.sub(lambda match: swaps[match[0]], each["content"])}
        for each in record["messages"]
    ]

    def other(value: Any) -> Any:
        written = _written(value)
        return type(value)(swaps[written]) if written in swaps else value

    instance = _map_leaves(record["instance"], other)
    return {**record, "messages": messages, "instance": instance}


def with_names(
    record: Record, parameters: Sequence[str], functions: Sequence[str], random: Random
) -> Record:
    """Other names for some of its parameters and functions, in its answer and grammar too."""
    inside = {
        function["name"]: _renamed(_parameters(function), parameters, random)
        for function in record["functions"]
    }
    called = _renamed(inside, functions, random)
    own = [
        {
            **function,
            "name": called[function["name"]],
            "parameters": _properties(function["parameters"], inside[function["name"]]),
        }
        for function in record["functions"]
    ]
    schema = _each_branch(record["schema"], lambda calls: _calls(calls, called, inside))
    answer = {
        called[name]: {inside[name][key]: value for key, value in arguments.items()}
        for name, arguments in record.get("instance", {}).items()
    }
    made = {"functions": own, "schema": schema}
    return {**record, **made, **({"instance": answer} if "instance" in record else {})}


def with_distractors(record: Record, others: Sequence[Record], random: Random) -> Record:
    """Up to ``MOST_DISTRACTORS`` functions of other records beside its own, all in a new order."""
    own = list(record["functions"])
    names = {function["name"] for function in own}
    for other in random.sample(others, min(len(others), random.randint(0, MOST_DISTRACTORS))):
        function = random.choice(other["functions"])
        if function["name"] not in names:
            own.append(function)
            names.add(function["name"])
    random.shuffle(own)
    return {**record, "functions": own}


def _parameters(function: Mapping[str, Any]) -> list[str]:
    return list(function["parameters"].get("properties", {}))


def _renamed(names: Iterable[str], pool: Sequence[str], random: Random) -> dict[str, str]:
    """Old names to new ones, some of them the same; no two get one name."""
    names = list(names)
    renamed: dict[str, str] = {}
    for name in names:
        new = random.random() < RENAMED
        taken = {*names, *renamed.values()}
        renamed[name] = _new_name(pool, taken, random) if new else name
    return renamed


def _new_name(pool: Sequence[str], taken: Container[str], random: Random) -> str:
    """One of the pool, or words of two of them, that is not taken; more words where those are."""
    for words in count(2):
        name = random.choice(pool)
        if random.random() < COMPOSED:
            name = "_".join(random.choice(random.choice(pool).split("_")) for _ in range(words))
        if name not in taken:
            return name
    raise AssertionError("names never run out")


def _each_branch(
    schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The schema of one set of calls, or of any of several."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [change(branch) for branch in schema["anyOf"]]}
    return change(schema)


def _calls(
    schema: Mapping[str, Any], called: Mapping[str, str], inside: Mapping[str, Mapping[str, str]]
) -> Mapping[str, Any]:
    """The schema of an object of calls with other names of functions and of their parameters."""
    arguments = {
        name: _properties(each, inside[name]) for name, each in schema["properties"].items()
    }
    return _properties({**schema, "properties": arguments}, called)


def _properties(schema: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The schema of an object whose properties get other names."""
    changed = dict(schema)
    if "properties" in schema:
        changed["properties"] = {renamed[name]: each for name, each in schema["properties"].items()}
    if "required" in schema:
        changed["required"] = [renamed.get(name, name) for name in schema["required"]]
    return changed


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _map_leaves(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_map_leaves(each, change) for each in value]
    return change(value)


def _written(value: Any) -> str:
    """A text as it is, a number as JSON writes it; empty for what is neither."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _as_word(text: str) -> str:
    """A pattern that finds it, but in no longer word."""
    return rf"(?<!\w){re.escape(text)}(?!\w)"


def _mentioned(record: Record) -> list[Any]:
    """Values of its answer that its question has word for word, and its grammar does not."""
    question = "\n".join(message["content"] for message in record["messages"])
    grammar = json.dumps(record["schema"], ensure_ascii=False)
    return [
        value
        for value in _leaves(record.get("instance"))
        if (written := _written(value))
        and re.search(_as_word(written), question)
        and f'"{written}"' not in grammar
    ]


def _texts(record: Record) -> list[str]:
    """Those of them that are text."""
    return [_written(value) for value in _mentioned(record) if isinstance(value, str)]


def _look(text: str) -> tuple[int, bool, bool]:
    """What values have in common that may stand for each other: number of words, a capital in
    front, digits."""
    return len(text.split()), text[:1].isupper(), any(map(str.isdigit, text))


def _digits(number: str, random: Random) -> str:
    """Another number of the same form."""
    return re.sub("[1-9]", lambda match: str(random.randint(1, 9)), number)
