"""The settings of the studies, and how their commands end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import engine_limits
from experiments.study import Study
from harness.errors import EXIT_BAD_INPUT, ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("slot=1", "slot: no such setting; name one of slots, draft, limit_s, alarm, out"),
        ("slots=x", "slots: 'x' is no whole number; give one such as 1,8"),
        ("slots=", "slots: '' is no whole number"),
        ("slots=1,", "slots: '1,' is no whole number"),
        ("slots=1.5", "slots: '1.5' is no whole number"),
        ("slots=-1", "slots: '-1' is no whole number"),
        ("limit_s=x", "limit_s: 'x' is no number; give one such as 90.0"),
        ("alarm=x", "alarm: 'x' is no number; give one such as 1e-6"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(tmp_path: Path, word: str, message: str) -> None:
    out = tmp_path / "study"
    defaults = {"slots": "1,8", "draft": "tiny", "limit_s": "90.0", "alarm": "1e-6"}
    with pytest.raises(ConfigError) as told:
        Study.begin("study", [word, f"out={out}"], defaults)
    assert message in str(told.value)
    assert not out.exists()


def test_words_are_words_and_numbers_may_be_several(tmp_path: Path) -> None:
    words = ["slots=4", "draft=7", "limit_s=2", f"out={tmp_path}"]
    defaults = {"slots": "1,8", "draft": "tiny", "limit_s": "0.5"}
    settings = Study.begin("s", words, defaults).settings
    assert settings == {"slots": "4", "draft": "7", "limit_s": "2"}


@pytest.mark.parametrize("module", ["grammar_threads", "losslessness", "faults"])
def test_a_study_ends_in_one_line_and_exit_2_where_the_user_can_correct_it(
    module: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", "nonsense=1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == EXIT_BAD_INPUT
    assert ended.stderr.startswith("error: nonsense: no such setting")
    assert len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_engine_limits_without_plain_has_nothing_to_compare_with() -> None:
    figures = dict.fromkeys(
        ("tok_s", "mean_accept_len", "ideal_tok_s", "efficiency", "prefill_share"), 1.0
    ) | dict.fromkeys(("draft_us", "verify_us", "grammar_us", "exposed_us", "host_us"), 1.0)
    study = {
        "strategies": {"vllm": [figures]},
        "bare_us": {},
        "reference": None,
        "setup_s": 1.0,
        "facts": {"graphs": 0, "peak_memory_mib": None},
    }
    (row,) = engine_limits.as_table(1, study).rows
    assert row[:4] == ("vllm", "1", "1–1", "–")
