"""Draft models whose head has fewer rows than there are tokens, in EAGLE-3's format on disk.

``config.json`` says ``draft_vocab_size``; ``model.safetensors`` holds ``d2t``, int64
``[draft_vocab_size]`` offsets (target id = draft id + d2t[draft id]), and ``lm_head.weight``,
``[draft_vocab_size, hidden_size]``. A draft that shares the target's embeddings takes the rows of
its head from the target's. EAGLE-3's ``t2d`` says the same as ``d2t`` and is not read. Embeddings
have all tokens: what the model reads are target ids.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from harness.draft_vocabulary import DraftVocabulary
from harness.errors import ConfigError

HEAD, BIAS = "lm_head.weight", "lm_head.bias"


class PrunedHead(nn.Module):
    """Some rows of a language model's head.

    Args:
        weight: ``[draft_vocab, hidden]``.
        ids: int64 ``[draft_vocab]``, the target id of each row.
        bias: ``[draft_vocab]``, or None.
    """

    ids: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to ``[..., draft_vocab]``."""
        return F.linear(states, self.weight, self.bias)


def draft_vocabulary(model: PreTrainedModel, vocab_size: int) -> DraftVocabulary | None:
    """What the logits of a model stand for; None = all ``vocab_size`` tokens."""
    head = model.get_output_embeddings()
    if not isinstance(head, PrunedHead):
        return None
    return DraftVocabulary(head.ids.tolist(), vocab_size, model.device)


def is_pruned(config: PretrainedConfig) -> bool:
    """True for a draft whose head has a row for some tokens only."""
    return getattr(config, "draft_vocab_size", None) is not None


def read_target_ids(source: str, config: PretrainedConfig, vocab_size: int) -> torch.Tensor:
    """The target id of each row of a pruned draft's head, int64 ``[draft_vocab_size]``.

    Args:
        source: a folder, or an id on the hub.
        config: of the draft.
        vocab_size: tokens of the tokenizer.

    Raises:
        ConfigError: there is no ``d2t``, or it is no map into the vocabulary.
    """
    d2t = _read_tensor(source, "d2t")
    size = config.draft_vocab_size
    if d2t.shape != (size,) or d2t.dtype != torch.int64:
        raise ConfigError(
            f"pair.draft: d2t of {source} is {d2t.dtype} {list(d2t.shape)}, its draft_vocab_size "
            f"is {size}; save one int64 offset per row of the head"
        )
    ids = torch.arange(size) + d2t
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise ConfigError(
            f"pair.draft: d2t of {source} maps draft id {first} to {int(ids[first])}, the "
            f"tokenizer has {vocab_size} tokens; d2t holds offsets: target id - draft id"
        )
    repeated = [target_id for target_id, count in Counter(ids.tolist()).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"pair.draft: d2t of {source} maps two draft ids to target id {repeated[0]}; keep one"
        )
    return ids


def prune_head(head: nn.Linear, ids: torch.Tensor) -> PrunedHead:
    """The rows ``ids`` of a whole head. Of one that ranks share, on each rank: all must ask."""
    weight, bias = _whole(head.weight), None if head.bias is None else _whole(head.bias)
    rows = ids.to(weight.device)
    return PrunedHead(weight[rows], ids, None if bias is None else bias[rows])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def read_head(source: str, whole: nn.Linear, ids: torch.Tensor) -> PrunedHead:
    """The head that a pruned draft has of its own, in the place of a whole one.

    Raises:
        ConfigError: it is missing, or of another shape.
    """
    weight = _read_tensor(source, HEAD).to(whole.weight.dtype)
    if weight.shape != (len(ids), whole.in_features):
        raise ConfigError(
            f"pair.draft: {HEAD} of {source} is {list(weight.shape)}, its draft_vocab_size and "
            f"hidden_size are {[len(ids), whole.in_features]}; save one row per draft id"
        )
    bias = None if whole.bias is None else _read_tensor(source, BIAS).to(weight.dtype)
    return PrunedHead(weight, ids, bias)


def _read_tensor(source: str, name: str) -> torch.Tensor:
    try:
        with safe_open(cached_file(source, "model.safetensors"), "pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(name)
            return found
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"pair.draft: config.json of {source} has a draft_vocab_size, but there is no {name} "
            f"in its model.safetensors ({str(error).splitlines()[0]}); save it there, or remove "
            "draft_vocab_size"
        ) from error
