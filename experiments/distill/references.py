"""Reference answers as a model would write them, behind their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from experiments.distill.masks import Governed, Grammars, MaskTable
from experiments.distill.prompts import Record, answers, source, to_item
from experiments.distill.sequences import TokenSequence, sequence
from harness.grammar.matcher import Whitespace
from harness.workloads.item import prompt_ids

STYLES: dict[str, tuple[dict[str, Any], Whitespace]] = {
    "compact": ({}, "compact"),
    "minimal": ({"separators": (",", ":")}, "minimal"),
    "indent 2": ({"indent": 2}, "free"),
    "indent 4": ({"indent": 4}, "free"),
}
"""By name, how ``json.dumps`` writes an answer, and the whitespace of the grammar that allows it.
``compact`` is the harness's: one space behind each separator, which is what ``json.dumps`` does by
default. Models pretty-print where they may."""
OTHERS = tuple(style for style in STYLES if style != "compact")


def reference_sequences(
    records: Iterable[tuple[Record, Iterable[str]]],
    tokenizer: PreTrainedTokenizerFast,
    max_length: int,
    grammars: Grammars,
    table: MaskTable,
) -> list[TokenSequence]:
    """Each record's prompt with each of its reference answers and the end token.

    Args:
        records: each with the ``STYLES`` that its answers are written in; one without reference
            answers makes nothing.
        tokenizer: of the target.
        max_length: that sequences are cut to.
        grammars: of the target's vocabulary.
        table: takes the masks.
    """
    made = [
        (each, Governed(each.output, to_item(record).grammar, STYLES[style][1]))
        for record, styles in records
        for style, each in _answered(record, styles, tokenizer, max_length)
    ]
    rows = grammars.follow([governed for _, governed in made], table)
    return [each._replace(rows=own) for (each, _), own in zip(made, rows, strict=True)]


def _answered(
    record: Record, styles: Iterable[str], tokenizer: PreTrainedTokenizerFast, max_length: int
) -> Iterator[tuple[str, TokenSequence]]:
    """Its sequences and their styles, without masks yet."""
    values = answers(record)
    prompt = prompt_ids(to_item(record), cast(Any, tokenizer)) if values else ()
    for style in styles:
        for value in values:
            text = json.dumps(value, ensure_ascii=False, **STYLES[style][0])
            ids = tokenizer.encode(text, add_special_tokens=False)
            output = [*ids, cast(int, tokenizer.eos_token_id)]
            name = source(record, f"reference, {style}")
            if made := sequence(record["id"], name, prompt, output, max_length):
                yield style, made
