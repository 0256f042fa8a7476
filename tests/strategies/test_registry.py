"""Strategies are found by name, or in a module of the user's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import strategies
from harness.errors import ConfigError
from strategies.vllm import Vllm


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Mine(", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("", "AttributeError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_the_way_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    module = f"broken_{reason[:3].lower()}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as told:
        strategies.find(f"{module}:Mine")
    assert reason in str(told.value)
    assert f"python -c 'import {module}'" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_copy_that_kept_its_name_takes_no_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from strategies.base import Strategy\nclass Copy(Strategy):\n    name = 'vllm'\n"
    (tmp_path / "a_copy.py").write_text(source)
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(tmp_path)])
    try:
        with pytest.raises(ConfigError) as told:
            strategies.registry()
    finally:
        sys.modules.pop("strategies.a_copy", None)
    assert "strategies.a_copy:Copy" in str(told.value)
    assert "both called 'vllm'; rename one" in str(told.value)


class Mine(Vllm):
    """A variant of the user's that has not been renamed."""


def test_two_strategies_of_one_name_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="both called 'vllm'; rename one"):
        strategies.by_name([Vllm, Mine])
    assert strategies.by_name([Vllm, Vllm]) == {"vllm": Vllm}
