"""A student: some layers of the target, and the target's own embeddings and head."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from harness.errors import ConfigError

Weights = dict[str, torch.Tensor]


def parse_layers(text: str, total: int) -> dict[str, tuple[int, ...]]:
    """The students that ``layers`` names.

    Args:
        text: depths and bracketed layers of the target, separated by commas.
        total: layers of the target.

    Returns:
        By name of the student, its layers.

    Raises:
        ConfigError: it is none of these, or the target has no such layer.
    """
    students: dict[str, tuple[int, ...]] = {}
    for word in re.split(r",(?![^\[]*\])", text):
        if re.fullmatch(r"\d+", word):
            name, chosen = f"{word}l", first_and_last(int(word), total)
        elif re.fullmatch(r"\[\d+(,\d+)*\]", word):
            chosen = tuple(map(int, word[1:-1].split(",")))
            name = "-".join(map(str, chosen))
        else:
            raise ConfigError(f"layers: {word!r}; give a depth like 3, or layers like [0,1,29]")
        if not chosen or max(chosen) >= total or len(chosen) > total:
            raise ConfigError(f"layers: {word}; the target has {total} layers, 0 to {total - 1}")
        students[name] = chosen
    return students


def first_and_last(depth: int, total: int) -> tuple[int, ...]:
    """The first layers and the last one; the first alone for a depth of 1."""
    return (*range(max(1, depth - 1)), total - 1)[: max(depth, 0)]


def student_config(target: PretrainedConfig, layers: tuple[int, ...]) -> PretrainedConfig:
    """The target's configuration for these layers; per-layer lists are cut to them too."""
    config = copy.deepcopy(target.get_text_config(decoder=True))
    total = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    config.embeddings = "shared"
    return config


def make_student(target: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """A copy of some layers and the final norm in fp32, with gradients; embeddings and head are
    the target's own modules."""
    config = student_config(target.config, layers)
    student = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    student.set_input_embeddings(target.get_input_embeddings())
    student.set_output_embeddings(target.get_output_embeddings())
    student.to(target.device)
    own = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in trainable(student).items():
            parameter.copy_(own[_in_target(name, layers)])
            parameter.requires_grad_(True)
    return student.eval()  # no dropout: its law is what the draft will propose


def trainable(student: PreTrainedModel) -> dict[str, nn.Parameter]:
    """By name, the parameters that are the student's own: all but embeddings and head."""
    shared = {id(each) for each in _shared(student)}
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        if id(parameter) not in shared
    }


def _shared(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    yield from model.get_input_embeddings().parameters()
    yield from model.get_output_embeddings().parameters()


def _in_target(name: str, layers: tuple[int, ...]) -> str:
    """The name that a student's parameter has in the target."""
    return re.sub(r"(?<=\.layers\.)\d+", lambda match: str(layers[int(match[0])]), name)


def hidden_states(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The states that the head reads, ``[rows, length, hidden]``. Padding stands on the right,
    where causal attention keeps it out of every other position."""
    states: torch.Tensor = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    return states


def head_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """The head's matrix, ``[vocab, hidden]``, without the rows of padding.

    Raises:
        ConfigError: the target does more to its logits than this product.
    """
    matrix: torch.Tensor = target.get_output_embeddings().weight
    probe = torch.arange(8, device=target.device)[None]
    with torch.no_grad():
        logits = target(input_ids=probe, use_cache=False).logits
        product = F.linear(hidden_states(target, probe), matrix)
    if not torch.allclose(logits.float(), product.float(), rtol=1e-2, atol=1e-2):
        raise ConfigError(
            "pair: the target scales, shifts or caps its logits; distil from one that does not"
        )
    return matrix[:vocab_size]


def save_student(
    folder: Path, config: PretrainedConfig, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write a draft's folder, as ``pair.draft`` reads it: configuration and bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tensors = {name: each.to("cpu", torch.bfloat16).contiguous() for name, each in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
