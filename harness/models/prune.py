"""Keep the most frequent tokens of a draft's head: a smaller product, and a smaller choice.

    python -m harness.models.prune DRAFT FOLDER --keep 8192 RUN…

counts the output ids of finished runs and saves a copy of the draft, in the format of ``pruned``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from harness.errors import ConfigError, exit_status
from harness.models.checkpoint import locate, read_config, shares_embeddings
from harness.models.pruned import BIAS, HEAD
from harness.results.record import RunFolder

EMBEDDINGS = "model.embed_tokens.weight"
"""Also the head, where the two are tied."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.models.prune", description=__doc__)
    parser.add_argument("draft", help="the whole draft: a folder, or a packaged one's name")
    parser.add_argument("folder", type=Path, help="for the pruned one; must not exist")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders whose output ids count")
    parser.add_argument("--keep", type=int, required=True, help="tokens of the pruned head")
    given = parser.parse_args(arguments)
    return exit_status(lambda: _prune(given.draft, given.folder, given.runs, given.keep))


def _prune(draft: str, folder: Path, runs: Sequence[Path], keep: int) -> int:
    counts = count_ids(runs)
    kept = save_pruned(Path(locate(draft, "draft")), folder, counts, keep)
    share = sum(counts[token] for token in kept) / max(1, counts.total())
    print(f"{folder}: {len(kept)} tokens, which are {share:.2%} of those counted")
    return 0


def count_ids(runs: Iterable[Path]) -> Counter[int]:
    """How often each token was emitted, by all strategies of all runs.

    Raises:
        ConfigError: a folder is no finished run.
    """
    counts: Counter[int] = Counter()
    for run in runs:
        for ids in RunFolder.open(run).requests()["output_ids"]:
            counts.update(map(int, ids))
    return counts


def most_frequent(counts: Counter[int], keep: int, vocab_size: int) -> list[int]:
    """The ``keep`` most frequent ids, rising; of equally frequent ones the lower: in a byte-pair
    vocabulary these are the older and shorter tokens."""
    return sorted(sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:keep])


def save_pruned(draft: Path, folder: Path, counts: Counter[int], keep: int) -> list[int]:
    """Save a copy of a draft whose head has the most frequent tokens only.

    Returns:
        Their ids.

    Raises:
        ConfigError: the draft is no folder with one file of weights, its head has another name,
            the copy's folder exists, or there are not as many tokens.
    """
    config = read_config(str(draft), "draft")
    if not 0 < keep <= config.vocab_size:
        raise ConfigError(f"--keep: {keep} is not in 1 to {config.vocab_size}, the draft's tokens")
    if folder.exists():
        raise ConfigError(f"folder: {folder} exists; name another")
    try:
        weights = load_file(draft / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"draft: {draft} has no readable model.safetensors ({error}); save all weights in it"
        ) from None
    kept = most_frequent(counts, keep, config.vocab_size)
    if not shares_embeddings(config):
        weights |= _prune_head(weights, kept)
    weights["d2t"] = torch.tensor(kept, dtype=torch.int64) - torch.arange(len(kept))
    settings = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    shutil.copytree(draft, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**settings, "draft_vocab_size": len(kept)}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return kept


def _prune_head(weights: dict[str, torch.Tensor], kept: list[int]) -> dict[str, torch.Tensor]:
    """The tensors of a head, without the rows that are not kept."""
    whole = weights.get(HEAD, weights.get(EMBEDDINGS))
    if whole is None:
        raise ConfigError(f"draft: it has neither {HEAD} nor {EMBEDDINGS}; rename its tensors")
    head = {HEAD: whole[kept]}
    return {**head, BIAS: weights[BIAS][kept]} if BIAS in weights else head


if __name__ == "__main__":
    sys.exit(main())
