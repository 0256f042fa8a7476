"""Late starts: the grammar sleeps until something in the output wakes it.

Four engines start it in four ways. Each is a matcher, so every strategy takes every one of them,
and everything behind it is the same with and without: ``constrained`` says whether rows are
masked, ``started`` whether the grammar has begun.

| trigger | engine | the grammar's text begins | rules |
|---|---|---|---|
| `reasoning` | vLLM, SGLang | behind the end of thinking, or with an implicit end | V1.5, S4 |
| `word`, `pattern`, `pattern_full`, `token` | llama.cpp | with the trigger or inside it | L20-L24 |
| `tokens` | DeepInfer | behind the trigger | D6-D9 |
"""

from __future__ import annotations

from harness.errors import GrammarError
from harness.grammar.lazy import LazyMatcher
from harness.grammar.matcher import Matcher, TokenTable
from harness.grammar.reasoning import ReasoningMatcher
from harness.grammar.token_trigger import TokenTriggerMatcher
from harness.grammar.trigger import Trigger

__all__ = ["LazyMatcher", "ReasoningMatcher", "TokenTriggerMatcher", "Trigger", "gate"]


def gate(
    matcher: Matcher, trigger: Trigger, table: TokenTable, drafts: int | None = None
) -> Matcher:
    """Put a trigger in front of a grammar.

    Args:
        matcher: the grammar, at its start.
        trigger: what wakes it.
        table: bytes and stop tokens of the vocabulary.
        drafts: the most drafts per step, where the history of a ``tokens`` trigger is to be as
            short as DeepInfer's; None = all can be rolled back.

    Raises:
        GrammarError: the trigger names a token that the vocabulary does not have.
    """
    named = max((*trigger.tokens, *trigger.implicit, trigger.bound or 0))
    if named >= len(table):
        raise GrammarError(
            f"trigger.tokens, trigger.implicit, trigger.bound: {named} is no token of this "
            f"vocabulary; name one below {len(table)}"
        )
    match trigger.kind:
        case "reasoning":
            return ReasoningMatcher(matcher, trigger, table)
        case "tokens":
            return TokenTriggerMatcher(matcher, trigger, drafts)
        case _:
            return LazyMatcher(matcher, trigger, table)
