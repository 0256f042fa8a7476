"""Grammar, then n-gram, else the model (L12)."""

from __future__ import annotations

import pytest

from harness.clock import Clock
from harness.core import Sequence, Verdict
from harness.drafters.cascade import Cascade
from harness.drafters.forced import ForcedDrafter
from harness.drafters.model import ModelDrafter
from harness.drafters.ngram import NgramDrafter
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.models.sampling import Sampling
from tests.drafters.makers import running
from tests.toys import TableLM, Toy, ToyCodec, ids, random_law, toy_table

TABLE = toy_table("abcdexyz")


def spell(text: str) -> list[int]:
    return ids(TABLE, *text)


def always_z(_: tuple[int, ...]) -> list[float]:
    return [float(token == spell("z")[0]) for token in range(len(TABLE))]


@pytest.fixture
def model() -> TableLM:
    return TableLM(always_z, len(TABLE), 1)


def cascade(model: TableLM, k: int = 4) -> Cascade:
    codec = ToyCodec(TABLE)
    return Cascade(ForcedDrafter(k, codec), NgramDrafter(k, 2, 4), ModelDrafter(model, k))


def following(pattern: str, sequence: Sequence) -> Sequence:
    toy = Toy(TABLE, random_law(TABLE, 0), random_law(TABLE, 0))
    matcher = toy.grammar_engine().compile(GrammarSpec.regex(pattern)).matcher()
    sequence.matcher = TrackedMatcher(matcher, Clock())
    assert sequence.matcher.accept(sequence.output_ids)
    return sequence


def test_the_look_up_goes_on_behind_the_forced_text(model: TableLM) -> None:
    sequence = following("xab[a-z]*", running(TABLE, spell("x"), prompt=spell("abcde")))
    (proposal,) = cascade(model).free([sequence])
    assert proposal.tokens == spell("abcd")
    assert (proposal.draft_forwards, model.forwards) == (0, 0)


def test_the_model_is_asked_where_both_are_silent(model: TableLM) -> None:
    sequence = following("x[a-z]*", running(TABLE, spell("x")))
    (proposal,) = cascade(model).free([sequence])
    assert proposal.tokens == spell("zzzz")
    assert (proposal.draft_forwards, model.forwards) == (4, 4)


def test_the_models_drafts_bring_their_law_and_no_other_do(model: TableLM) -> None:
    silent, repeating = running(TABLE, spell("x")), running(TABLE, spell("xabxab"))
    asked, found = cascade(model).free([silent, repeating], Sampling(temperature=1.0))
    assert asked.q is not None
    assert asked.q.shape == (4, len(TABLE))
    assert found.tokens == spell("xab")
    assert found.q is None


def test_what_the_model_did_not_read_meanwhile_it_reads_first(model: TableLM) -> None:
    """Its cache stands where it was last asked; ``TableLM`` fails for a hole in it."""
    drafter, sequence = cascade(model), running(TABLE, [])
    drafter.prefill([sequence])
    sequence.output_ids = spell("abab")
    (found,) = drafter.free([sequence])
    drafter.settle(sequence, found, Verdict(spell("abd"), [0, 1]), spell("abd"))
    sequence.output_ids += spell("abd")
    assert sequence.draft_pending == spell("abababd")
    (asked,) = drafter.free([sequence])
    assert asked.draft_forwards == 4
    assert model.cells[0][:8] == sequence.tokens_from(0)


def test_what_the_output_confirms_of_the_models_drafts_is_not_read_again(model: TableLM) -> None:
    drafter, sequence = cascade(model), running(TABLE, spell("x"))
    (asked,) = drafter.free([sequence])
    emitted = spell("zzzzy")
    drafter.settle(sequence, asked, Verdict(emitted, [0, 1, 2, 3]), emitted)
    sequence.output_ids += emitted
    assert sequence.draft_pending == spell("zy")  # the last draft was never fed
