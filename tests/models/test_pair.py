"""Where weights come from, and which pairs are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from harness.errors import ConfigError
from harness.models.pair import PairConfig, choose_device, choose_dtype, load_pair

TOKENS = ("<eos>", "<end>", "{", "}", "a", "b")
CONFIGS = Path(__file__).parents[2] / "configs" / "pair"


def save_tokenizer(folder: Path, tokens: tuple[str, ...] = TOKENS, eos: str = "<eos>") -> None:
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos).save_pretrained(folder)


def save_model(folder: Path, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    settings: dict[str, object] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
    model.save_pretrained(folder)
    return model


def save_whole(folder: Path, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    save_tokenizer(folder)
    return save_model(folder, seed, **changes)


def drop_tensors(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name not in names}
    save_file(kept, file, metadata={"format": "pt"})


def save_shared_draft(folder: Path, **changes: object) -> LlamaForCausalLM:
    model = save_model(folder, seed=1, num_hidden_layers=1, **changes)
    drop_tensors(folder, "model.embed_tokens.weight", "lm_head.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "embeddings": "shared"}))
    return model


def pair_of(target: Path, draft: Path | None = None) -> PairConfig:
    return PairConfig(str(target), None if draft is None else str(draft), device="cpu")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save_whole(tmp_path / "big")
    return tmp_path / "big"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    save_whole(tmp_path / "small", seed=1, num_hidden_layers=1)
    return tmp_path / "small"


def test_both_models_come_ready_for_inference(target: Path, draft: Path) -> None:
    pair = load_pair(pair_of(target, draft))
    assert pair.draft is not None
    for model in (pair.target, pair.draft):
        assert not model.training
        assert not any(tensor.requires_grad for tensor in model.parameters())
        assert model.dtype == torch.float32
        assert model.config._attn_implementation == "sdpa"
    assert (pair.name, pair.vocab_size) == ("big+small", len(TOKENS))
    assert pair.tokenizer.convert_ids_to_tokens(2) == "{"


def test_a_pair_may_do_without_a_draft(target: Path) -> None:
    pair = load_pair(pair_of(target))
    assert pair.draft is None
    assert pair.name == "big"


def test_logits_wider_than_the_tokenizer_are_padding(tmp_path: Path, draft: Path) -> None:
    save_whole(tmp_path / "padded", vocab_size=len(TOKENS) + 10)
    assert load_pair(pair_of(tmp_path / "padded", draft)).vocab_size == len(TOKENS)


def test_logits_narrower_than_the_tokenizer_are_refused(tmp_path: Path, target: Path) -> None:
    save_whole(tmp_path / "narrow", vocab_size=len(TOKENS) - 1)
    with pytest.raises(ConfigError, match=r"pair\.target: 5 logits for the tokenizer's 6 tokens"):
        load_pair(pair_of(tmp_path / "narrow"))
    with pytest.raises(ConfigError, match=r"pair\.draft: 5 logits"):
        load_pair(pair_of(target, tmp_path / "narrow"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("<eos>", "<end>", "{", "]", "a", "b"), "token 3 is ']', the target's is '}'"),
        (("<eos>", "<end>", "{", "}", "a"), "token 5 is None, the target's is 'b'"),
        ((*TOKENS, "c"), "token 6 is 'c', the target's is None"),
    ],
)
def test_the_first_token_that_differs_is_named(
    target: Path, tmp_path: Path, tokens: tuple[str, ...], message: str
) -> None:
    save_model(tmp_path / "other", vocab_size=8)
    save_tokenizer(tmp_path / "other", tokens)
    with pytest.raises(ConfigError, match=message):
        load_pair(pair_of(target, tmp_path / "other"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_shared_draft_computes_with_the_targets_own_tensors(tmp_path: Path, tied: bool) -> None:
    whole_target = save_whole(tmp_path / "big", tie_word_embeddings=tied)
    whole_draft = save_shared_draft(tmp_path / "small", tie_word_embeddings=tied)
    pair = load_pair(pair_of(tmp_path / "big", tmp_path / "small"))
    assert pair.draft is not None
    assert pair.draft.get_input_embeddings().weight is pair.target.get_input_embeddings().weight
    assert pair.draft.get_output_embeddings().weight is pair.target.get_output_embeddings().weight

    whole_draft.set_input_embeddings(whole_target.get_input_embeddings())
    whole_draft.set_output_embeddings(whole_target.get_output_embeddings())
    ids = torch.tensor([[2, 4, 5]])
    torch.testing.assert_close(pair.draft(ids).logits, whole_draft(ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32 and the target's 16"),
        ({"vocab_size": 8}, "vocab_size is 8 and the target's 6"),
    ],
)
def test_a_shared_draft_must_fit_the_targets_embeddings(
    target: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    save_shared_draft(tmp_path / "small", **changes)
    with pytest.raises(ConfigError, match=message):
        load_pair(pair_of(target, tmp_path / "small"))


def test_a_shared_draft_is_no_target(tmp_path: Path) -> None:
    save_shared_draft(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"name it as pair\.draft"):
        load_pair(pair_of(tmp_path / "small"))


@pytest.mark.parametrize("shared", [True, False])
def test_a_missing_tensor_is_an_error_and_not_noise(
    target: Path, tmp_path: Path, shared: bool
) -> None:
    (save_shared_draft if shared else save_whole)(tmp_path / "small")
    drop_tensors(tmp_path / "small", "model.norm.weight")
    with pytest.raises(ConfigError, match=r"lack 1 tensors, model\.norm\.weight among"):
        load_pair(pair_of(target, tmp_path / "small"))


def test_an_ordinary_draft_needs_its_tokenizer(target: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"pair\.draft: .*has no tokenizer"):
        load_pair(pair_of(target, tmp_path / "small"))


@pytest.mark.parametrize(("generation", "expected"), [(1, {0, 1}), ([1, 4], {0, 1, 4}), (9, {0})])
def test_stop_ids_are_the_tokenizers_and_the_generation_configs(
    target: Path, generation: int | list[int], expected: set[int]
) -> None:
    """R19, V1.2h: one set for the stop check and for the grammar; 9 is in no mask."""
    settings = {"bos_token_id": 0, "eos_token_id": generation}
    (target / "generation_config.json").write_text(json.dumps(settings))
    assert load_pair(pair_of(target)).stop_ids == expected


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "has no weights"),
        ("config.json", r"has no config\.json"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_named(target: Path, file: str, message: str) -> None:
    (target / file).unlink()
    with pytest.raises(ConfigError, match=rf"pair\.target: .*{message}"):
        load_pair(pair_of(target))


def test_damaged_weights_are_one_line(target: Path) -> None:
    (target / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"pair\.target: .*safetensors file is damaged") as caught:
        load_pair(pair_of(target))
    assert "\n" not in str(caught.value)


def test_weights_of_other_shapes_than_the_config_says_are_one_line(target: Path) -> None:
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "intermediate_size": 8}))
    with pytest.raises(ConfigError, match=r"not of the shapes that config\.json says"):
        load_pair(pair_of(target))


def test_a_tokenizer_without_end_token_is_refused(target: Path) -> None:
    settings = json.loads((target / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has no end token; set eos_token"):
        load_pair(pair_of(target))


def test_token_ids_with_gaps_are_refused(target: Path) -> None:
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["b"] = 9
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="ids have gaps"):
        load_pair(pair_of(target))


def test_unknown_devices_and_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"pair\.device: cuda:1 asked for, 1 CUDA devices here"):
        choose_device("cuda:1")
    with pytest.raises(ConfigError, match=r"pair\.device: 'gpu' is none of"):
        choose_device("gpu")
    with pytest.raises(ConfigError, match=r"pair\.dtype: 'fp8' is none of auto, float32"):
        choose_dtype("fp8", torch.device("cpu"))


def test_auto_is_fp32_on_a_cpu_and_bf16_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for present, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        assert choose_device("auto").type == kind


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_pair_config_fits_the_dataclass(file: Path) -> None:
    values = OmegaConf.load(file)
    pair = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PairConfig), values))
    assert isinstance(pair, PairConfig)
    assert asdict(pair) == values
