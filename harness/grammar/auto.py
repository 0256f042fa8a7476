"""The engine that the user leaves to the harness."""

from __future__ import annotations

from harness.errors import GrammarError
from harness.grammar.llguidance import LLGuidanceEngine
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, TokenTable, Whitespace
from harness.grammar.spec import GrammarSpec
from harness.grammar.xgrammar import XGrammarEngine


class AutoEngine(GrammarEngine):
    """xgrammar; what that refuses, llguidance (``auto`` of vLLM, V1.6e).

    vLLM has a step in between: schemas with ``patternProperties`` go to outlines. It is left out:
    outlines-core 0.2.14 drops that keyword without a word. A named engine never falls back.
    """

    name = "auto"

    def __init__(self, table: TokenTable, whitespace: Whitespace = "compact") -> None:
        super().__init__(table, whitespace)
        self._chain: tuple[GrammarEngine, ...] = (
            XGrammarEngine(table, whitespace),
            LLGuidanceEngine(table, whitespace),
        )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        refusals: list[str] = []
        for engine in self._chain:
            try:
                return engine.compile(spec)
            except GrammarError as error:
                refusals.append(str(error))
        raise GrammarError("; ".join(refusals))

    def token_bytes(self, token_id: int) -> bytes:
        """What the engines agree on; else the bytes of one that differs from the table."""
        expected = self.table.tokens[token_id]
        found = (engine.token_bytes(token_id) for engine in self._chain)
        return next((token for token in found if token != expected), expected)
