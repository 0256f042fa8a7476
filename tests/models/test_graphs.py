"""Static shapes: the right bucket, the same logits, the same drafts. Captures need a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LlamaForCausalLM

from harness.captures import Captures
from harness.clock import Clock
from harness.core import Sequence
from harness.drafters.model import ModelDrafter, keep_confirmed
from harness.models.buckets import Bucket, Buckets
from harness.models.causal_lm import CausalLM
from harness.models.graphs import StaticLM, Station
from harness.models.language_model import RowInput
from harness.static_logits import Places
from tests.tiny_pair import random_llama
from tests.toys import request, toy_table

VOCAB, LENGTH, SLOTS, WIDTH = 257, 300, 3, 5


@pytest.fixture(scope="module")
def llamas() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    return random_llama(0), random_llama(0)


def pair_of_engines(
    llamas: tuple[LlamaForCausalLM, LlamaForCausalLM],
) -> tuple[CausalLM, StaticLM]:
    """The same weights, eager and static."""
    eager, static = (CausalLM(each, VOCAB, SLOTS, LENGTH) for each in llamas)
    return eager, StaticLM(static, WIDTH, Places(Captures(Clock())))


def row(slot: int, start: int, count: int, logits: int = 1) -> RowInput:
    return RowInput(slot, start, [1] * count, logits)


@pytest.mark.parametrize(
    ("inputs", "bucket"),
    [
        ([row(0, 9, 1)], Bucket(1, 1, 512, 1, gathered=False)),
        ([row(2, 9, 1)], Bucket(7, 1, 512, 1, gathered=False)),
        ([row(6, 9, 1)], Bucket(7, 1, 512, 1, gathered=False)),
        ([row(0, 9, 2)], Bucket(1, 2, 512, 2, gathered=False)),
        ([row(0, 9, 3, 2)], Bucket(1, 5, 512, 5, gathered=False)),
        ([row(1, 510, 1), row(0, 516, 5, 5)], Bucket(7, 5, 1024, 5, gathered=False)),
        ([row(5, 0, 100), row(2, 0, 7)], Bucket(2, 128, 512, 1, gathered=True)),
        ([row(5, 0, 300)], Bucket(1, 512, 512, 1, gathered=True)),
        ([row(5, 20, 9, 3)], Bucket(7, 16, 512, 5, gathered=False)),
        ([row(0, 20, 17, 3)], Bucket(1, 128, 512, 5, gathered=True)),
        ([row(0, 900, 1)], Bucket(1, 1, 1024, 1, gathered=False)),
    ],
)
def test_a_forward_is_rounded_up_to_a_bucket(inputs: list[RowInput], bucket: Bucket) -> None:
    assert Buckets(slots=7, max_length=1000, decode_width=5).choose(inputs) == bucket


def test_a_tree_has_no_bucket() -> None:
    tree = RowInput(0, 4, [1, 2, 3], 3, parents=[-1, -1])
    assert Buckets(4, 1000, 5).choose([tree]) is None


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_static_logits_are_the_eager_ones(
    data: st.DataObject, llamas: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    """Prefills, decode steps and rollbacks, in changing company."""
    eager, static = pair_of_engines(llamas)
    held = [0] * SLOTS
    for _ in range(data.draw(st.integers(1, 5))):
        inputs = []
        for slot in data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]:
            start = data.draw(st.integers(0, held[slot]))
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
            logits = data.draw(st.integers(1, min(len(tokens), WIDTH)))
            inputs.append(RowInput(slot, start, tokens, logits))
            held[slot] = start + len(tokens)
        torch.testing.assert_close(
            static.forward(inputs), eager.forward(inputs), atol=2e-4, rtol=1e-4
        )


@settings(max_examples=15, deadline=None)
@given(prompts=st.lists(st.integers(1, 9), min_size=1, max_size=SLOTS), limit=st.integers(2, 7))
def test_a_replayed_chain_drafts_what_the_loop_drafts(
    prompts: list[int], limit: int, llamas: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    def drafted(model: CausalLM | StaticLM) -> list[list[int]]:
        drafter = ModelDrafter(model, draft_tokens=4)
        sequences = [
            Sequence(
                request(toy_table("ab"), None, prompt_ids=tuple(range(n)), max_new_tokens=limit),
                slot,
            )
            for slot, n in enumerate(prompts)
        ]
        drafter.prefill(sequences)
        chains = []
        for _ in range(2):
            for sequence in sequences:
                keep_confirmed(sequence, [7])
                sequence.output_ids.append(7)
            chains += [proposal.tokens for proposal in drafter.free(sequences)]
        return chains

    eager, static = pair_of_engines(llamas)
    assert drafted(static) == drafted(eager)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[RowInput]]:
    """What is loaded into stations from now on."""
    loaded: list[list[RowInput]] = []
    load = Station.load

    def spy(station: Station, inputs: list[RowInput]) -> None:
        loaded.append(inputs)
        load(station, inputs)

    monkeypatch.setattr(Station, "load", spy)
    return loaded


def test_what_was_run_ahead_is_not_run_again(
    llamas: tuple[LlamaForCausalLM, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, static = pair_of_engines(llamas)
    loaded = launches(monkeypatch)
    inputs = [row(0, 0, 3), row(2, 0, 4)]
    static.run_ahead(inputs)
    torch.testing.assert_close(
        static.forward(list(inputs)), eager.forward(inputs), atol=2e-4, rtol=1e-4
    )
    assert len(loaded) == 1
    static.run_ahead(inputs, k=2)
    drafts = static.greedy_chain(inputs, 2)
    assert len(loaded) == 2
    assert drafts == static.greedy_chain(inputs, 2)
    assert len(loaded) == 3  # the same again is work again


def test_what_was_run_ahead_in_vain_does_no_harm(
    llamas: tuple[LlamaForCausalLM, LlamaForCausalLM],
) -> None:
    eager, static = pair_of_engines(llamas)
    static.run_ahead([RowInput(0, 0, [9, 9]), RowInput(1, 0, [8, 8])])
    inputs = [RowInput(0, 0, [3, 1]), RowInput(1, 0, [8, 8])]
    torch.testing.assert_close(static.forward(inputs), eager.forward(inputs), atol=2e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_graph_gives_the_eager_logits(compiled: bool) -> None:
    eager = CausalLM(random_llama(0).cuda(), VOCAB, SLOTS, LENGTH)
    clock = Clock()
    places = Places(Captures(clock))
    model = CausalLM(random_llama(0).cuda(), VOCAB, SLOTS, LENGTH)
    static = StaticLM(model, WIDTH, places, compiled)
    for inputs in (
        [row(0, 0, 9), row(1, 0, 20)],
        [row(0, 9, 1), row(1, 20, 1)],
        [row(0, 10, 5, 5), row(1, 21, 3, 3)],
        [row(1, 22, 1)],
    ):
        torch.testing.assert_close(
            static.forward(inputs), eager.forward(inputs), atol=1e-3, rtol=1e-3
        )
    assert places.captures.graphs == 3  # the last forward is of the second one's shape
    assert clock.us["capture"] > 0
