"""One engine of each kind over the toy vocabulary of ``languages``."""

from __future__ import annotations

import pytest

from harness.grammar.matcher import GrammarEngine
from harness.grammar.service import grammar_engine
from tests.grammar.languages import TABLE
from tests.toys import ENGINES

ENGINE_OF = {name: grammar_engine(name, TABLE) for name in ENGINES}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> GrammarEngine:
    return ENGINE_OF[request.param]
