"""What two ranks run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.test_pair import drop_tensors
from tests.parallel.launch import write_items
from tests.tiny_pair import random_llama, save_pair


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair, a draft that borrows the target's embeddings, and a workload."""
    folder = tmp_path_factory.mktemp("base")
    save_pair(folder)
    borrowing = folder / "borrowing"
    random_llama(2, layers=1).save_pretrained(borrowing)
    drop_tensors(borrowing, "model.embed_tokens.weight", "lm_head.weight")
    config = json.loads((borrowing / "config.json").read_text())
    (borrowing / "config.json").write_text(json.dumps({**config, "embeddings": "shared"}))
    write_items(folder)
    return folder
