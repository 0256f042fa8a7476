"""A draft and a target that can be decoded together, and the tokenizer of both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from harness.errors import ConfigError
from harness.models.checkpoint import (
    check_parallel,
    locate,
    logits_width,
    read_config,
    read_model,
    read_tokenizer,
    shares_embeddings,
)
from harness.models.pruned import is_pruned, read_target_ids
from harness.parallel.launch import rank_device
from harness.parallel.ranks import ALONE, Ranks

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class PairConfig:
    """Which models to load, and how.

    Attributes:
        target: ``smollm2`` (the packaged default), a folder, or a hub id.
        draft: the same, or a folder whose ``config.json`` says ``"embeddings": "shared"``: it
            lacks embeddings and head and takes the target's; ``smollm2-draft-3l`` is packaged.
            With ``"draft_vocab_size"`` it has a pruned head, see ``harness.models.pruned``.
            None = no draft model.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the first on a CPU, the
            second on CUDA.
        device: ``cpu``, ``cuda``, ``cuda:1``, …, or ``auto``: CUDA where there is one.
    """

    target: str
    draft: str | None = None
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """What ``load_pair`` returns. Both models are in eval mode, on the device, without gradients.

    Attributes:
        tokenizer: the target's; the draft's is the same.
        stop_ids: the ids that end an output: the tokenizer's end token and those of the target's
            generation config. The one set for the stop check and for every grammar (R19, V1.2h).
        vocab_size: tokens of the tokenizer. Logits may be wider; what is above is padding.
        name: for tables and folder names.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerFast
    stop_ids: frozenset[int]
    vocab_size: int
    name: str


def load_pair(config: PairConfig, ranks: Ranks = ALONE) -> Pair:
    """Load the target, the draft and their tokenizer. What needs no weights is checked first.

    Args:
        config: which ones.
        ranks: that share the target; each has the whole draft, but for borrowed embeddings.

    Raises:
        ConfigError: a model cannot be found or read, the engine cannot run it, the two do not
            fit together, or there is no such dtype or device.
    """
    device = choose_device(config.device) if ranks.size == 1 else rank_device(config.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # where Triton launches and graphs are captured
    dtype = choose_dtype(config.dtype, device)

    with ranks.leading():  # a GGUF is converted once
        source = locate(config.target, "pair.target")
    target_config = read_config(source, "pair.target")
    if shares_embeddings(target_config) or is_pruned(target_config):
        lack = "embeddings" if shares_embeddings(target_config) else "a whole head"
        raise ConfigError(
            f"pair.target: {config.target} is a draft without {lack}; name it as pair.draft"
        )
    tokenizer = read_tokenizer(source, "pair.target")
    if tokenizer is None:
        raise ConfigError(f"pair.target: {config.target} has no tokenizer; save it there")
    check_width(target_config, tokenizer, "pair.target")
    check_parallel(target_config, ranks.size, "pair.target")

    draft_source, shared, kept_ids = None, False, None
    if config.draft is not None:
        with ranks.leading():
            draft_source = locate(config.draft, "pair.draft")
        shared, kept_ids = _check_draft(draft_source, target_config, tokenizer)

    target = read_model(source, "pair.target", dtype, device, tp=ranks.size)
    draft = None
    if kept_ids is not None and shared:
        ranks.meet()  # each will send the others its part of the head
    if draft_source is not None:  # whole on every rank: it is small, and its forwards are many
        lender = target if shared else None
        draft = read_model(draft_source, "pair.draft", dtype, device, lender, kept_ids)
    return Pair(
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        stop_ids=stop_ids(tokenizer, target.generation_config.eos_token_id),
        vocab_size=len(tokenizer),
        name="+".join(Path(name).name for name in (config.target, config.draft) if name),
    )


def choose_device(name: str) -> torch.device:
    """The device that ``pair.device`` asks for.

    Raises:
        ConfigError: it is neither a CPU nor a CUDA device, or is not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"pair.device: {name!r} is none of auto, cpu, cuda, cuda:N; choose one")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"pair.device: {name} asked for, {count} CUDA devices here; set cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that ``pair.dtype`` asks for.

    Raises:
        ConfigError: there is no such dtype here.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"pair.dtype: {name!r} is none of auto, {', '.join(DTYPES)}; choose one")
    return DTYPES[name]


def stop_ids(
    tokenizer: PreTrainedTokenizerFast, generation: int | list[int] | None
) -> frozenset[int]:
    """The tokenizer's end token and those of the generation config (R19, V1.2h).

    An id that the tokenizer does not know is left out: no mask has a bit for it.
    """
    if generation is None:
        generation = []
    elif isinstance(generation, int):
        generation = [generation]
    known = (token_id for token_id in generation if 0 <= token_id < len(tokenizer))
    return frozenset((tokenizer.eos_token_id, *known))


def check_width(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, field: str) -> None:
    """Every token needs a logit; more logits than tokens are padding.

    Raises:
        ConfigError: the logits are narrower than the tokenizer.
    """
    if (width := logits_width(config)) < len(tokenizer):
        raise ConfigError(
            f"{field}: {width} logits for the tokenizer's {len(tokenizer)} tokens; "
            "resize the embeddings, or name the model's own tokenizer"
        )


def check_same_tokens(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> None:
    """A draft's token ids are put before the target as they are.

    Raises:
        ConfigError: an id stands for different tokens; the message names the first one.
    """
    theirs, ours = (
        {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        for tokenizer in (target, draft)
    )
    for token_id in range(max(len(theirs), len(ours))):
        if theirs.get(token_id) != ours.get(token_id):
            raise ConfigError(
                f"pair.draft: token {token_id} is {ours.get(token_id)!r}, the target's is "
                f"{theirs.get(token_id)!r}; name a draft with the target's tokenizer"
            )


def _check_draft(
    source: str, target_config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[bool, torch.Tensor | None]:
    """Check a draft against its target before any model is read.

    Returns:
        Whether the draft takes its embeddings and head from the target, and the target ids of the
        rows of a pruned head.
    """
    config = read_config(source, "pair.draft")
    shared = shares_embeddings(config)
    own_tokenizer = read_tokenizer(source, "pair.draft")
    if own_tokenizer is not None:
        check_same_tokens(tokenizer, own_tokenizer)
    elif not shared:
        raise ConfigError(f"pair.draft: {source} has no tokenizer; save it there")
    if shared:
        _check_embeddings_fit(config, target_config)
    check_width(config, tokenizer, "pair.draft")
    return shared, read_target_ids(source, config, len(tokenizer)) if is_pruned(config) else None


def _check_embeddings_fit(draft: PretrainedConfig, target: PretrainedConfig) -> None:
    target = target.get_text_config(decoder=True)
    for name in ("hidden_size", "vocab_size"):
        if (ours := getattr(draft, name)) != (theirs := getattr(target, name)):
            raise ConfigError(
                f"pair.draft: it shares the target's embeddings, but its {name} is {ours} and "
                f"the target's {theirs}; name the target that it was made for"
            )
