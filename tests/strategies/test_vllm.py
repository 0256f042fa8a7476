"""The worked examples of spec/vllm.md, and greedy decoding with hostile drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.core import Finish, Proposal, Verdict
from harness.grammar.matcher import TokenTable
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from strategies.vllm import SpecDecodingStats, Vllm
from tests.strategies.steps import STALE, LoggedMatcher, drafts, rows_of, says, step_of
from tests.toys import ENGINES, Toy, Watch, random_law, request, toy_table

TABLE = toy_table(["{", '"a"', ":", "1", "}", "x"])
OBJECT = GrammarSpec.ebnf(r'root ::= "{" "\"a\"" ":" "1" "}"')
WORDS = ["{", '"a"', ":", "1", "}", "$"]
"""S_k of the specification is the state after the first k of them."""

LETTERS = toy_table(["a", "b", "c", "ab", "bc", "abc", "d"])
REGEXES = ["(ab|c)*d", "[abcd]{2,7}", "abc(abd)?", "a(b|bc){1,4}"]
VARIANTS = [
    {"keep_first_invalid": keep, "asynchronous": asynchronous}
    for keep in (False, True)
    for asynchronous in (False, True)
]

engines = pytest.mark.parametrize("engine", ENGINES)
variants = pytest.mark.parametrize("options", VARIANTS, ids=str)


def vllm(engine: str, **options: Any) -> tuple[Toy, Vllm]:
    toy = Toy(TABLE, says(TABLE, ""), says(TABLE, ""), engine=engine, draft_tokens=4)
    return toy, Vllm(Vllm.Options(**options), toy.setup)


def after(toy: Toy, k: int) -> LoggedMatcher:
    """A matcher in S_k."""
    return LoggedMatcher(toy, OBJECT, drafts(TABLE, " ".join(WORDS[:k])))


def trimmed(engine: str, k: int, text: str, **options: Any) -> Proposal:
    """The proposal that is left of a draft in S_k; the matcher must not notice."""
    toy, strategy = vllm(engine, **options)
    matcher, proposal = after(toy, k), Proposal(drafts(TABLE, text))
    before = matcher.state()
    strategy.trim(proposal, matcher)
    assert matcher.state() == before
    return proposal


# -- 1.1 trimming -------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize(
    ("asynchronous", "keep", "left"),
    [
        (False, False, '"a" :'),
        (True, False, '"a" : -1 -1'),
        (False, True, '"a" : x'),
        (True, True, '"a" : x -1'),
    ],
)
def test_a_draft_is_cut_to_its_legal_prefix(
    engine: str, asynchronous: bool, keep: bool, left: str
) -> None:
    """V1.1b, V1.1d, V1.1e: the worked example, state S_1, draft ``"a" : x }``."""
    proposal = trimmed(engine, 1, '"a" : x }', asynchronous=asynchronous, keep_first_invalid=keep)
    assert proposal.tokens == drafts(TABLE, left)
    assert proposal.legal == [True, True, *[False] * (len(proposal.tokens) - 2)]
    assert (proposal.drafted_raw, proposal.drafted) == (4, 2 + keep)
    assert proposal.trimmed == 2 - keep


@engines
@pytest.mark.parametrize(
    ("k", "draft", "left"),
    [
        (1, '"a" -1 -1', '"a"'),  # R3: no engine ever sees the padding
        (1, '"a" -1 :', '"a"'),  # everything behind the first -1 goes, legal or not
        (1, "-1 -1 -1", ""),
        (0, "{ -1", "{"),  # id 0 is a token
        (4, "} $ x x", "} $"),  # nothing stands behind a stop token
        (5, "$ x", "$"),  # EOS where nothing else is legal
        (5, "x $", ""),
        (4, "$", ""),
        (6, "x x", ""),  # terminated
    ],
)
def test_padding_and_stop_tokens_end_the_legal_prefix(
    engine: str, k: int, draft: str, left: str
) -> None:
    """V1.1a, V1.1c, R3."""
    assert trimmed(engine, k, draft).tokens == drafts(TABLE, left)
    padded = trimmed(engine, k, draft, asynchronous=True).tokens
    assert padded == [*drafts(TABLE, left), *[-1] * (len(draft.split()) - len(left.split()))]


@engines
def test_padding_is_not_kept_as_the_first_invalid_draft(engine: str) -> None:
    """V1.1a, V1.1b: what stands behind the legal prefix must be a draft to be kept."""
    assert trimmed(engine, 1, '"a" -1 x', keep_first_invalid=True).tokens == drafts(TABLE, '"a"')


@pytest.mark.parametrize(
    ("options", "rows"), list(zip(VARIANTS, [2, 4, 3, 4], strict=True)), ids=str
)
def test_each_draft_that_is_left_keeps_its_law(options: dict[str, bool], rows: int) -> None:
    """V1.7d: padding, too, is recovered with the law that its draft was drawn from."""
    toy, strategy = vllm("xgrammar", **options)
    q = torch.eye(4, len(TABLE))
    proposal = Proposal(drafts(TABLE, '"a" : x }'), q=q)
    strategy.trim(proposal, after(toy, 1))
    assert proposal.q is not None
    assert proposal.q.tolist() == q[:rows].tolist()
    assert len(proposal.tokens) == rows


# -- 1.2 rows -----------------------------------------------------------------------------------

ROWS = {
    "A all valid": (1, '"a" : 1 }', ['"a"', ":", "1", "}", "$"], 4),
    "B sync-trimmed": (1, '"a" :', ['"a"', ":", "1"], 2),
    "C async-padded": (1, '"a" : -1 -1', ['"a"', ":", "1", "ALL", "ALL"], 2),
    "D a real invalid draft": (1, '"a" : x }', ['"a"', ":", "1", "1", "1"], 2),
    "E past EOS": (4, "} $ x x", ["}", "$", "ALL", "ALL", "ALL"], 2),
    "F terminated": (6, "x x", ["ALL", "ALL", "ALL"], 0),
    "G nothing scheduled": (0, "", ["{"], 0),
    "H all padding": (0, "-1 -1 -1 -1", ["{", "ALL", "ALL", "ALL", "ALL"], 0),
}


@engines
@pytest.mark.parametrize(("k", "draft", "rows", "previewed"), ROWS.values(), ids=ROWS)
def test_each_row_says_what_may_stand_behind_the_drafts_before_it(
    engine: str, k: int, draft: str, rows: list[str], previewed: int
) -> None:
    """V1.2c-h, R9, Q10: the worked rows; V1.2f, R7, Q7: the preview leaves no trace."""
    toy, strategy = vllm(engine)
    matcher = after(toy, k)
    before = matcher.state()
    step = step_of(strategy, [matcher], [Proposal(drafts(TABLE, draft))])
    strategy.verify_rows(step)
    assert step.sequences[0].error is None
    assert rows_of(strategy, step) == rows
    assert matcher.state() == before
    assert matcher.log == [[token] for token in drafts(TABLE, draft)[:previewed]] + (
        [-previewed] if previewed else []
    )
    assert matcher.ledger.rollback_tokens["preview"] == previewed


@engines
@pytest.mark.parametrize("case", ["B sync-trimmed", "F terminated", "G nothing scheduled"])
def test_rows_without_a_draft_keep_their_stale_bits_and_mask_nothing(
    engine: str, case: str
) -> None:
    """V1.2b."""
    toy, strategy = vllm(engine)
    k, draft, rows, _ = ROWS[case]
    step = step_of(strategy, [after(toy, k)], [Proposal(drafts(TABLE, draft))])
    strategy.verify_rows(step)
    for position in range(len(rows), strategy.reserve):
        assert step.masks.host[position].tolist() == [STALE]
        assert not step.masks.flagged(0, position)


@engines
def test_a_refused_draft_in_the_preview_is_no_error(
    engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """R21: the first illegal draft is kept on purpose, its refusal is expected."""
    toy, strategy = vllm(engine, keep_first_invalid=True)
    proposal = trimmed(engine, 1, '"a" : x }', keep_first_invalid=True)
    step = step_of(strategy, [after(toy, 1)], [proposal])
    strategy.verify_rows(step)
    assert rows_of(strategy, step) == ['"a"', ":", "1", "1"]
    assert step.sequences[0].error is None
    assert capfd.readouterr() == ("", "")


@engines
def test_a_preview_is_rolled_back_when_the_engine_breaks(engine: str) -> None:
    """Mutant: preview not rolled back when an exception occurs. The other sequence goes on."""
    toy, strategy = vllm(engine)
    broken, sound = after(toy, 1), after(toy, 1)
    broken.fills_left = 2
    before = broken.state()
    step = step_of(strategy, [broken, sound], [Proposal(drafts(TABLE, '"a" : 1 }'))] * 2)
    strategy.verify_rows(step)
    assert broken.state() == before
    assert broken.ledger.held == broken.held
    assert step.sequences[0].error == "RuntimeError: the engine broke"
    assert rows_of(strategy, step)[5:] == ['"a"', ":", "1", "}", "$"]


@engines
def test_rows_of_a_ragged_batch_land_on_their_own_logits(engine: str) -> None:
    """V1.3b, R5: A (grammar, 2 drafts), B (free text, 1), C (grammar, none)."""
    toy, strategy = vllm(engine)
    proposals = [Proposal(drafts(TABLE, text)) for text in ('"a" :', "x", "")]
    step = step_of(strategy, [after(toy, 1), None, after(toy, 0)], proposals)
    strategy.verify_rows(step)
    assert rows_of(strategy, step) == ['"a"', ":", "1", "ALL", "ALL", "{"]


# -- 1.4 accepting ------------------------------------------------------------------------------


def run(
    target: str, draft: str, grammar: GrammarSpec | None, table: TokenTable = TABLE, **fields: Any
) -> tuple[Watch, dict[str, Any]]:
    """One request whose target and draft say what is written; and vLLM's own numbers."""
    toy = Toy(table, says(table, target), says(table, draft), draft_tokens=4)
    strategy = toy.strategy("vllm")
    return toy.run(strategy, [request(table, grammar, **fields)]), strategy.statistics()


def test_the_output_is_cut_behind_its_stop_token_before_the_matcher_is_fed() -> None:
    """V1.4a, V1.4c, R8: the row behind EOS is unmasked, and what it says goes nowhere."""
    watch, _ = run("x x $ x", "x x $ x", GrammarSpec.regex("x*"))
    done = watch.done["r"]
    assert done.output_ids == drafts(TABLE, "x x $")
    assert (done.finish, done.error) == (Finish.STOP, None)
    assert done.matcher is not None
    assert (done.matcher.held, done.matcher.terminated) == (3, True)


def test_the_leftmost_of_several_stop_tokens_ends_the_output() -> None:
    """V1.4a, R11: a run [STOP, EOS] ends with STOP, and EOS does not leak."""
    two_stops = replace(TABLE, tokens=(*TABLE.tokens, b""), stop_ids=frozenset({6, 7}), eos_id=7)

    def stops(tokens: tuple[int, ...]) -> list[float]:
        word = {1: 5, 2: 6}.get(len(tokens), 7)  # x, STOP, then EOS for ever
        return [float(token == word) for token in range(len(two_stops))]

    for grammar in (GrammarSpec.regex("x*"), None):
        toy = Toy(two_stops, stops, stops)
        assert toy.run("vllm", [request(two_stops, grammar)]).outputs == {"r": [5, 6]}


def test_drafts_accepted_past_the_end_count_for_vllm_only() -> None:
    """1.1, accounting: accepted is counted before the output is cut. Free text counts, too."""
    watch, numbers = run("x $ x x x x", "x $ x x x x", None)
    _, verify = watch.steps
    assert watch.outputs == {"r": drafts(TABLE, "x $")}
    assert (verify.drafted, verify.accepted, verify.past_stop) == (4, 1, 3)
    assert numbers["mean_acceptance_length"] == 5
    assert numbers["per_position_acceptance"] == [1, 1, 1, 1]


@engines
def test_a_refused_output_fails_its_request_and_is_still_emitted(engine: str) -> None:
    """V1.4d, V1.4e: no retry, no part of it is fed, and the others go on."""
    toy, strategy = vllm(engine)
    refused, other = after(toy, 1), after(toy, 1)
    before = refused.state()
    step = step_of(strategy, [refused, other], [Proposal(), Proposal()])
    step.kept = [drafts(TABLE, '"a" x'), drafts(TABLE, '"a" :')]
    step.verdicts = [Verdict(kept, []) for kept in step.kept]
    step.sequences[0].output_ids = list(step.kept[0])
    strategy.commit(step)
    assert [sequence.finish for sequence in step.sequences] == [Finish.FAILED, None]
    assert "the grammar refuses emitted tokens [1, 5]" in str(step.sequences[0].error)
    assert step.sequences[0].output_ids == drafts(TABLE, '"a" x')
    assert refused.state() == before
    assert other.held == 3


@engines
@variants
def test_a_dead_end_fails_its_own_request_only(engine: str, options: dict[str, bool]) -> None:
    """V1.3g: no token begins with ``y``; upstream would emit id 0 there."""
    toy = Toy(LETTERS, says(LETTERS, "a b c d"), says(LETTERS, "a b d d"), engine=engine)
    requests = [
        request(LETTERS, GrammarSpec.regex(regex), name)
        for name, regex in (("first", "y"), ("later", "aby"), ("sound", "abcd"))
    ]
    watch = toy.run(toy.strategy("vllm", **options), requests)
    assert set(watch.errors) == {"first", "later"}
    assert watch.outputs["first"] == []
    assert watch.outputs["sound"] == drafts(LETTERS, "a b c d $")


# -- 1.8 metrics --------------------------------------------------------------------------------

WINDOWS = [("a a d d", 2), ("a a a", 0), ("d d d d", 0)]
"""N = 4: drafts and how many the target accepts; 2 of the first and all of the last are illegal."""


def counted(engine: str, asynchronous: bool) -> dict[str, Any]:
    toy = Toy(LETTERS, says(LETTERS, ""), says(LETTERS, ""), engine=engine, draft_tokens=4)
    strategy = Vllm(Vllm.Options(asynchronous=asynchronous), toy.setup)
    matcher = LoggedMatcher(toy, GrammarSpec.regex("a*"))
    for text, accepted in WINDOWS:
        step = step_of(strategy, [matcher], [Proposal(drafts(LETTERS, text))])
        strategy.trim(step.proposals[0], matcher)
        step.kept = [drafts(LETTERS, "a") * (accepted + 1)]
        step.verdicts = [Verdict(step.kept[0], list(range(accepted)))]
        strategy.commit(step)
    assert strategy.stats.draft_tokens == 5
    return strategy.statistics()


@engines
def test_an_all_invalid_window_is_a_draft_of_no_tokens_when_asynchronous(engine: str) -> None:
    """V1.8, example: drafts 3, draft_tokens 2 + 3 + 0, accepted 2."""
    assert counted(engine, asynchronous=True) == {
        "mean_acceptance_length": pytest.approx(1.667, abs=1e-3),
        "per_position_acceptance": pytest.approx([1 / 3, 1 / 3, 0, 0]),
        "draft_acceptance_rate": 0.4,
    }


@engines
def test_an_all_invalid_window_is_no_draft_when_synchronous(engine: str) -> None:
    """V1.8, example, V1.1d: drafts 2."""
    assert counted(engine, asynchronous=False) == {
        "mean_acceptance_length": 2.0,
        "per_position_acceptance": [0.5, 0.5, 0, 0],
        "draft_acceptance_rate": 0.4,
    }


def test_nothing_drafted_has_no_rates() -> None:
    assert SpecDecodingStats(2).summary() == {
        "mean_acceptance_length": None,
        "per_position_acceptance": [],
        "draft_acceptance_rate": None,
    }


# -- running ------------------------------------------------------------------------------------


@engines
@variants
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_plains_and_the_matcher_follows_it(
    engine: str, options: dict[str, bool], seed: int
) -> None:
    """Properties 2 and 6; only previews are rolled back (V1.2f)."""
    toy = Toy(LETTERS, random_law(LETTERS, seed), random_law(LETTERS, seed + 50), engine=engine)
    requests = [request(LETTERS, GrammarSpec.regex(regex), regex) for regex in REGEXES]
    watch = toy.run(toy.strategy("vllm", **options), requests)
    assert not watch.errors
    assert watch.outputs == toy.run("plain", requests).outputs
    emitted = dict.fromkeys(watch.outputs, 0)
    for trace in watch.steps:
        emitted[trace.request] += trace.emitted
        assert trace.held == emitted[trace.request]
        assert trace.advanced == trace.emitted + trace.rollback_preview_tokens
        assert trace.rollback_draft_calls == trace.rollback_rejected_calls == 0
        assert trace.rows == 1 + len(trace.draft_ids)


@engines
@variants
def test_an_illegal_draft_that_the_target_would_say_is_not_accepted(
    engine: str, options: dict[str, bool]
) -> None:
    """V1.1f, V1.7d, R6: rows behind padding are unmasked, yet no padding passes."""
    table = toy_table(["a", "x"])
    toy = Toy(table, says(table, "x x x x x"), says(table, "x x x x x"), engine=engine)
    watch = toy.run(toy.strategy("vllm", **options), [request(table, GrammarSpec.regex("a{4}"))])
    assert watch.outputs == {"r": drafts(table, "a a a a $")}
    assert sum(trace.accepted for trace in watch.steps if "x" in trace.draft_ids) == 0


# -- 1.7 the law of sampled outputs -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 0.45),
        ({"keep_first_invalid": True}, 0.5),
        ({"asynchronous": True}, 0.5),
        ({"asynchronous": True, "keep_first_invalid": True}, 0.5),
    ],
    ids=str,
)
def test_dropping_a_draft_of_known_law_is_biased_and_keeping_it_is_not(
    options: dict[str, bool], share: float
) -> None:
    """V1.7, losslessness: p = (.5, .5, 0), q = (.2, .3, .5); 0.45 is 6 standard errors off."""
    table = toy_table(["a", "b", "x"])
    q, count = [0.2, 0.3, 0.5, 0.0], 4000
    toy = Toy(table, says(table, ""), says(table, ""), sampling=Sampling(temperature=1.0))
    strategy = Vllm(Vllm.Options(probabilistic=True, **options), toy.setup)
    matcher = LoggedMatcher(toy, GrammarSpec.regex("[ab]{4}"))
    drawn = [token for token in range(3) for _ in range(round(q[token] * count))]
    step = step_of(
        strategy, [matcher] * count, [Proposal([token], q=torch.tensor([q])) for token in drawn]
    )
    for proposal in step.proposals:
        strategy.trim(proposal, matcher)
    strategy.verify_rows(step)
    assert not any(sequence.error for sequence in step.sequences)
    rows = sum(1 + len(proposal.tokens) for proposal in step.proposals)
    verdicts = strategy.verify(step, torch.zeros(rows, len(table)))
    found = sum(verdict.emitted[0] == 0 for verdict in verdicts) / count
    assert found == pytest.approx(share, abs=0.02)
