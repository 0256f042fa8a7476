"""One model: find its files, read them, and refuse what the engine cannot run.

Every function takes the ``field`` of the configuration that named the model, for its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from harness.errors import ConfigError
from harness.models.gguf import converted, packaged_gguf
from harness.models.pruned import prune_head, read_head

WEIGHTS = Path(__file__).parent / "weights"
"""The drafts that come with the project, one folder each."""

PRUNED_HEAD = {"ignore_mismatched_sizes": True, "tie_word_embeddings": False}
"""How transformers is asked to leave a head alone that has fewer rows than there are tokens."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def locate(name: str, field: str) -> str:
    """The folder of a model, or its id on the hub.

    Args:
        name: ``smollm2`` (the packaged GGUF), a folder of ``WEIGHTS``, any other folder, or a
            hub id; looked up in this order (write ``./smollm2`` for a folder of that name).

    Raises:
        ConfigError: the folder is missing or holds no model.
    """
    if name == "smollm2":
        return str(converted(packaged_gguf()))
    if name and name == Path(name).name and (WEIGHTS / name).is_dir():
        return str(WEIGHTS / name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        for kind, patterns in {
            "config.json": ["config.json"],
            "weights": ["*.safetensors", "pytorch_model*.bin"],
        }.items():
            if not any(any(folder.glob(pattern)) for pattern in patterns):
                raise ConfigError(
                    f"{field}: the folder {name} has no {kind}; save a whole model there"
                )
        return str(folder)
    if name.startswith(("/", ".", "~")):
        raise ConfigError(f"{field}: there is no folder {name}; correct the path")
    return name


def read_config(source: str, field: str) -> PretrainedConfig:
    """The configuration, checked by ``check_architecture``."""
    config = _fetch(AutoConfig.from_pretrained, source, field)
    check_architecture(config, field)
    return config


def read_tokenizer(source: str, field: str) -> PreTrainedTokenizerFast | None:
    """The tokenizer; None for a folder without one.

    Raises:
        ConfigError: the tokenizer is not a fast one, has no end token, or its ids have gaps.
    """
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    tokenizer = _fetch(AutoTokenizer.from_pretrained, source, field)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"{field}: {type(tokenizer).__name__} is not a fast tokenizer; add a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{field}: the tokenizer has no end token; set eos_token in tokenizer_config.json"
        )
    if max(tokenizer.get_vocab().values()) + 1 != len(tokenizer):
        raise ConfigError(f"{field}: the tokenizer's ids have gaps; fill them in tokenizer.json")
    return tokenizer


def read_model(
    source: str,
    field: str,
    dtype: torch.dtype,
    device: torch.device,
    embeddings_of: PreTrainedModel | None = None,
    kept_ids: torch.Tensor | None = None,
    tp: int = 1,
) -> PreTrainedModel:
    """The model, ready for inference.

    Args:
        embeddings_of: the model whose embeddings and head this one uses: the same modules, not
            copies. Its own files lack them.
        kept_ids: the target ids of the rows of a pruned head; see ``pruned``.
        tp: ranks that share the model, by transformers' own plan; this one reads its part.

    Raises:
        ConfigError: a tensor is missing, damaged, or of the wrong shape.
    """
    # The rows of a pruned head are not those that the configuration promises: read by themselves.
    own_head = {} if kept_ids is None else PRUNED_HEAD
    with _quiet():
        model, loading = _fetch(
            AutoModelForCausalLM.from_pretrained,
            source,
            field,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            **own_head,
            distributed_config=DistributedConfig(tp_size=tp) if tp > 1 else None,
        )
    missing = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    if embeddings_of is not None:
        model.set_input_embeddings(embeddings_of.get_input_embeddings())
        model.set_output_embeddings(embeddings_of.get_output_embeddings())
        missing -= _names_of_shared_tensors(model, embeddings_of)
    if kept_ids is not None:
        head = model.get_output_embeddings()
        missing -= _names_of_shared_tensors(model, head)
        model.set_output_embeddings(
            read_head(source, head, kept_ids)
            if embeddings_of is None
            else prune_head(head, kept_ids)
        )
    if missing:
        raise ConfigError(
            f"{field}: the weights of {source} lack {len(missing)} tensors, {min(missing)} among "
            "them; save the whole model"
        )
    return model.to(device).eval().requires_grad_(False)


def shares_embeddings(config: PretrainedConfig) -> bool:
    """True for a draft that takes its embeddings and head from the target."""
    return getattr(config, "embeddings", None) == "shared"


def logits_width(config: PretrainedConfig) -> int:
    """Number of logits that the model computes, padding of the embeddings included."""
    return int(config.get_text_config(decoder=True).vocab_size)


def check_architecture(config: PretrainedConfig, field: str) -> None:
    """Refuse every model that the ragged cache and its attention cannot serve.

    Raises:
        ConfigError: the model is no causal decoder, is recurrent somewhere, forgets, or attends
            in a way of its own.
    """
    text = config.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    window = getattr(text, "sliding_window", None)
    layers = set(getattr(text, "layer_types", None) or ())
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    short = window is not None and length is not None and window < length
    reason = None
    if config.is_encoder_decoder:
        reason = "is an encoder-decoder"
    elif model_class is None:
        reason = "is no causal language model"
    elif others := layers - {"full_attention", "sliding_attention"}:
        reason = f"has {', '.join(sorted(others))} layers, whose state cannot be rolled back"
    elif getattr(model_class, "_is_stateful", False):
        reason = "is recurrent: its state cannot be rolled back"
    elif short and (not layers or "sliding_attention" in layers):
        reason = f"attends to a sliding window of {window} tokens, less than its length {length}"
    elif not getattr(model_class, "_supports_attention_backend", False):
        reason = "does not call its attention through transformers' interface"
    elif getattr(text, "attn_logit_softcapping", None) or config.model_type == "gpt_oss":
        reason = "caps its attention scores or adds sinks to them"
    if reason is not None:
        raise ConfigError(
            f"{field}: {config.model_type} {reason}; name a decoder with full attention"
        )


def check_parallel(config: PretrainedConfig, tp: int, field: str) -> None:
    """Each rank of a tensor-parallel target computes whole heads.

    Raises:
        ConfigError: the heads cannot be shared out, or transformers has no plan for the model.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % tp or kv_heads % tp:
        fitting = [n for n in range(1, kv_heads + 1) if heads % n == kv_heads % n == 0]
        raise ConfigError(
            f"engine.tp: {tp} ranks cannot share the {heads} attention heads and {kv_heads} "
            f"key/value heads of {field} evenly; use one of {', '.join(map(str, fitting))}"
        )
    if tp > 1 and not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(
            f"engine.tp: transformers has no tensor-parallel plan for {config.model_type} "
            f"({field}); use 1, or name another model"
        )


def _names_of_shared_tensors(model: PreTrainedModel, other: nn.Module) -> set[str]:
    theirs = {id(tensor) for tensor in other.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, tensor in named if id(tensor) in theirs}


def _fetch(read: Callable[..., Any], source: str, field: str, **kwargs: Any) -> Any:
    """Call a ``from_pretrained`` and make one line of whatever goes wrong in it."""
    try:
        # Unless told not to, transformers asks at the terminal whether to run a model's own code.
        return read(source, trust_remote_code=False, **kwargs)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{field}: cannot load {source}: {_explain(error)}") from error


def _explain(error: BaseException) -> str:
    """What went wrong and what to do, from the innermost cause that we know."""
    for cause in _causes(error):
        match cause:
            case GatedRepoError():
                return "the hub asks for its licence; accept it there, then run `hf auth login`"
            case RepositoryNotFoundError() | HFValidationError():
                return "no such folder, and no such model on the hub; correct the name"
            case LocalEntryNotFoundError():
                offline = "HF_HUB_OFFLINE is set; unset it"
                unreached = "the hub cannot be reached; connect"
                why = offline if constants.HF_HUB_OFFLINE else unreached
                return f"no such folder, not in the hub's cache, and {why}, or name a folder"
            case SafetensorError():
                return f"a safetensors file is damaged ({cause}); fetch it again"
            case RuntimeError() if "mismatched" in str(cause):  # which ones, nobody is shown
                return "its tensors are not of the shapes that config.json says; save both together"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no loading report: what it would say, ``read_model`` checks."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
