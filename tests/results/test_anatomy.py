"""One request step by step, in tables and figures."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.core import Fate
from harness.errors import ConfigError
from harness.results.anatomy import (
    drafts_that,
    in_code,
    own_token,
    rows_of,
    step_table,
    token_names,
)
from harness.results.anatomy_figures import drafts_by_step, steps_on_a_clock
from harness.results.record import Recorder
from tests.results import prefill, verify

TEXTS = {1: "{", 2: '"a', 3: " b", 4: "}", 5: "|", 6: "`", 7: "x"}

TIMES = {"draft_us": 300.0, "verify_us": 600.0, "grammar_us": 80.0, "host_us": 20.0}


@pytest.fixture
def steps():
    recorder = Recorder()
    recorder.steps += [
        prefill("plain", "a", 0, **TIMES),
        verify("plain", "a", 1, 1, held=1, **TIMES),
        verify("plain", "a", 2, 2, held=2, **TIMES),
        verify("vllm", "a", 1, 1, (1, 1, 2, 0), trimmed=1, held=1, trimmed_ids=[4], **TIMES),
        prefill("vllm", "a", 0, **TIMES),
        prefill("vllm", "b", 2),
    ]
    recorder.steps[3].draft_ids, recorder.steps[3].emitted_ids = [1, 2, 3, 4], [1, 7]
    recorder.steps[3].jump_tokens, recorder.steps[3].jump_ids = 2, [2, 3]
    return recorder.frames()[0]


def row(steps, strategy, step):
    chosen = (steps["request"] == "a") & (steps["strategy"] == strategy) & (steps["step"] == step)
    (found,) = steps[chosen].to_dict("records")
    return found


def test_what_ignores_the_grammar_is_left_out(steps):
    ceiling = steps.iloc[:1].assign(strategy="unguided")
    kept = rows_of(pd.concat([steps, ceiling]), "a")
    assert list(kept["strategy"].unique()) == ["plain", "vllm"]
    assert set(kept["request"]) == {"a"}


def test_an_unknown_request_is_refused_with_those_that_there_are(steps):
    with pytest.raises(ConfigError, match="request: 'c' is not in this run; name one of a, b"):
        rows_of(steps, "c")


def test_each_draft_is_listed_by_its_fate(steps):
    step = row(steps, "vllm", 1)
    assert [drafts_that(step, fate) for fate in (Fate.ACCEPTED, Fate.REJECTED_MODEL)] == [
        [1],
        [2, 3],
    ]
    assert drafts_that(step, Fate.REJECTED_GRAMMAR) == [4]
    assert own_token(step) == [7]


def test_a_step_that_ends_on_a_draft_has_no_own_token(steps):
    step = {**row(steps, "vllm", 1), "emitted_ids": [1]}
    assert own_token(step) == []


def test_the_table_has_the_columns_in_which_something_happened(steps):
    plain = step_table(rows_of(steps, "a"), "plain", TEXTS)
    assert plain.headers == ("step", "own token", "advanced", "held", "ms")
    assert plain.rows[1] == ("1", "`x`", "1", "2", "1.00")
    vllm = step_table(rows_of(steps, "a"), "vllm", TEXTS)
    assert vllm.title == "vllm"
    assert dict(zip(vllm.headers, vllm.rows[1], strict=True)) == {
        "step": "1",
        "jumped": '`"a` `␣b`',
        "accepted": "`{`",
        "target disagreed": '`"a` `␣b`',
        "illegal": "`}`",
        "trimmed": "`}`",
        "own token": "`x`",
        "advanced": "6",
        "rolled back": "4 preview",
        "held": "3",
        "ms": "1.00",
    }


def test_code_shows_white_space_and_leaves_padding_out():
    assert in_code([3, -1, 6], TEXTS) == "`␣b` `ˋ`"


def test_bytes_that_are_no_text_have_a_sign():
    tokens = {"texts": {"5": "\udce2\udc80", "6": "é"}, "special": {"0": "<|end|>"}}
    assert token_names(tokens) == {0: "<|end|>", 5: "�", 6: "é"}


def test_bars_are_gains_above_the_line_and_losses_below(steps):
    figure = drafts_by_step(rows_of(steps, "a"))
    vllm = figure.axes[1]
    bars = [bar for bars in vllm.containers for bar in bars if bar.get_height()]
    gains = [bar.get_height() for bar in bars if bar.get_height() > 0]
    losses = [bar.get_height() for bar in bars if bar.get_height() < 0]
    assert gains == [2, 1, 1]  # jumped, accepted, the target's own
    assert losses == [-2, -1, -1]  # the target disagreed, illegal, trimmed
    ends = [bar.get_y() + bar.get_height() for bar in bars]
    assert (max(ends), min(ends)) == (4, -4)
    assert vllm.get_title(loc="left") == "vllm: 4 tokens in 1 step"


def test_a_lane_is_as_long_as_the_steps_took(steps):
    figure = steps_on_a_clock(rows_of(steps, "a"))
    notes = [text.get_text().strip() for text in figure.axes[0].texts]
    assert notes == ["2.0 ms, 2 tokens", "1.0 ms, 4 tokens"]
    assert "vllm is done first: 1.0 ms, plain last" in figure.axes[0].get_title(loc="left")
    assert "(ms)" in figure.axes[0].get_xlabel()
