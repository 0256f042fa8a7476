"""The command that makes a pruned draft from a whole one and from what was decoded."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file

from harness.models.pair import PairConfig, load_pair
from harness.models.prune import main, most_frequent
from harness.models.pruned import HEAD, PrunedHead
from tests.results.folders import tiny_folder
from tests.tiny_pair import random_llama, save_pair


def save_run(folder: Path, *outputs: list[int]) -> Path:
    tiny_folder(folder)
    pd.DataFrame({"output_ids": list(outputs)}).to_parquet(folder / "requests.parquet")
    return folder


def test_the_most_frequent_ids_are_kept_and_of_equals_the_lower() -> None:
    counts = Counter({5: 3, 2: 1, 7: 3, 0: 1})
    assert most_frequent(counts, 3, 9) == [0, 5, 7]
    assert most_frequent(counts, 6, 9) == [0, 1, 2, 3, 5, 7]


@pytest.mark.parametrize("tied", [False, True])
def test_the_pruned_draft_loads_with_the_rows_of_the_kept_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    target, draft = save_pair(tmp_path)
    if tied:
        model = random_llama(3, layers=1)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(draft)
        assert HEAD not in load_file(draft / "model.safetensors")
    runs = [save_run(tmp_path / "a", [65, 66, 65], [256]), save_run(tmp_path / "b", [66, 200])]
    small = tmp_path / "small"
    assert main([str(draft), str(small), "--keep", "3", *map(str, runs)]) == 0
    assert "3 tokens, which are 83.33% of those counted" in capsys.readouterr().out

    whole, pruned = (
        load_pair(PairConfig(str(target), str(each), device="cpu")).draft for each in (draft, small)
    )
    assert whole is not None
    assert pruned is not None
    head = pruned.get_output_embeddings()
    assert isinstance(head, PrunedHead)
    assert head.ids.tolist() == [65, 66, 200]
    assert head.weight.equal(whole.get_output_embeddings().weight[[65, 66, 200]])
    assert pruned.get_input_embeddings().weight.equal(whole.get_input_embeddings().weight)


def test_the_packaged_draft_keeps_to_its_targets_head(tmp_path: Path) -> None:
    """It has no head to prune: the map is all that is added."""
    run, small = save_run(tmp_path / "run", [7, 7, 9]), tmp_path / "small"
    assert main(["smollm2-draft-3l", str(small), "--keep", "2", str(run)]) == 0
    weights = load_file(small / "model.safetensors")
    assert weights["d2t"].tolist() == [7, 8]
    assert HEAD not in weights


@pytest.mark.parametrize(
    ("keep", "run", "folder", "message"),
    [
        ("0", "run", "new", "--keep: 0 is not in 1 to 260"),
        ("261", "run", "new", "--keep: 261 is not in 1 to 260"),
        ("9", "none", "new", "none is not a run folder"),
        ("9", "run", "target", "folder: .* exists; name another"),
    ],
)
def test_what_cannot_be_pruned_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keep: str,
    run: str,
    folder: str,
    message: str,
) -> None:
    _, draft = save_pair(tmp_path)
    save_run(tmp_path / "run", [1])
    arguments = [str(draft), str(tmp_path / folder), "--keep", keep, str(tmp_path / run)]
    capsys.readouterr()  # progress bars of what is saved
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_weights_in_several_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, draft = save_pair(tmp_path)
    (draft / "model.safetensors").rename(draft / "model-00001-of-00001.safetensors")
    run = save_run(tmp_path / "run", [1])
    assert main([str(draft), str(tmp_path / "new"), "--keep", "2", str(run)]) == 2
    assert "no readable model.safetensors" in capsys.readouterr().err
