"""The stage ``evaluate``: agreement on BFCL's ``eval`` split, which nothing before this has read.

In fp32, with the weights as they are exported (bf16), teacher-forced, on the output tokens: of the
reference answers in each style, and of what the target itself writes (greedy) under its
grammars. A share has a bootstrap interval over the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.distill import prompts
from experiments.distill.data import GREEDY
from experiments.distill.decoding import Decoder
from experiments.distill.measure import agreement
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
"""By source of the sequences: ``agreement``, its ``interval``, ``tokens``, ``sequences``."""


def evaluate(settings: Settings, drafts: Sequence[str]) -> dict[str, Shares]:
    """Measure drafts on the same sequences.

    Args:
        settings: the pair, how many items, and how they are decoded.
        drafts: as ``pair.draft`` names them; each shares the target's embeddings.
    """
    with progress("evaluate") as shown:
        sources = eval_sequences(settings, shown)
        return {draft: measure(settings, draft, sources, shown) for draft in drafts}


def eval_sequences(settings: Settings, shown: Progress) -> dict[str, list[TokenSequence]]:
    """By source, what is measured on: reference answers, and the target's own outputs."""
    pair = load_pair(PairConfig(settings.target, device=settings.device))  # decodes in its dtype
    config = pair.target.config.get_text_config(decoder=True)
    length = min(settings.max_length, config.max_position_embeddings)
    records = eval_records(settings)
    found = [
        each
        for record in records
        for each in reference_sequences(record, STYLES, pair.tokenizer, length)
    ]
    decoder = Decoder(pair, settings.slots, length, settings.max_new_tokens)
    for mode in GREEDY:

        def told(count: str, name: str = mode.name) -> None:
            shown.at(0.0, f"{name}: {count}")

        found += decoder.decode(records, mode, settings.seed, told)
    return by_source(found)


def eval_records(settings: Settings) -> list[Record]:
    """The items of the ``eval`` split, or a seeded sample of them."""
    records = prompts.read(prompts.CALLS, "eval")
    ranked = sorted(records, key=lambda record: derive_seed(settings.seed, record["id"]))
    return ranked[: settings.eval_items or None]


def measure(
    settings: Settings, draft: str, sources: dict[str, list[TokenSequence]], shown: Progress
) -> Shares:
    """The agreement of one draft with the target by source."""
    pair = load_pair(PairConfig(settings.target, draft, "float32", settings.device))
    head = head_of(pair.target, pair.vocab_size)
    assert pair.draft is not None
    results = {}
    for number, (source, sequences) in enumerate(sources.items()):
        shown.at(number / len(sources), f"{Path(draft).name}: {source}")
        found = agreement(pair.draft, pair.target, head, sequences, BATCH_TOKENS)
        results[source] = {
            "agreement": found.share,
            "interval": found.interval,
            "tokens": found.tokens,
            "sequences": len(sequences),
        }
    return results


def as_table(results: dict[str, Shares]) -> Table:
    """One row per draft and source."""
    rows = [
        (
            Path(draft).name,
            source,
            f"{each['agreement']:.3f}",
            "{:.3f}–{:.3f}".format(*each["interval"]),
            str(each["tokens"]),
        )
        for draft, shares in results.items()
        for source, each in shares.items()
    ]
    return Table(
        title="Agreement on the eval split",
        headers=("draft", "outputs", "agreement", "95 %", "tokens"),
        docs=(
            "folder of the draft",
            "whose tokens both models were fed",
            "share of output tokens, end tokens included, with the same argmax (fp32)",
            "bootstrap interval over the items",
            "output tokens",
        ),
        rows=tuple(rows),
    )
