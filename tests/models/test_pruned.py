"""A draft with a pruned head: how it is read, what is refused, and what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PhiConfig, PhiForCausalLM, PreTrainedModel

from harness.captures import Captures
from harness.clock import Clock
from harness.core import Sequence
from harness.drafters.model import ModelDrafter
from harness.errors import ConfigError
from harness.models.causal_lm import CausalLM
from harness.models.graphs import StaticLM
from harness.models.language_model import RowInput
from harness.models.pair import Pair, PairConfig, load_pair
from harness.static_logits import Places
from tests.pruned import HEAD, offsets, prune_folder
from tests.tiny_pair import byte_tokenizer, save_pair
from tests.toys import request, toy_table

IDS = (250, 3, 31, 32, 64, 17, 256, 100)
"""Not sorted, which no rule asks for; 256 is the end token."""
VOCAB = 257
K, SLOTS, LENGTH = 3, 2, 64
INPUTS = [RowInput(0, 0, [5, 9, 200], 2), RowInput(1, 0, [7], 1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a whole draft."""
    return save_pair(tmp_path_factory.mktemp("pair"))


def load(target: Path, draft: Path) -> Pair:
    return load_pair(PairConfig(str(target), str(draft), device="cpu"))


def engine(model: PreTrainedModel | None, static: bool = False) -> CausalLM | StaticLM:
    assert model is not None
    eager = CausalLM(model, VOCAB, SLOTS, LENGTH)
    return StaticLM(eager, 1 + K, Places(Captures(Clock()))) if static else eager


def share_embeddings(draft: Path) -> Path:
    """Take embeddings and head from a draft's folder: they are the target's from now on."""
    weights = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", HEAD):
        del weights[name]
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    config = (draft / "config.json").read_text()
    (draft / "config.json").write_text(config.replace("{", '{"embeddings": "shared",', 1))
    return draft


@pytest.mark.parametrize("static", [False, True])
def test_a_pruned_head_gives_the_logits_of_its_tokens(
    folders: tuple[Path, Path], tmp_path: Path, static: bool
) -> None:
    target, draft = folders
    small = prune_folder(draft, tmp_path / "pruned", IDS, t2d=torch.zeros(260).bool())
    whole, pruned = (engine(load(target, each).draft, static) for each in (draft, small))
    logits = pruned.forward(INPUTS)
    assert logits.shape == (3, len(IDS))
    torch.testing.assert_close(logits, whole.forward(INPUTS)[:, IDS], atol=2e-5, rtol=1e-5)
    assert pruned.draft_vocabulary is not None
    assert pruned.draft_vocabulary.ids == IDS
    assert (pruned.vocab_size, pruned.draft_vocabulary.vocab_size) == (VOCAB, VOCAB)
    assert whole.draft_vocabulary is None


def test_a_pruned_head_may_have_a_bias(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = folders
    torch.manual_seed(2)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path / "phi")
    byte_tokenizer().save_pretrained(tmp_path / "phi")
    small = prune_folder(tmp_path / "phi", tmp_path / "pruned", IDS)
    whole, pruned = (engine(load(target, each).draft) for each in (tmp_path / "phi", small))
    torch.testing.assert_close(pruned.forward(INPUTS), whole.forward(INPUTS)[:, IDS])


@pytest.mark.parametrize("tied", [False, True])
def test_a_shared_pruned_head_has_rows_of_the_targets(
    folders: tuple[Path, Path], tmp_path: Path, tied: bool
) -> None:
    target, draft = folders
    small = share_embeddings(prune_folder(draft, tmp_path / "pruned", IDS))
    config = (small / "config.json").read_text()
    assert '"tie_word_embeddings": false' in config
    tie = str(tied).lower()
    (small / "config.json").write_text(config.replace('embeddings": false', f'embeddings": {tie}'))
    pair = load(target, small)
    assert pair.draft is not None
    assert pair.draft.get_input_embeddings().weight is pair.target.get_input_embeddings().weight
    head = pair.draft.get_output_embeddings()
    assert head.weight.equal(pair.target.get_output_embeddings().weight[list(IDS)])
    assert engine(pair.draft).forward(INPUTS).shape == (3, len(IDS))


@pytest.mark.parametrize("static", [False, True])
def test_a_free_chain_feeds_and_drafts_target_ids(
    folders: tuple[Path, Path], tmp_path: Path, static: bool
) -> None:
    """Each draft is the best kept token behind those before it, in a replayed chain too."""
    target, draft = folders
    small = prune_folder(draft, tmp_path / "pruned", IDS)
    model = engine(load(target, small).draft, static)
    sequence = Sequence(request(toy_table("ab"), None, prompt_ids=(5, 9)), 0, output_ids=[200])
    (proposal,) = ModelDrafter(model, K).free([sequence])

    whole, tokens = engine(load(target, draft).draft), [5, 9, 200]
    for _ in range(K):
        logits = whole.forward([RowInput(0, 0, tokens)])[0, list(IDS)]
        tokens.append(IDS[int(logits.argmax())])
    assert proposal.tokens == tokens[3:]


def test_the_head_comes_in_the_dtype_of_the_model(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = folders
    small = prune_folder(draft, tmp_path / "pruned", IDS)
    pair = load_pair(PairConfig(str(target), str(small), "bfloat16", "cpu"))
    assert pair.draft is not None
    assert pair.draft.get_output_embeddings().weight.dtype == torch.bfloat16
    assert not any(tensor.requires_grad for tensor in pair.draft.parameters())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": torch.empty(0)}, r"draft_vocab_size, but there is no d2t in its model\.safeten"),
        ({HEAD: torch.empty(0)}, r"there is no lm_head\.weight in its model\.safetensors"),
        ({"d2t": offsets(IDS[1:])}, r"torch\.int64 \[7\], its draft_vocab_size is 8; save one"),
        ({"d2t": offsets(IDS).int()}, r"torch\.int32 \[8\], its draft_vocab_size is 8; save one"),
        ({"d2t": offsets((*IDS[:-1], 257))}, r"maps draft id 7 to 257, the tokenizer has 257 tok"),
        ({"d2t": torch.tensor(IDS)}, r"maps draft id 6 to 262, .*; d2t holds offsets"),
        ({"d2t": offsets((-1, *IDS[1:]))}, r"maps draft id 0 to -1, the tokenizer has 257"),
        ({"d2t": offsets((*IDS[:-1], 31))}, r"maps two draft ids to target id 31; keep one"),
        ({HEAD: torch.zeros(8, 16)}, r"is \[8, 16\], its .* are \[8, 32\]; save one row per"),
        ({"model.norm.weight": torch.zeros(31)}, r"lack 1 tensors, model\.norm\.weight among"),
    ],
)
def test_a_pruned_draft_that_does_not_fit_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    target, draft = folders
    small = prune_folder(draft, tmp_path / "pruned", IDS, **tensors)
    with pytest.raises(ConfigError, match=rf"pair\.draft: .*{message}"):
        load(target, small)


def test_a_pruned_draft_is_no_target(folders: tuple[Path, Path], tmp_path: Path) -> None:
    small = prune_folder(folders[1], tmp_path / "pruned", IDS)
    with pytest.raises(ConfigError, match=r"without a whole head; name it as pair\.draft"):
        load_pair(PairConfig(str(small), device="cpu"))
