"""torch.compile under the graphs: fewer and wider kernels for steps of few tokens.

A decode step of a small model is bound by the number of its kernels, not by what they do. So the
products over one input become one product, and a product with a single token becomes a reduction,
which the compiler fuses with the norm before it or the activation behind it.
"""

from __future__ import annotations

import os
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from harness.models.gguf import cache_root

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of the linear layers, in the order of their calls, that read one input."""
MOST_SHAPES = 256
"""Compilations of one layer's code, for all shapes of all models; more is an error."""


def compile_decoder(model: nn.Module) -> None:
    """Compile a causal LM's decoder in place, layer by layer: one compilation per shape of input
    serves all layers. The compiler's cache lies beside the converted models.

    Args:
        model: a causal LM of ``transformers``, in eval mode.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    decoder = model.get_decoder()  # type: ignore[operator]
    merge_linear_layers(decoder.layers)
    for module in [*decoder.layers, *_around_the_layers(decoder)]:
        module.compile(dynamic=False)


def _around_the_layers(decoder: nn.Module) -> list[nn.Module]:
    """The final norm, the position encoding and the like."""
    return [
        child for child in decoder.children() if not isinstance(child, nn.ModuleList | nn.Embedding)
    ]


def merge_linear_layers(layers: nn.Module) -> None:
    """Replace the linear layers of a decoder by ``MergedLinear``, those over one input by one."""
    for module in list(layers.modules()):
        plain = {name: child for name, child in module.named_children() if _is_plain(child)}
        for names in SHARED_INPUTS:
            parts = [plain[name] for name in names if name in plain]
            if len(parts) == len(names) and len({part.bias is None for part in parts}) == 1:
                merged = MergedLinear(parts)
                setattr(module, names[0], merged)
                for index, name in enumerate(names[1:]):
                    setattr(module, name, LaterPart(merged, index, last=name == names[-1]))
                plain = {name: child for name, child in plain.items() if name not in names}
        for name, child in plain.items():
            setattr(module, name, MergedLinear([child]))


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A linear layer and no subclass of it, nor one with weights of another kind (quantised)."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


class MergedLinear(nn.Module):
    """Linear layers over one input as one product; the call returns the first one's output.

    Args:
        parts: all with a bias or none.

    Attributes:
        later: outputs of the other parts, until ``LaterPart`` fetches them.
    """

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]), False)
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), False) if biases else None
        self._sizes = [part.out_features for part in parts]
        self.later: list[torch.Tensor] = []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to the first part's ``[..., out]``."""
        if states.numel() == states.shape[-1] and torch.compiler.is_compiling():
            out = (states.unsqueeze(-2) * self.weight).sum(-1)
            out = out if self.bias is None else out + self.bias
        else:
            out = F.linear(states, self.weight, self.bias)
        first: torch.Tensor
        first, *self.later = torch.split(out, self._sizes, dim=-1)
        return first


class LaterPart(nn.Module):
    """Stands where a part of a ``MergedLinear`` stood that is called after the first one."""

    def __init__(self, merged: MergedLinear, index: int, last: bool) -> None:
        super().__init__()
        self._merged = (merged,)  # in a tuple: its parameters are registered once
        self._index, self._last = index, last

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The output that the merged product has for this part."""
        (merged,) = self._merged
        out = merged.later[self._index]
        if self._last:
            merged.later = []
        return out
