"""Schemas that engines have reason to dislike, made up from a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from experiments.faults import text
from experiments.faults.cases import ISOLATED, Case, Outcome, draw
from experiments.faults.scene import Scene, play
from harness.errors import GrammarError
from harness.grammar.spec import GrammarSpec

Schema = dict[str, Any]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SIZES = (1, 2, 3, 5, 8, 20, 60, 150, 400)
NAMES = (
    *("", " ", "a b", 'quote"', "back\\slash", "sla/sh", "til~de", "per%cent", "$ref", "#"),
    *(
        "tab\t",
        "line\n",
        "\x7f",
        "é",
        "é",
        "日本語",
        "🙂",
        "👩‍👩‍👧",
        "\u202eabc",
        "\ufeff",
        "\ud7ff",
    ),
    *("nul\x00", "\ud800", "x" * 3000),
)
PATTERNS = (
    *("^(a+)+$", "^(a|aa)+$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(.*)*x", "^(a?){40}a{40}$"),
    *("^.{0,2000}$", "^(a{0,100}){0,100}$", "^((a{1,30}){1,30}){1,30}$", "(x{0,9}){0,9}{0,9}"),
    *(
        r"^\p{Lu}+$",
        r"^[\w.+-]+@[\w-]+\.[\w.]+$",
        r"\bword\b",
        r"(?i)abc",
        r"\u00e9",
        r"[^\x00-\x7f]",
    ),
    *("(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1", "(?:", "[z-a]", "a{2,1}", "*", "(", ")", "[", "\\"),
    *("", "^$", "$^", "^", "a^b", "a$b", "|", "a||b", "()", "[]", "[^]", "🙂+", "[🙂-🙏]{2}"),
)
FORMATS = (
    "date",
    "date-time",
    "email",
    "ipv6",
    "uri",
    "uuid",
    "regex",
    "idn-email",
    "sprocket",
    "",
)
NUMBERS = (0, 1, -1, 7, 10**6, 2**31, 2**63, 10**30, -(10**30), 0.1, 1e-9, 1e308, -0.0, 1.5)


def nested(random: Random) -> Schema:
    """Deep nesting, by one keyword."""
    schema: Any = {"type": "integer"}
    wrap = random.choice(
        (
            lambda inner: {"type": "array", "items": inner},
            lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
            lambda inner: {"anyOf": [inner, {"type": "null"}]},
            lambda inner: {"allOf": [inner]},
            lambda inner: {"not": inner},
            lambda inner: {"type": "object", "additionalProperties": inner},
        )
    )
    for _ in range(random.choice((3, 10, 20, 31, 63, 100, 200))):
        schema = wrap(schema)
    return dict(schema)


def referring(random: Random) -> Schema:
    """Definitions that refer to each other: a chain, a ring, a fan or a net."""
    size = random.choice((1, 2, 3, 10, 40, 120, 300, 2000, 20_000))
    shape = random.choice(("chain", "ring", "fan", "net"))
    keyword = random.choice(("$ref", "items", "allOf", "anyOf", "oneOf", "properties", "not"))

    def next_ones(index: int) -> list[int]:
        match shape:
            case "chain":
                return [index + 1]
            case "ring":
                return [(index + 1) % size]
            case "fan":
                return [index + 1] * 2
        return [random.randrange(size) for _ in range(random.randint(1, 3))]

    links = {
        f"n{index}": _links(keyword, [f"#/$defs/n{to}" for to in next_ones(index)])
        for index in range(size)
    }
    end = {f"n{size}": {"type": random.choice(TYPES)}}
    definitions = links | end
    if random.random() < 0.5:
        definitions = dict(reversed(definitions.items()))
    return {"$defs": definitions, "$ref": "#/$defs/n0"}


def _links(keyword: str, to: list[str]) -> Schema:
    refs = [{"$ref": target} for target in to]
    match keyword:
        case "$ref":
            return refs[0]
        case "items":
            return {"type": "array", "items": refs[-1]}
        case "properties":
            names = {f"p{index}": ref for index, ref in enumerate(refs)}
            return {"type": "object", "properties": names, "required": list(names)}
        case "not":
            return {"not": refs[0]}
    return {keyword: refs}


def cyclic(random: Random) -> Schema:
    """A reference to what it is in."""
    ref = {"$ref": random.choice(("#", "#/$defs/a", "#/properties/a", "#/nowhere", "#a", "x.json"))}
    inner = random.choice(
        (
            ref,
            {"allOf": [ref]},
            {"allOf": [ref, {"type": "object"}]},
            {"anyOf": [ref, {"type": "null"}]},
            {"type": "array", "items": ref},
            {"type": "object", "properties": {"a": ref}, "required": ["a"]},
            {"not": ref},
            {"if": ref, "then": ref},
        )
    )
    return {"$defs": {"a": inner}, "properties": {"a": inner}, **inner}


def listing(random: Random) -> Schema:
    """A huge enumeration, or an empty one."""
    size = random.choice((0, 1, 2, 100, 1000, 5000))
    value: Callable[[int], Any] = random.choice(
        (
            lambda index: f"value {index}",
            lambda index: index,
            lambda index: [index, {"a": index}],
            lambda index: "x" * index,
            lambda index: NUMBERS[index % len(NUMBERS)],
            lambda index: NAMES[index % len(NAMES)].replace("\x00", "").replace("\ud800", ""),
        )
    )
    if random.random() < 0.1:
        return {"const": value(size)}
    return {"enum": [value(index) for index in range(size)]}


def patterned(random: Random) -> Schema:
    """Patterns that explode, or that are none."""
    pattern = random.choice((*PATTERNS, _deep_pattern(random)))
    schema = random.choice(
        (
            {"type": "string", "pattern": pattern},
            {"pattern": pattern},
            {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False},
            {"type": "object", "propertyNames": {"pattern": pattern}},
            {"type": "string", "pattern": pattern, "maxLength": 20},
        )
    )
    return dict(schema)


def _deep_pattern(random: Random) -> str:
    size = random.choice((10, 100, 250, 1000, 20_000))
    return random.choice(
        (
            "(" * size + "a" + ")" * size,
            "(" * size + "a" + ")*" * size,
            "a" + "{0,2}" * size,
            "|".join(f"a{index}" for index in range(size)),
            "[" + "a-z" * size + "]",
            "(a|b" * size + ")" * size,
        )
    )


def bounded(random: Random) -> Schema:
    """Bounds that contradict each other, or that nobody reaches."""
    keywords = {
        "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        "string": ("minLength", "maxLength"),
        "array": ("minItems", "maxItems", "minContains", "maxContains"),
        "object": ("minProperties", "maxProperties"),
    }
    kind = random.choice(list(keywords))
    values = NUMBERS if kind in ("integer", "number") else (0, 1, 2, 5, 1000, 10**5, 10**9, 2**64)
    chosen = random.sample(keywords[kind], random.randint(1, 2))
    return {"type": kind, **{keyword: random.choice(values) for keyword in chosen}}


def named(random: Random) -> Schema:
    """Names of all kinds."""
    names = random.sample(NAMES, random.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: {"type": random.choice(TYPES)} for name in names},
        "required": names if random.random() < 0.7 else [*names, "nobody"],
        "additionalProperties": random.random() < 0.5,
    }


def malformed(random: Random) -> Schema:
    """Keywords that nobody knows, and values of the wrong type."""
    keyword = random.choice(
        (
            *("type", "properties", "items", "required", "enum", "minimum", "pattern", "$ref"),
            *("allOf", "additionalProperties", "$defs", "$schema", "$id", "format", "const"),
            *("maxLength", "uniqueItems", "x-unknown", "$vocabulary", "$dynamicRef", "if"),
        )
    )
    value: Any = random.choice(
        (None, True, 3, -1, 1.5, "x", "", [], [[]], [3], {}, {"a": 3}, {"": []})
    )
    return {random.choice(("title", "type")): "object", keyword: value}


def broad(random: Random) -> Schema:
    """Many properties, some of them with schemas of other kinds."""
    size = random.choice(SIZES)
    makers = (bounded, listing, lambda _: {"type": random.choice(TYPES)}, mixed)
    return {
        "type": "object",
        "properties": {f"p{index}": random.choice(makers)(random) for index in range(size)},
        "required": [f"p{index}" for index in range(random.randint(0, size))],
        "additionalProperties": random.choice((True, False, {"type": "string"})),
    }


def mixed(random: Random, levels: int = 3) -> Schema:
    """Keywords at random."""

    def inner() -> Any:
        return mixed(random, levels - 1) if levels else random.choice((True, False, {}))

    keywords: dict[str, Callable[[], Any]] = {
        "type": lambda: random.choice((*TYPES, ["string", "null"], [])),
        "properties": lambda: {random.choice("abc"): inner() for _ in range(2)},
        "required": lambda: random.sample("abc", random.randint(0, 2)),
        "additionalProperties": inner,
        "patternProperties": lambda: {random.choice(("^a", "b$", "")): inner()},
        "propertyNames": inner,
        "items": inner,
        "prefixItems": lambda: [inner(), inner()],
        "contains": inner,
        "uniqueItems": lambda: random.random() < 0.5,
        "anyOf": lambda: [inner(), inner()],
        "oneOf": lambda: [inner(), inner()],
        "allOf": lambda: [inner()] * random.randint(1, 2),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": lambda: {"a": ["b"]},
        "dependentSchemas": lambda: {"a": inner()},
        "unevaluatedProperties": inner,
        "enum": lambda: [1, "a", None],
        "const": lambda: {"a": [1]},
        "format": lambda: random.choice(FORMATS),
        "minLength": lambda: 2,
        "maxItems": lambda: 3,
        "default": lambda: 3,
    }
    return {
        keyword: keywords[keyword]()
        for keyword in random.sample(list(keywords), random.randint(1, 5))
    }


MAKERS = (
    *(nested, referring, cyclic, listing, patterned),
    *(bounded, named, malformed, broad, mixed),
)


def run(case: Case) -> Outcome:
    """A schema of one kind, alone or inside an object."""
    random = case.random()
    settings = draw(random, constrained=True)
    maker = random.choice(MAKERS)
    schema = maker(random)
    if maker is not referring and maker is not cyclic and random.random() < 0.3:
        schema = {"type": "object", "properties": {"inner": schema}, "required": ["inner"]}
    fault = f"{maker.__name__} schema"
    try:
        grammar = GrammarSpec.json_schema(schema)
    except GrammarError as error:  # as where a workload is read
        return Outcome(str(case), f"{settings}; {fault}", ISOLATED, str(error))
    scene = Scene(settings, text.toy(settings, random), text.among(random, grammar), fault)
    return text.judge(*play(case, scene))
