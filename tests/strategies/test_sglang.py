"""The worked examples of spec/sglang.md: jump-forward and the search over a draft tree."""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from harness.core import PAD, Finish, Proposal, Sequence
from harness.errors import ConfigError
from harness.grammar.matcher import TokenTable
from harness.grammar.spec import GrammarSpec
from harness.text import canonical_share
from strategies.sglang import Sglang
from tests.strategies.steps import LoggedMatcher, drafts, rows_of, says, step_of
from tests.toys import ENGINES, Toy, ToyCodec, Watch, random_law, request, toy_table

engines = pytest.mark.parametrize("engine", ENGINES)

# -- 2.1 jump-forward ---------------------------------------------------------------------------

PIECES = ["P:", "{", '"', "name", '":', '{"', "1", "2"]
NAMES = toy_table(PIECES)
FUSING = toy_table([*PIECES, "P:{"])
NAME = GrammarSpec.regex(r'\{"name":[12]')
QUOTE = GrammarSpec.regex(r'\{"[12]')


class Jump:
    """One sequence behind the prompt ``P:``, before and after ``before_step``."""

    def __init__(
        self,
        engine: str,
        grammar: GrammarSpec,
        output: str,
        table: TokenTable = NAMES,
        limit: int = 24,
        matcher: type[LoggedMatcher] = LoggedMatcher,
        **options: Any,
    ) -> None:
        toy = Toy(table, says(table, ""), says(table, ""), engine=engine)
        self.strategy = Sglang(Sglang.Options(**options), toy.setup)
        ids = drafts(table, output)
        self.matcher = matcher(toy, grammar, ids)
        self.sequence = Sequence(request(table, grammar, max_new_tokens=limit), 0, self.matcher)
        self.sequence.output_ids = list(ids)
        # The last sampled token has no keys and values yet (S1n).
        self.sequence.target_length = self.sequence.draft_length = len(ids)
        self.before = self.matcher.state()
        step = step_of(self.strategy, [self.matcher], [Proposal()])
        step.sequences = [self.sequence]
        self.strategy.before_step(step)
        assert self.sequence.error is None
        assert self.matcher.held == len(self.sequence.output_ids)
        self.jumped = step.jumped.get(0)
        self.output = " ".join(table.tokens[token].decode() for token in self.sequence.output_ids)


@engines
@pytest.mark.parametrize(
    ("grammar", "before", "after", "log", "cached", "jumped"),
    [
        (NAME, '{ "', '{" name ":', [-2, [5, 3, 4]], 1, (1, 2)),
        (NAME, '{"', '{" name ":', [[3, 4]], 1, (2, 0)),
        (QUOTE, "{", '{"', [-1, [5]], 1, (0, 1)),
        (NAME, '{" name "', '{" name ":', [-1, [4]], 3, (0, 1)),
    ],
)
def test_a_jump_encodes_everything_anew_and_the_matcher_follows(
    engine: str,
    grammar: GrammarSpec,
    before: str,
    after: str,
    log: list[list[int] | int],
    cached: int,
    jumped: tuple[int, int],
) -> None:
    """S1h, S1j, S1k: the worked examples (rollback, re-accept), and one of ours.

    The caches keep the prompt and the k common tokens, if they were there: the last one was not.
    """
    jump = Jump(engine, grammar, before)
    assert jump.output == after
    assert jump.matcher.log == log
    assert jump.jumped == (jump.sequence.jump_tokens, jump.sequence.retokenized) == jumped
    rolled_back = -sum(entry for entry in log if isinstance(entry, int))
    assert jump.matcher.ledger.rollback_tokens["retokenize"] == rolled_back
    assert jump.sequence.target_length == jump.sequence.draft_length == cached


@engines
def test_a_jump_that_fuses_the_prompts_last_token_is_refused(engine: str) -> None:
    """S1i: the vocabulary also has ``P:{``."""
    jump = Jump(engine, NAME, "{", FUSING)
    assert (jump.output, jump.matcher.log, jump.jumped) == ("{", [], (0, 0))


@engines
def test_a_prompt_that_is_not_canonical_never_shifts_the_output(engine: str) -> None:
    """S1i compares one token only: here it agrees, and the output would lose its first ``b``."""
    table = toy_table(["a", "b", "aa", "c", "d"])
    toy = Toy(table, says(table, ""), says(table, ""), engine=engine)
    strategy = Sglang(Sglang.Options(), toy.setup)
    matcher = LoggedMatcher(toy, GrammarSpec.regex("bcd|cd"), drafts(table, "b"))
    fields = {"prompt_ids": tuple(drafts(table, "a a b"))}
    sequence = Sequence(request(table, None, **fields), 0, matcher)
    sequence.output_ids = drafts(table, "b")
    assert matcher.forced_text() == "cd"
    assert strategy.jump(sequence, matcher) == (0, 0)
    assert sequence.output_ids == drafts(table, "b")


def test_a_prompt_whose_last_token_is_not_canonical_is_never_jumped_from() -> None:
    """S1i: its encoding ends in another token, though at the same place in the text."""
    table = toy_table(["a", "bc", "ab", "c", "1", "2"])
    toy = Toy(table, says(table, ""), says(table, ""))
    strategy = Sglang(Sglang.Options(), toy.setup)
    for prompt, jumped in (("a bc", None), ("ab c", drafts(table, "1 2"))):
        ids = tuple(drafts(table, prompt))
        assert strategy.retokenize(ids, drafts(table, "1"), "2") == jumped


@engines
@pytest.mark.parametrize(
    ("grammar", "output"),
    [
        (GrammarSpec.regex(r'\{"[12]'), '{"'),  # a choice
        (GrammarSpec.regex("1(12)?"), "1"),  # the output may end
        (GrammarSpec.regex("12"), "1 2"),  # it must
        (GrammarSpec.regex("12"), "1 2 $"),  # it did
    ],
)
def test_nothing_is_inserted_where_nothing_is_certain(
    engine: str, grammar: GrammarSpec, output: str
) -> None:
    """S1d."""
    jump = Jump(engine, grammar, output)
    assert (jump.matcher.log, jump.jumped) == ([], (0, 0))


@engines
@pytest.mark.parametrize(("min_chars", "jumps"), [(1, True), (6, True), (7, False)])
def test_forced_text_below_the_minimum_is_left_to_the_model(
    engine: str, min_chars: int, jumps: bool
) -> None:
    """S1c: ``name":`` has 6 characters."""
    assert (Jump(engine, NAME, '{"', min_chars=min_chars).output != '{"') is jumps


@engines
@pytest.mark.parametrize(("min_chars", "jumps"), [(1, True), (2, False)])
def test_outlines_wants_more_than_one_character_and_xgrammar_does_not(
    engine: str, min_chars: int, jumps: bool
) -> None:
    """S1c."""
    assert (Jump(engine, QUOTE, "{", min_chars=min_chars).output != "{") is jumps


@engines
@pytest.mark.parametrize(
    ("held_back", "after"),
    [(0, '{" name ":'), (1, '{" name'), (2, '{"'), (3, '{"'), (9, '{"')],
)
def test_the_last_tokens_of_a_jump_can_be_left_to_the_model(
    engine: str, held_back: int, after: str
) -> None:
    """S1p. Nothing new left, no jump: an output never gets shorter."""
    jump = Jump(engine, NAME, '{"', hold_back_last=held_back)
    assert jump.output == after
    assert jump.jumped == (len(after.split()) - 1, 0)


@engines
@pytest.mark.parametrize(("limit", "after"), [(2, '{ "'), (3, '{ "'), (4, '{" name ":')])
def test_a_jump_leaves_room_for_the_targets_own_token(engine: str, limit: int, after: str) -> None:
    """S1o: upstream may overshoot ``max_new_tokens``; here it may not."""
    assert Jump(engine, NAME, '{ "', limit=limit).output == after


@engines
def test_jump_forward_can_be_switched_off(engine: str) -> None:
    """S1b."""
    jump = Jump(engine, NAME, '{"', jump_forward=False)
    assert (jump.output, jump.jumped) == ('{"', None)


class Stubborn(LoggedMatcher):
    """Refuses the token ``{"``, as an engine may that follows another tokenisation."""

    def accept(self, tokens: SequenceOf[int]) -> bool:
        return 5 not in tokens and super().accept(tokens)


@engines
def test_a_jump_that_the_grammar_refuses_leaves_everything_as_it_was(engine: str) -> None:
    """S1k: upstream raises."""
    jump = Jump(engine, NAME, '{ "', matcher=Stubborn)
    assert (jump.output, jump.jumped) == ('{ "', (0, 0))
    assert jump.matcher.log == [-2, [1, 2]]
    assert jump.matcher.state() == jump.before
    assert jump.matcher.ledger.held == jump.matcher.held


def retokenized(
    table: TokenTable, output: list[int], forced: str, **options: Any
) -> list[int] | None:
    toy = Toy(table, says(table, ""), says(table, ""))
    return Sglang(Sglang.Options(**options), toy.setup).retokenize((0,), output, forced)


BYTES = TokenTable((b"P", b"\xc3", b"\xa9", b"a", "é".encode(), b""), frozenset({5}), 5)


def test_an_output_that_ends_inside_a_character_is_not_encoded() -> None:
    """S1g, R16; and the output stays what it was (upstream's alias bug kept the new ids)."""
    output = [1]
    assert retokenized(BYTES, output, "a") is None
    assert output == [1]
    assert retokenized(BYTES, [1, 2], "a") == [4, 3]


def test_a_held_back_token_does_not_split_a_character() -> None:
    """S1d, S1p: the text of a jump is whole characters."""
    split = TokenTable((b"P", b"\xc3", b"\xa9", b"a", b""), frozenset({4}), 4)
    assert retokenized(split, [3], "aé") == [3, 3, 1, 2]
    assert retokenized(split, [3], "aé", hold_back_last=1) is None
    assert retokenized(split, [3], "aé", hold_back_last=2) == [3, 3]


def test_new_ids_that_are_a_prefix_of_the_old_ones_are_no_jump() -> None:
    """Upstream defect (b) raises IndexError there."""
    assert retokenized(NAMES, drafts(NAMES, '{" name'), "", hold_back_last=1) is None


def law_of_names(tokens: tuple[int, ...]) -> list[float]:
    """Says ``{``, then 2 behind just the canonical tokens of ``{"name":``, else 1; then ends."""
    answers = {(0,): "{", tuple(drafts(NAMES, 'P: {" name ":')): "2"}
    answer = answers.get(tokens, "$" if tokens[-1] in drafts(NAMES, "1 2") else "1")
    return [float(token == drafts(NAMES, answer)[0]) for token in range(len(NAMES))]


@engines
@pytest.mark.parametrize("width", [1, 2])
def test_forced_text_is_in_the_output_and_in_both_caches(engine: str, width: int) -> None:
    """S1j, S1l, S1n: changed ids truncate the caches, the new ids are fed."""
    toy = Toy(NAMES, law_of_names, law_of_names, engine=engine)
    watch = toy.run(toy.strategy("sglang", tree_width=width), [request(NAMES, NAME)])
    assert not watch.errors
    assert watch.outputs == {"r": drafts(NAMES, '{" name ": 2 $')}
    assert canonical_share(NAMES, ToyCodec(NAMES), watch.outputs["r"]) == 1.0
    done, (prefill, jump) = watch.done["r"], watch.steps
    assert (done.jump_tokens, done.retokenized) == (2, 1)
    assert (prefill.jump_tokens, jump.jump_tokens, jump.retokenized) == (0, 2, 1)
    assert (jump.rollback_retokenize_calls, jump.rollback_retokenize_tokens) == (1, 1)
    assert jump.held == len(done.output_ids) == 5


TOTAL = ["P", "{", "total", "=", "=2", "2", "14", "0000", "}"]
FOLLOWS = {"P": "{", "{": "total", "total": "=2", "=2": "14", "14": "0000", "0000": "}"}


def trained(tokens: tuple[int, ...]) -> list[float]:
    """A model that has only met ``=2`` in one token: behind a bare ``=`` it says 2 and ends."""
    table = toy_table(TOTAL)
    unseen = {"=": "2", "2": "}", "}": "$"}
    word = {**FOLLOWS, **unseen}[table.tokens[tokens[-1]].decode() or "}"]
    return [float(token == drafts(table, word)[0]) for token in range(len(table))]


@engines
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"jump_forward": False}, "{total=2140000}"),
        ({"hold_back_last": 1}, "{total=2140000}"),
        ({"hold_back_last": 0}, "{total=2}"),  # SGLang's own behaviour: SGL #2045
    ],
    ids=str,
)
def test_a_value_survives_a_jump_that_holds_back_its_mergeable_end(
    engine: str, options: dict[str, Any], text: str, width: int
) -> None:
    """R15, S1p."""
    table = toy_table(TOTAL)
    toy = Toy(table, trained, trained, engine=engine)
    grammar = GrammarSpec.regex(r"\{total=[0-9]+\}")
    watch = toy.run(toy.strategy("sglang", tree_width=width, **options), [request(table, grammar)])
    assert not watch.errors
    assert ToyCodec(table).decode(watch.outputs["r"]) == text
    assert (watch.done["r"].jump_tokens > 0) is options.get("jump_forward", True)


@engines
@pytest.mark.parametrize("limit", range(1, 10))
def test_no_jump_goes_past_the_length_limit(engine: str, limit: int) -> None:
    """S1o; and what is emitted is a prefix of something legal (property 3)."""
    table = toy_table(TOTAL)
    toy = Toy(table, trained, trained, engine=engine)
    grammar = GrammarSpec.regex(r"\{total=[0-9]+\}")
    watch = toy.run("sglang", [request(table, grammar, max_new_tokens=limit)])
    done = watch.done["r"]
    assert done.error is None
    assert len(done.output_ids) == min(limit, 6)
    assert done.finish is (Finish.STOP if limit >= 6 else Finish.LENGTH)
    assert done.matcher is not None
    assert done.matcher.held == len(done.output_ids)


# -- 2.2 verification with a grammar --------------------------------------------------------------

DIGITS = toy_table(["1", "2", "3", "4", "5", "7", "9"])
FORK = GrammarSpec.regex("12(3|4)")
NODES = drafts(DIGITS, "2 9 3 4 7 $ 5")
PARENTS = [-1, -1, 0, 0, 0, 2, 5]
"""The worked tree; its node i + 1 is our node i, since the root is no draft."""

TREE_ROWS = ["2", "3 4", "ALL", "$", "$", "ALL", "ALL", "ALL"]
TWO, THREE, FOUR, EOS = (drafts(DIGITS, text) for text in ("2", "3", "4", "$"))


def searched(
    engine: str, before: str, tokens: list[int], parents: list[int] | None
) -> tuple[Sglang, LoggedMatcher, Any]:
    """A strategy, a matcher and a step whose rows are filled; the search must leave no trace."""
    width = 1 if parents is None else 2
    toy = Toy(DIGITS, says(DIGITS, ""), says(DIGITS, ""), engine=engine, draft_tokens=7)
    strategy = Sglang(Sglang.Options(tree_width=width), toy.setup)
    matcher = LoggedMatcher(toy, FORK, drafts(DIGITS, before))
    state = matcher.state()
    step = step_of(strategy, [matcher], [Proposal(tokens, parents)])
    strategy.verify_rows(step)
    assert matcher.state() == state  # S2d
    return strategy, matcher, step


@engines
def test_the_search_visits_legal_nodes_and_pairs_each_accept_with_a_rollback(engine: str) -> None:
    """S2b-d: the worked tree, its rows 0 to 7 and its log."""
    strategy, matcher, step = searched(engine, "1", NODES, PARENTS)
    assert rows_of(strategy, step) == TREE_ROWS
    assert matcher.log == [TWO, THREE, EOS, -1, -1, FOUR, -1, -1]
    assert step.proposals[0].legal == [True, False, True, True, False, True, False]
    ledger = matcher.ledger
    assert ledger.rollback_calls["preview"] == ledger.rollback_tokens["preview"] == 4


@engines
@pytest.mark.parametrize(
    ("before", "draft", "rows"),
    [
        ("1", "2 3 $ 5", ["2", "3 4", "$", "ALL", "ALL"]),  # a row behind EOS would crash (R9)
        ("1", "2 9 3", ["2", "3 4", "ALL", "ALL"]),
        ("1", "9 2", ["2", "ALL", "ALL"]),
        ("1", "", ["2"]),
        ("1 2 3", "$", ["$", "ALL"]),
        ("1 2 3 $", "5 5", ["ALL", "ALL", "ALL"]),  # a terminated root fills nothing (R9)
    ],
)
def test_a_chain_is_a_tree_of_one_branch(
    engine: str, before: str, draft: str, rows: list[str]
) -> None:
    """S2a, S2c, Q10."""
    strategy, _, step = searched(engine, before, drafts(DIGITS, draft), None)
    assert step.sequences[0].error is None
    assert rows_of(strategy, step) == rows


@engines
def test_a_node_outside_the_vocabulary_is_illegal(engine: str) -> None:
    """S2b, R3: the engine is never asked about it."""
    strategy, matcher, step = searched(engine, "1", [len(DIGITS), PAD, *TWO], [-1, -1, -1])
    assert rows_of(strategy, step) == ["2", "ALL", "ALL", "3 4"]
    assert matcher.log == [TWO, -1]


@engines
def test_a_sequence_without_a_grammar_keeps_unmasked_rows(engine: str) -> None:
    """S2e."""
    toy = Toy(DIGITS, says(DIGITS, ""), says(DIGITS, ""), engine=engine)
    strategy = Sglang(Sglang.Options(tree_width=2), toy.setup)
    matcher = LoggedMatcher(toy, FORK, drafts(DIGITS, "1"))
    free, bound = (Proposal(drafts(DIGITS, "2 9"), [-1, -1]) for _ in range(2))
    step = step_of(strategy, [None, matcher], [free, bound])
    strategy.verify_rows(step)
    assert rows_of(strategy, step) == ["ALL", "ALL", "ALL", "2", "3 4", "ALL"]


@engines
@pytest.mark.parametrize("fills", range(4))
def test_a_search_is_rolled_back_when_the_engine_breaks(engine: str, fills: int) -> None:
    """Mutant: preview not rolled back when an exception occurs, at any depth."""
    toy = Toy(DIGITS, says(DIGITS, ""), says(DIGITS, ""), engine=engine, draft_tokens=4)
    strategy = Sglang(Sglang.Options(tree_width=2), toy.setup)
    broken, sound = (LoggedMatcher(toy, FORK, drafts(DIGITS, "1")) for _ in range(2))
    broken.fills_left = fills
    state = broken.state()
    proposals = [Proposal(list(NODES), PARENTS) for _ in range(2)]
    step = step_of(strategy, [broken, sound], proposals)
    strategy.verify_rows(step)
    assert step.sequences[0].error == "RuntimeError: the engine broke"
    assert broken.state() == state
    assert broken.ledger.held == broken.held
    assert rows_of(strategy, step)[8:] == TREE_ROWS


@engines
@pytest.mark.parametrize("width", [1, 2])
def test_the_output_ends_with_the_token_that_terminates_the_grammar(
    engine: str, width: int
) -> None:
    """S2i, S2l, S2m, R8: drafts behind EOS are neither emitted nor fed, EOS wins over length."""
    toy = Toy(DIGITS, says(DIGITS, "1 2 3 $ 5"), says(DIGITS, "1 2 3 $ 5"), engine=engine)
    watch = toy.run(
        toy.strategy("sglang", jump_forward=False, tree_width=width),
        [request(DIGITS, FORK, max_new_tokens=4), request(DIGITS, FORK, "long")],
    )
    for done in watch.done.values():
        assert done.output_ids == drafts(DIGITS, "1 2 3 $")
        assert (done.finish, done.error) == (Finish.STOP, None)
        assert done.matcher is not None
        assert done.matcher.held == 4


LETTERS = toy_table(["a", "b", "c", "ab", "bc", "abc", "d"])
REGEXES = ["(ab|c)*d", "[abcd]{2,7}", "abc(abd)?", "a(b|bc){1,4}"]


def run(engine: str, seed: int, **options: Any) -> tuple[Watch, dict[str, list[int]]]:
    """Hostile drafts: what the strategy emits, and what plain does."""
    toy = Toy(LETTERS, random_law(LETTERS, seed), random_law(LETTERS, seed + 50), engine=engine)
    requests = [request(LETTERS, GrammarSpec.regex(regex), regex) for regex in REGEXES]
    watch = toy.run(toy.strategy("sglang", **options), requests)
    assert not watch.errors
    return watch, toy.run("plain", requests).outputs


@engines
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_plains_and_the_matcher_follows_it(
    engine: str, width: int, seed: int
) -> None:
    """S2g, properties 2 and 6; each preview is one token (S2d)."""
    watch, plain = run(engine, seed, jump_forward=False, tree_width=width)
    assert watch.outputs == plain
    emitted = dict.fromkeys(plain, 0)
    for trace in watch.steps:
        emitted[trace.request] += trace.emitted
        assert trace.held == emitted[trace.request]
        assert trace.rollback_preview_calls == trace.rollback_preview_tokens
        assert trace.advanced == trace.emitted + trace.rollback_preview_tokens
        assert trace.rollback_rejected_calls == trace.rollback_retokenize_calls == 0
        assert trace.rows == 1 + len(trace.draft_ids)


@engines
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("hold_back_last", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_with_jumps_the_matcher_still_holds_the_output(
    engine: str, width: int, hold_back_last: int, seed: int
) -> None:
    """Property 6, S1k: emitted and inserted tokens together are what the matcher holds."""
    watch, _ = run(engine, seed, tree_width=width, hold_back_last=hold_back_last)
    held = dict.fromkeys(watch.outputs, 0)
    for trace in watch.steps:
        held[trace.request] += trace.emitted + trace.jump_tokens
        assert trace.held == held[trace.request]
        assert trace.rollback_retokenize_tokens == trace.retokenized
    for regex, output in watch.outputs.items():
        text = ToyCodec(LETTERS).decode(output)
        assert watch.done[regex].finish is not Finish.STOP or re.fullmatch(regex, text)


@engines
def test_a_dead_end_fails_its_own_request_only(engine: str) -> None:
    """No token begins with ``y``."""
    toy = Toy(LETTERS, says(LETTERS, "a b c d"), says(LETTERS, "a b d d"), engine=engine)
    requests = [
        request(LETTERS, GrammarSpec.regex(regex), name)
        for name, regex in (("first", "y"), ("later", "aby"), ("sound", "abcd"))
    ]
    watch = toy.run(toy.strategy("sglang", jump_forward=False, tree_width=2), requests)
    assert set(watch.errors) == {"first", "later"}
    assert watch.outputs["sound"] == drafts(LETTERS, "a b c d $")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("min_chars", 0),
        ("tree_width", 0),
        ("hold_back_last", -1),
        ("threshold_single", 0.0),
        ("threshold_acc", 1.5),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(option: str, value: float) -> None:
    toy = Toy(NAMES, says(NAMES, ""), says(NAMES, ""))
    with pytest.raises(ConfigError, match=option):
        toy.strategy("sglang", **{option: value})
