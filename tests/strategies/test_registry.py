"""Strategies are found by name, or in a module of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

import strategies
from harness.errors import ConfigError


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
