"""Late starts: the grammar sleeps until a trigger appears in the output.

Both gates are matchers, so that everything behind them is the same with and without a trigger.
"""

from __future__ import annotations

from harness.errors import GrammarError
from harness.grammar.lazy import LazyMatcher
from harness.grammar.matcher import Matcher, TokenTable
from harness.grammar.token_trigger import TokenTriggerMatcher
from harness.grammar.trigger import Trigger

__all__ = ["LazyMatcher", "TokenTriggerMatcher", "Trigger", "gate"]


def gate(matcher: Matcher, trigger: Trigger, table: TokenTable, drafts: int) -> Matcher:
    """Put a trigger in front of a grammar.

    Args:
        matcher: the grammar, at its start.
        trigger: what wakes it.
        table: bytes and stop tokens of the vocabulary.
        drafts: the most drafts per step.

    Raises:
        GrammarError: the trigger names a token that the vocabulary does not have.
    """
    named = (*trigger.tokens, trigger.bound or 0)
    if max(named) >= len(table):
        raise GrammarError(
            f"trigger.tokens, trigger.bound: {max(named)} is no token of this vocabulary; "
            f"name one below {len(table)}"
        )
    if trigger.kind == "tokens":
        return TokenTriggerMatcher(matcher, trigger, drafts)
    return LazyMatcher(matcher, trigger, table)
