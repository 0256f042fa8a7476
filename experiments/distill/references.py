"""Reference answers as a model would write them, behind their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from experiments.distill.prompts import Record, answers, source, to_item
from experiments.distill.sequences import TokenSequence, sequence
from harness.workloads.item import prompt_ids

STYLES: dict[str, dict[str, Any]] = {
    "compact": {},
    "minimal": {"separators": (",", ":")},
    "indent 2": {"indent": 2},
    "indent 4": {"indent": 4},
}
"""By name, how ``json.dumps`` writes an answer. ``compact`` is the harness's: one space behind each
separator, which is what ``json.dumps`` does by default. Models pretty-print where they may."""
OTHERS = tuple(style for style in STYLES if style != "compact")


def reference_sequences(
    record: Record,
    styles: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    max_length: int,
) -> Iterator[TokenSequence]:
    """The record's prompt with each of its reference answers and the end token.

    Args:
        record: one without reference answers makes nothing.
        styles: of ``STYLES``; one sequence for each.
        tokenizer: of the target.
        max_length: that sequences are cut to.
    """
    values = answers(record)
    prompt = prompt_ids(to_item(record), cast(Any, tokenizer)) if values else ()
    for style in styles:
        for value in values:
            text = json.dumps(value, ensure_ascii=False, **STYLES[style])
            ids = tokenizer.encode(text, add_special_tokens=False)
            output = [*ids, cast(int, tokenizer.eos_token_id)]
            name = source(record, f"reference, {style}")
            if made := sequence(record["id"], name, prompt, output, max_length):
                yield made
