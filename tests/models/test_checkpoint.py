"""Finding one model, and refusing what the engine cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file
from transformers import (
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from harness.errors import ConfigError
from harness.models.checkpoint import WEIGHTS, check_architecture, locate, read_config


def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pair\.target: there is no folder"):
        locate(str(tmp_path / "nowhere"), "pair.target")


def test_offline_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it") as caught:
        read_config("nobody/no-such-model-here", "pair.target")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (LocalEntryNotFoundError, "the hub cannot be reached; connect, or name a folder"),
        (HFValidationError, "no such model on the hub; correct the name"),
        (RepositoryNotFoundError, "no such model on the hub; correct the name"),
        (GatedRepoError, "accept it there, then run `hf auth login`"),
    ],
)
def test_what_the_hub_answers_becomes_a_remedy(
    monkeypatch: pytest.MonkeyPatch, cause: type[Exception], message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("many\nlines") from cause.__new__(cause)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("harness.models.checkpoint.AutoConfig.from_pretrained", refuse)
    with pytest.raises(ConfigError, match=rf"pair\.target: cannot load a/b: .*{message}"):
        read_config("a/b", "pair.target")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "t5 is an encoder-decoder"),
        (ViTConfig(), "vit is no causal language model"),
        (MambaConfig(), "mamba has linear_attention layers"),
        (RwkvConfig(), "rwkv is recurrent"),
        (Qwen3NextConfig(num_hidden_layers=4), "has linear_attention layers"),
        (
            MistralConfig(sliding_window=32, max_position_embeddings=64),
            "sliding window of 32 tokens, less than its length 64",
        ),
        (
            Qwen2Config(
                use_sliding_window=True,
                sliding_window=32,
                max_window_layers=0,
                max_position_embeddings=64,
            ),
            "sliding window of 32 tokens",
        ),
        (GPTNeoConfig(), "does not call its attention through transformers' interface"),
        (Gemma2Config(sliding_window=8192), "caps its attention scores"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_the_ragged_cache_cannot_serve_is_refused(
    config: PretrainedConfig, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"pair\.draft: .*{reason}.*; name a decoder"):
        check_architecture(config, "pair.draft")


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(),
        Qwen2Config(use_sliding_window=False, sliding_window=32),
        MistralConfig(sliding_window=64, max_position_embeddings=64),
        MistralConfig(sliding_window=None),
    ],
    ids=lambda config: config.model_type,
)
def test_full_attention_is_welcome(config: PretrainedConfig) -> None:
    check_architecture(config, "pair.target")


def test_the_packaged_draft_lacks_only_what_it_shares() -> None:
    folder = Path(locate("smollm2-draft-3l", "pair.draft"))
    assert folder == WEIGHTS / "smollm2-draft-3l"
    config = LlamaConfig.from_pretrained(folder)
    assert config.embeddings == "shared"
    with torch.device("meta"):
        names = dict(LlamaForCausalLM(config).named_parameters())
    held = load_file(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in held.items()} == {
        name: tensor.shape for name, tensor in names.items() if "embed_tokens" not in name
    }
