"""Items become requests: prompt tokens, bounds and seeds."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError

from harness.errors import RequestError
from harness.grammar.gate import Trigger
from harness.grammar.spec import GrammarSpec
from harness.workloads.item import Item, Thinking, derive_seed, prompt_ids, to_request


class ByteTokenizer:
    """One token a byte; the chat template writes ``<role>content``."""

    def __init__(self, chat_template: str | None = "toy", refuses: str = "", bos: int = 0) -> None:
        self.chat_template = chat_template
        self.refuses = refuses
        self.bos = bos

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert not return_dict
        if any(message["role"] == self.refuses for message in conversation):
            raise TemplateError(f"{self.refuses} role not supported")
        turns = [f"<{message['role']}>{message['content']}" for message in conversation]
        return self.encode("".join(turns) + "<assistant>")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([self.bos] if add_special_tokens and self.bos else []), *text.encode()]


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})


def test_prompt_is_the_chat_template_up_to_the_assistants_turn() -> None:
    ids = prompt_ids(Item("a", "text", CHAT), ByteTokenizer())
    assert bytes(ids) == b"<system>Be brief.<user>Hi<assistant>"


def test_base_model_without_a_template_gets_role_lines() -> None:
    ids = prompt_ids(Item("a", "text", CHAT), ByteTokenizer(chat_template=None))
    assert bytes(ids) == b"system: Be brief.\nuser: Hi\nassistant:"


def test_template_that_refuses_a_role_names_the_item() -> None:
    with pytest.raises(RequestError, match=r"item a: messages: .*system role not supported"):
        prompt_ids(Item("a", "text", CHAT), ByteTokenizer(refuses="system"))


def test_request_carries_what_the_item_asks_for() -> None:
    grammar = GrammarSpec.choice(["yes", "no"])
    item = Item("a", "choice", CHAT, grammar, max_new_tokens=7)
    request = to_request(item, ByteTokenizer(), max_new_tokens=96, seed=1)
    assert (request.id, request.grammar, request.max_new_tokens) == ("a", grammar, 7)
    assert request.prompt_ids == prompt_ids(item, ByteTokenizer())


def test_the_end_of_thinking_becomes_tokens_and_nothing_else() -> None:
    """S4: the grammar sleeps until these; a token that begins every text is none of them."""
    item = Item("a", "choice", CHAT, GrammarSpec.choice(["yes"]), thinking=Thinking("</t>", 8))
    request = to_request(item, ByteTokenizer(bos=1), max_new_tokens=96, seed=1)
    assert request.trigger == Trigger("reasoning", tuple(b"</t>"), budget=8)


def test_an_end_of_thinking_without_tokens_is_refused() -> None:
    item = Item("a", "choice", CHAT, GrammarSpec.choice(["yes"]), thinking=Thinking(""))
    with pytest.raises(RequestError, match=r"workload\.thinking_end: ''"):
        to_request(item, ByteTokenizer(), max_new_tokens=96, seed=1)


def test_item_without_a_bound_gets_the_one_of_the_run() -> None:
    request = to_request(Item("a", "text", CHAT), ByteTokenizer(), 96, seed=1)
    assert request.max_new_tokens == 96


def test_request_seed_depends_on_the_run_seed_and_the_item_alone() -> None:
    first, second = (
        to_request(Item(name, "text", CHAT), ByteTokenizer(), 96, seed=3).seed for name in "ab"
    )
    assert first == derive_seed(3, "a")
    assert len({first, second, derive_seed(4, "a")}) == 3


def test_derived_seed_is_the_same_in_every_process() -> None:
    assert derive_seed(0, "date") == 6675640308653304920
    assert derive_seed(0, "日付") == 1997117937921022416
