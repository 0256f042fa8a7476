"""The stage ``evaluate``: agreement on BFCL's ``eval`` split, which nothing before this has read.

In fp32, with the weights as they are exported (bf16), teacher-forced, on the output tokens: of the
reference answers in each style, and of what the target itself writes (greedy) under its
grammars. Three shares, see ``experiments.distill.measure.KINDS``, each with a bootstrap interval
over the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.distill import prompts
from experiments.distill.data import GREEDY
from experiments.distill.decoding import Decoder
from experiments.distill.masks import Masks
from experiments.distill.measure import KINDS, agreement
from experiments.distill.progress import Progress, progress
from experiments.distill.prompts import Record
from experiments.distill.references import STYLES, reference_sequences
from experiments.distill.sequences import TokenSequence, by_source
from experiments.distill.settings import Settings
from experiments.distill.student import head_of
from harness.models.pair import PairConfig, load_pair
from harness.results.table import Table
from harness.workloads.item import derive_seed

BATCH_TOKENS = 8192
"""Of a forward in fp32; a CPU's memory holds it."""

Shares = dict[str, dict[str, Any]]
"""By source of the sequences: ``tokens``, ``sequences``, and for each of ``KINDS`` a ``share`` and
its ``interval``."""


def evaluate(settings: Settings, drafts: Sequence[str]) -> dict[str, Shares]:
    """Measure drafts on the same sequences.

    Args:
        settings: the pair, how many items, and how they are decoded.
        drafts: as ``pair.draft`` names them; each shares the target's embeddings.
    """
    with progress("evaluate") as shown:
        sources, masks = eval_sequences(settings, shown)
        return {draft: measure(settings, draft, sources, masks, shown) for draft in drafts}


def eval_sequences(
    settings: Settings, shown: Progress
) -> tuple[dict[str, list[TokenSequence]], Masks]:
    """By source, what is measured on: reference answers, and the target's own outputs; and the
    masks that they refer to."""
    pair = load_pair(PairConfig(settings.target, device=settings.device))  # decodes in its dtype
    config = pair.target.config.get_text_config(decoder=True)
    length = min(settings.max_length, config.max_position_embeddings)
    records = eval_records(settings)
    decoder = Decoder(pair, settings.slots, length, settings.max_new_tokens)
    grammars, table = decoder.grammars, decoder.grammars.new_table()
    styled = [(record, STYLES) for record in records]
    found = reference_sequences(styled, pair.tokenizer, length, grammars, table)
    for mode in GREEDY:

        def told(count: str, name: str = mode.name) -> None:
            shown.at(0.0, f"{name}: {count}")

        found += decoder.decode(records, mode, settings.seed, table, told)
    return by_source(found), table.masks


def eval_records(settings: Settings) -> list[Record]:
    """The items of the ``eval`` split, or a seeded sample of them."""
    records = prompts.read(prompts.CALLS, "eval")
    ranked = sorted(records, key=lambda record: derive_seed(settings.seed, record["id"]))
    return ranked[: settings.eval_items or None]


def measure(
    settings: Settings,
    draft: str,
    sources: dict[str, list[TokenSequence]],
    masks: Masks,
    shown: Progress,
) -> Shares:
    """The agreement of one draft with the target by source."""
    pair = load_pair(PairConfig(settings.target, draft, "float32", settings.device))
    head = head_of(pair.target, pair.vocab_size)
    assert pair.draft is not None
    results = {}
    for number, (source, sequences) in enumerate(sources.items()):
        shown.at(number / len(sources), f"{Path(draft).name}: {source}")
        found = agreement(pair.draft, pair.target, head, sequences, masks, BATCH_TOKENS)
        shares = {
            kind: {"share": found.share(kind), "interval": found.interval(kind)} for kind in KINDS
        }
        results[source] = {"tokens": found.tokens, "sequences": len(sequences), **shares}
    return results


def as_table(results: dict[str, Shares]) -> Table:
    """One row per draft and source."""
    rows = [
        (Path(draft).name, source, *map(with_interval, map(each.get, KINDS)), str(each["tokens"]))
        for draft, shares in results.items()
        for source, each in shares.items()
    ]
    return Table(
        title="Agreement on the eval split",
        headers=("draft", "outputs", *KINDS, "tokens"),
        docs=(
            "folder of the draft",
            "whose tokens both models were fed",
            *(
                f"share of output tokens with the same argmax (fp32); {doc}"
                for doc in KINDS.values()
            ),
            "output tokens, end tokens included",
        ),
        rows=tuple(rows),
    )


def with_interval(share: dict[str, Any]) -> str:
    """A share and its 95 % interval."""
    return "{:.3f} ({:.3f}–{:.3f})".format(share["share"], *share["interval"])
