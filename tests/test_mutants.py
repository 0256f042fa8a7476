"""The mutants of ``tests/mutants.py`` still fit the code; ``make mutants`` runs them."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, killed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_mutant_changes_one_place_and_remains_python(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    ast.parse(mutant.applied(text))
    assert mutant.applied(text) != text
    assert (ROOT / mutant.tests).is_file()


@pytest.mark.parametrize(("expected", "status"), [("2", True), ("1", False)])
def test_a_mutant_is_killed_by_a_red_test_alone(tmp_path, expected: str, status: bool) -> None:
    (tmp_path / "test_code.py").write_text(
        f"from code_ import VALUE\n\ndef test_value():\n    assert VALUE == {expected}\n"
    )
    (tmp_path / "code_.py").write_text("VALUE = 2\n")
    mutant = Mutant("a value", "code_.py", "VALUE = 2", "VALUE = 1", "test_code.py")
    assert killed(mutant, tmp_path) is status
    assert (tmp_path / "code_.py").read_text() == "VALUE = 2\n"
