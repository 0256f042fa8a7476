"""Toys whose drafts come from any drafter, as the config makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from harness.core import Sequence
from harness.drafters.base import Drafter
from harness.drafters.build import Parts, make_drafter
from harness.drafters.config import DrafterConfig
from harness.drafters.length import Costs
from harness.grammar.matcher import TokenTable
from harness.models.language_model import LanguageModel
from tests.toys import Toy, ToyCodec, request

CHEAP = Costs(draft_ms=0.1, verify_ms=1.0, row_ms=0.0)
"""Costs under which drafting pays."""


def with_drafter(
    toy: Toy, references: Mapping[str, SequenceOf[int]] | None = None, **fields: Any
) -> Toy:
    """The toy with the drafter of these settings; ``references`` are for the oracle."""
    if fields.get("name") == "oracle":
        fields["reference"] = "the plain run of the test"
    config = DrafterConfig(**fields)
    given = config.draft_ms, config.verify_ms, config.row_ms
    costs = CHEAP if None in given else Costs(*given)  # type: ignore[arg-type]

    def make(model: LanguageModel, draft_tokens: int) -> Drafter:
        codec = ToyCodec(toy.table)
        known = references or {}
        vocab_size = len(toy.table)
        parts = Parts(draft_tokens, vocab_size, codec, model, references=known, costs=costs)
        return make_drafter(config, parts)

    return replace(toy, drafter=make)


def running(
    table: TokenTable, output: SequenceOf[int], prompt: SequenceOf[int] = (0,), **fields: Any
) -> Sequence:
    """A sequence in mid-output."""
    sequence = Sequence(request(table, None, prompt_ids=tuple(prompt), **fields), 0)
    sequence.output_ids = list(output)
    return sequence
