"""A workload item: a prompt, a grammar, and a way to check the output without the grammar."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from harness.core import Request
from harness.errors import RequestError
from harness.grammar.gate import Trigger
from harness.grammar.spec import GrammarSpec

Message = Mapping[str, str]
"""One turn of a chat: its ``role`` and its ``content``."""

THINKING_END = "</think>"
"""What most models that think write at its end."""


class ChatTokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, return_dict: bool
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model thinks before it answers.

    Attributes:
        end: the text that ends it, as the model writes it.
        budget: tokens of thinking after which that text is forced; None = no bound of its own.
    """

    end: str = THINKING_END
    budget: int | None = None

    def trigger(self, tokenizer: ChatTokenizer) -> Trigger:
        """What ends the thinking, in tokens: real engines compare these, not text (V1.5d, S4).

        Raises:
            RequestError: the tokenizer makes no token of the text.
        """
        tokens = tuple(tokenizer.encode(self.end, add_special_tokens=False))
        if not tokens:
            raise RequestError(
                f"workload.thinking_end: {self.end!r} is no token of this model; "
                "give the text that ends its thinking"
            )
        return Trigger("reasoning", tokens, budget=self.budget)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to generate, and how to judge it.

    Attributes:
        id: unique in its workload.
        kind: category that results are grouped by.
        messages: the chat, oldest turn first.
        grammar: what the output must match; None = free text.
        max_new_tokens: the item's own bound; None = the bound of the run.
        trigger: what starts the grammar inside the output; None = it holds from the start.
        thinking: the model thinks first, and the grammar starts behind that; None = it does not.
        valid_regex: what the whole output must match, checked beside the grammar (by RE2);
            the only check of an ``ebnf`` item.
        smoke: one of the few items that a smoke test runs.
        error: why the item cannot be served; empty = it can. Such an item fails alone.
    """

    id: str
    kind: str
    messages: tuple[Message, ...]
    grammar: GrammarSpec | None = None
    max_new_tokens: int | None = None
    trigger: Trigger | None = None
    thinking: Thinking | None = None
    valid_regex: str | None = None
    smoke: bool = False
    error: str = ""


def prompt_ids(item: Item, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokens of the item's prompt, up to where the assistant's turn begins.

    A tokenizer without a chat template (a base model) gets one line ``role: content`` per
    message and a last ``assistant:``, encoded with its default special tokens.

    Raises:
        RequestError: the chat template refuses the messages (some know no ``system`` role).
    """
    if tokenizer.chat_template is None:
        lines = [f"{message['role']}: {message['content']}\n" for message in item.messages]
        return tuple(tokenizer.encode("".join(lines) + "assistant:"))
    try:
        ids: Sequence[int] = tokenizer.apply_chat_template(
            [dict(message) for message in item.messages],
            add_generation_prompt=True,
            return_dict=False,
        )
    except TemplateError as error:
        raise RequestError(
            f"item {item.id}: messages: the chat template refuses them ({error}); change the roles"
        ) from None
    return tuple(ids)


def derive_seed(seed: int, item_id: str) -> int:
    """A seed in ``[0, 2**63)`` for one item: the same on every machine, in every order."""
    digest = hashlib.sha256(f"{seed}/{item_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def to_request(item: Item, tokenizer: ChatTokenizer, max_new_tokens: int, seed: int) -> Request:
    """The request of an item without an ``error``.

    Args:
        item: what to generate.
        tokenizer: of the target model.
        max_new_tokens: bound of the output if the item names none.
        seed: of the run; the request gets its own ``derive_seed``.

    Raises:
        RequestError: see ``prompt_ids`` and ``Thinking.trigger``.
    """
    trigger = item.trigger if item.thinking is None else item.thinking.trigger(tokenizer)
    return Request(
        id=item.id,
        prompt_ids=prompt_ids(item, tokenizer),
        grammar=item.grammar,
        max_new_tokens=item.max_new_tokens or max_new_tokens,
        seed=derive_seed(seed, item.id),
        trigger=trigger,
    )
