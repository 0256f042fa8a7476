"""The ragged cache gives the logits of a plain forward, whatever was cached and rolled back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LlamaForCausalLM

from harness.models import attention
from harness.models.causal_lm import CausalLM, lay_out
from harness.models.language_model import RowInput
from tests.tiny_pair import random_llama

VOCAB = 257
LENGTH = 48


@pytest.fixture(scope="module", params=[False, True], ids=["by_position", "by_head"], autouse=True)
def by_head(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to lay out the query heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attends_by_head", lambda *_: request.param)
        yield


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return random_llama(0)


UNTOUCHED = random_llama(0)
"""The same weights, with transformers' own attention and cache."""


def reference(tokens: list[int]) -> torch.Tensor:
    """Logits ``[len(tokens), vocab]`` without any cache."""
    with torch.inference_mode():
        logits: torch.Tensor = UNTOUCHED(torch.tensor([tokens])).logits[0, :, :VOCAB]
    return logits


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=2e-4, rtol=1e-4)


def test_prompts_of_mixed_lengths_are_as_if_alone(llama: LlamaForCausalLM) -> None:
    model = CausalLM(llama, VOCAB, slots=3, max_length=LENGTH)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    logits = model.forward([RowInput(slot, 0, p) for slot, p in enumerate(prompts)])
    assert logits.shape == (3, VOCAB)
    for row, prompt in zip(logits, prompts, strict=True):
        assert_close(row, reference(prompt)[-1])


def test_only_the_wanted_rows_come_back_in_order(llama: LlamaForCausalLM) -> None:
    model = CausalLM(llama, VOCAB, slots=2, max_length=LENGTH)
    logits = model.forward([RowInput(1, 0, [1, 2, 3, 4], logits=3), RowInput(0, 0, [5, 6])])
    expected = torch.cat([reference([1, 2, 3, 4])[1:], reference([5, 6])[1:]])
    assert_close(logits, expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_rollback_is_a_lower_start(data: st.DataObject, llama: LlamaForCausalLM) -> None:
    """Feed, cut back and refeed sequences of different lengths in changing company."""
    model = CausalLM(llama, VOCAB, slots=3, max_length=LENGTH)
    held: list[list[int]] = [[], [], []]
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
    for _ in range(data.draw(st.integers(1, 5))):
        inputs, expected = [], []
        for slot in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
            del held[slot][data.draw(st.integers(0, len(held[slot]))) :]
            fed = data.draw(tokens)
            wanted = data.draw(st.integers(1, len(fed)))
            inputs.append(RowInput(slot, len(held[slot]), fed, logits=wanted))
            held[slot] += fed
            expected.append(reference(held[slot])[-wanted:])
        assert_close(model.forward(inputs), torch.cat(expected))


TREE = [-1, -1, 0, 0, 2, 1]
"""Two children of the root; the first has two, one of which has one; the second has one."""
NODES = [11, 12, 13, 14, 15, 16]


def branch(node: int) -> list[int]:
    return [] if node < 0 else [*branch(TREE[node]), NODES[node]]


def test_a_tree_node_sees_its_ancestors_alone(llama: LlamaForCausalLM) -> None:
    model = CausalLM(llama, VOCAB, slots=2, max_length=LENGTH)
    model.forward([RowInput(0, 0, [1, 2, 3])])
    tree = RowInput(0, 3, [4, *NODES], logits=7, parents=TREE)
    logits = model.forward([tree, RowInput(1, 0, [5])])
    assert_close(logits[0], reference([1, 2, 3, 4])[-1])
    for node in range(len(TREE)):
        assert_close(logits[node + 1], reference([1, 2, 3, 4, *branch(node)])[-1])


@pytest.mark.parametrize("path", [[0, 2, 4], [1, 5], [0, 3], [0], []])
def test_an_accepted_path_is_moved_together(llama: LlamaForCausalLM, path: list[int]) -> None:
    model = CausalLM(llama, VOCAB, slots=1, max_length=LENGTH)
    model.forward([RowInput(0, 0, [1, 2, 3, *NODES], logits=7, parents=TREE)])
    model.keep_path(0, 3, path)
    kept = [1, 2, 3, *(NODES[node] for node in path)]
    logits = model.forward([RowInput(0, len(kept), [77])])
    assert_close(logits[0], reference([*kept, 77])[-1])


def test_logits_are_cut_to_the_tokenizer(llama: LlamaForCausalLM) -> None:
    assert llama.config.vocab_size > VOCAB
    model = CausalLM(llama, VOCAB, slots=1, max_length=LENGTH)
    assert model.forward([RowInput(0, 0, [1])]).shape == (1, VOCAB)


def test_the_cache_argument_is_the_one_the_model_has(llama: LlamaForCausalLM) -> None:
    model = CausalLM(llama, VOCAB, slots=1, max_length=LENGTH)
    assert model._cache_argument in inspect.signature(llama.forward).parameters


def test_padding_goes_to_the_scratch_cell_and_sees_something() -> None:
    layout = lay_out([RowInput(0, 5, [1, 2, 3], logits=2), RowInput(1, 0, [4])], max_length=9)
    assert layout.cells.tolist() == [[5, 6, 7], [9, 9, 0]]
    assert layout.visible.shape == (2, 3, 8)
    assert layout.visible.any(-1).all()
    assert layout.kept == 2
    assert layout.picked == [0, 1, 3]
