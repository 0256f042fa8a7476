"""The example of strategies/README.md is a strategy that works."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import strategies
from harness.grammar.spec import GrammarSpec
from tests.toys import ENGINES, Toy, random_law, request, toy_table

README = Path(strategies.__file__).with_name("README.md")
TABLE = toy_table(["a", "b", "c", "ab", "bc"])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that holds the example's code."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    module = ModuleType("my_module")
    monkeypatch.setitem(sys.modules, "my_module", module)
    exec(compile(code, str(README), "exec"), module.__dict__)
    return "my_module"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_is_lossless_and_drafts(example: str, engine: str) -> None:
    toy = Toy(TABLE, random_law(TABLE, 5), random_law(TABLE, 5), engine=engine)
    patterns = ["(a|bc)*c", "ab{1,3}", "[abc]{4,9}"]
    requests = [request(TABLE, GrammarSpec.regex(p), p) for p in patterns]
    watch = toy.run(toy.strategy(f"{example}:Cautious", drafts=2), requests)
    assert not watch.errors
    assert watch.outputs == toy.run("plain", requests).outputs
    assert sum(trace.accepted for trace in watch.steps) > 0
    assert max(trace.drafted_raw for trace in watch.steps) == 2
