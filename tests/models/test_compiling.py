"""Merged linear layers compute what the layers that they replace computed."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

from harness.captures import Captures
from harness.clock import Clock
from harness.models.causal_lm import CausalLM
from harness.models.compiling import LaterPart, MergedLinear, merge_linear_layers
from harness.models.graphs import StaticLM
from harness.models.language_model import RowInput
from harness.static_logits import Places
from tests.tiny_pair import random_llama


class Attention(nn.Module):
    """The linear layers of an attention block, biases as in Qwen2."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, out) for out in (8, 4, 4))
        self.o_proj = nn.Linear(8, 8, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        mixed: torch.Tensor = self.o_proj(query + torch.cat([key, value], dim=-1))
        return mixed


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 8), (3, 1, 8)])
def test_merged_layers_give_the_same_output(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Attention()
    merged = copy.deepcopy(plain)
    merge_linear_layers(merged)
    states = torch.randn(shape)
    torch.testing.assert_close(merged(states), plain(states))


def test_the_layers_over_one_input_are_one_product() -> None:
    model = random_llama(0)
    before = {name: value.numel() for name, value in model.named_parameters()}
    merge_linear_layers(model.get_decoder().layers)
    layer = model.get_decoder().layers[0]
    assert isinstance(layer.self_attn.q_proj, MergedLinear)
    assert isinstance(layer.self_attn.k_proj, LaterPart)
    assert isinstance(layer.mlp.up_proj, LaterPart)
    assert isinstance(layer.mlp.down_proj, MergedLinear)
    assert sum(value.numel() for value in model.parameters()) == sum(before.values())


def test_a_model_of_merged_layers_gives_the_same_logits() -> None:
    eager = CausalLM(random_llama(0), 257, 2, 40)
    model = random_llama(0)
    merge_linear_layers(model.get_decoder().layers)
    merged = CausalLM(model, 257, 2, 40)
    for inputs in ([RowInput(0, 0, [3, 1, 4])], [RowInput(0, 3, [1])], [RowInput(1, 0, [5, 9])]):
        torch.testing.assert_close(
            merged.forward(inputs), eager.forward(inputs), atol=2e-4, rtol=1e-4
        )


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_gives_the_same_logits() -> None:
    """On a CPU too: the compiler traces the cache, the merged layers and the rows of a batch."""
    eager = CausalLM(random_llama(0), 257, 2, 40)
    places = Places(Captures(Clock()))
    compiled = StaticLM(CausalLM(random_llama(0), 257, 2, 40), 3, places, compile=True)
    for inputs in (
        [RowInput(0, 0, [3, 1, 4])],
        [RowInput(0, 3, [1])],
        [RowInput(0, 4, [1, 5, 9], 3)],
        [RowInput(0, 5, [2])],
    ):
        torch.testing.assert_close(
            compiled.forward(inputs), eager.forward(inputs), atol=2e-4, rtol=1e-4
        )
