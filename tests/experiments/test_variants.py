"""Variants of calls: other names and values, the same meaning."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from experiments.distill.variants import Variants, with_distractors, with_names, with_values


def record(number: int, question: str, name: str, **arguments: Any) -> dict[str, Any]:
    kinds = {str: "string", int: "integer", float: "number", list: "array"}
    properties = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
    described = {"type": "dict", "properties": properties, "required": list(arguments)}
    call = {"type": "object", "properties": properties, "required": list(arguments)}
    call["additionalProperties"] = False
    return {
        "id": f"own/{number}",
        "messages": [{"role": "user", "content": question}],
        "functions": [{"name": name, "description": "d", "parameters": described}],
        "schema": {
            "type": "object",
            "properties": {name: call},
            "required": [name],
            "additionalProperties": False,
        },
        "instance": {name: arguments},
    }


SONG = record(0, 'Play "Blue Train" by Coltrane 20 times.', "play", song="Blue Train", times=20)
TRIP = record(
    1, "From Bergen to Oslo by 9.5 o'clock.", "travel", start="Bergen", end="Oslo", by=9.5
)
LOAN = record(2, "Lend Miss Marple 300 pounds.", "bank.lend", to="Miss Marple", pounds=300)
RECORDS = [SONG, TRIP, LOAN]


def variants() -> list[dict[str, Any]]:
    """Thirty variants of each."""
    make = Variants(RECORDS, seed=0)
    return [dict(each) for variant in range(1, 31) for each in make(RECORDS, variant)]


def test_the_answer_of_a_variant_fits_its_grammar() -> None:
    for each in variants():
        jsonschema.validate(each["instance"], each["schema"])


def test_the_functions_of_a_variant_are_those_that_its_grammar_names() -> None:
    for each in variants():
        functions = {function["name"]: function for function in each["functions"]}
        for name, call in each["schema"]["properties"].items():
            assert call["properties"] == functions[name]["parameters"]["properties"]
            assert call["required"] == functions[name]["parameters"]["required"]


def test_a_value_that_the_question_mentions_is_swapped_in_both() -> None:
    pool = {(2, True, False): ["Miss Marple"], (1, True, False): ["Oslo"]}
    song = with_values(SONG, pool, Random(1))
    arguments = song["instance"]["play"]
    assert arguments["song"] == "Miss Marple"
    assert isinstance(arguments["times"], int)
    text = song["messages"][0]["content"]
    assert text == f'Play "Miss Marple" by Coltrane {arguments["times"]} times.'


def test_a_value_that_the_grammar_lists_stays() -> None:
    listed = json.loads(json.dumps(TRIP))
    listed["schema"]["properties"]["travel"]["properties"]["start"] = {"enum": ["Bergen", "Bodo"]}
    found = with_values(listed, {(1, True, False): ["Marple"]}, Random(0))
    assert found["instance"]["travel"]["start"] == "Bergen"
    assert found["instance"]["travel"]["end"] == "Marple"


def test_a_part_of_a_word_is_no_value() -> None:
    inside = record(3, "Aboard the Osloford.", "sail", to="Oslo")
    assert with_values(inside, {(1, True, False): ["Marple"]}, Random(0)) == inside


def test_names_change_everywhere_and_values_nowhere() -> None:
    renamed = [with_names(TRIP, ["new"], ["go"], Random(seed)) for seed in range(20)]
    assert len({json.dumps(each["instance"]) for each in renamed}) > 5
    for each in renamed:
        ((name, arguments),) = each["instance"].items()
        assert each["functions"][0]["name"] == name
        assert list(arguments) == list(each["schema"]["properties"][name]["properties"])
        assert list(arguments.values()) == ["Bergen", "Oslo", 9.5]
        assert each["messages"] == TRIP["messages"]


def test_no_two_parameters_get_one_name() -> None:
    for seed in range(50):
        (arguments,) = with_names(TRIP, ["a", "a_b"], ["go"], Random(seed))["instance"].values()
        assert len(arguments) == 3


def test_every_branch_of_several_calls_is_renamed() -> None:
    several = {
        **TRIP,
        "functions": TRIP["functions"] + LOAN["functions"],
        "schema": {"anyOf": [TRIP["schema"], LOAN["schema"]]},
    }
    for seed in range(10):
        found = with_names(several, ["new"], ["go", "come"], Random(seed))
        names = [function["name"] for function in found["functions"]]
        assert [next(iter(each["properties"])) for each in found["schema"]["anyOf"]] == names
        jsonschema.validate(found["instance"], found["schema"])


def test_distractors_stand_beside_the_own_functions() -> None:
    mixed = [with_distractors(SONG, RECORDS, Random(seed)) for seed in range(20)]
    assert {len(each["functions"]) for each in mixed} == {1, 2, 3}
    for each in mixed:
        assert SONG["functions"][0] in each["functions"]
        names = [function["name"] for function in each["functions"]]
        assert len(set(names)) == len(names)
        assert each["schema"] == SONG["schema"]


@pytest.mark.parametrize("variant", [0, 3])
def test_a_variant_is_a_function_of_its_number(variant: int) -> None:
    there, again = Variants(RECORDS, seed=0), Variants(RECORDS, seed=0)
    again(RECORDS, 1)
    assert there(RECORDS, variant) == again(RECORDS, variant)
    assert (there(RECORDS, variant) == RECORDS) == (variant == 0)


def test_what_is_no_call_stays_as_it_is() -> None:
    schema = {"id": "own/schema", "schema": {"type": "null"}, "valid": [None]}
    assert Variants(RECORDS, seed=0)([schema], 5) == [schema]
