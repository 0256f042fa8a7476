"""Drafts of a few tokens only, made from whole ones: of a table, and of a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.draft_vocabulary import DraftVocabulary
from harness.drafters.model import ModelDrafter

HEAD, BIAS = "lm_head.weight", "lm_head.bias"


def pruned(drafter: type[ModelDrafter], ids: SequenceOf[int]) -> type[ModelDrafter]:
    """A drafter whose table model has logits for the tokens ``ids`` only, in this order."""

    class Pruned(drafter):  # type: ignore[misc, valid-type]
        def __init__(self, model: Any, *args: Any) -> None:
            law = model.law
            model.law = lambda tokens: [law(tokens)[token] for token in ids]
            model.draft_vocabulary = DraftVocabulary(ids, model.vocab_size, model.device)
            super().__init__(model, *args)

    return Pruned


def offsets(ids: SequenceOf[int]) -> torch.Tensor:
    """``d2t``: target id - draft id."""
    return torch.tensor(ids, dtype=torch.int64) - torch.arange(len(ids))


def prune_folder(draft: Path, folder: Path, ids: SequenceOf[int], **tensors: torch.Tensor) -> Path:
    """Save a pruned copy of a draft, in EAGLE-3's format.

    Args:
        draft: the whole draft; one without a head gets none.
        folder: for the copy.
        ids: the target ids of its head.
        tensors: to save beside or instead of ``d2t`` and the head; an empty one is left out.
    """
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = len(ids)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights |= {name: weights[name][list(ids)] for name in (HEAD, BIAS) if name in weights}
    weights |= {"d2t": offsets(ids), **tensors}
    kept = {name: tensor.contiguous() for name, tensor in weights.items() if tensor.numel()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
