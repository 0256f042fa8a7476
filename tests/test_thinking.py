"""Items that think, end to end: a workload file, a pair of real models, every strategy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

import pandas as pd
import pytest

import strategies
from harness.cli import main
from tests.tiny_pair import save_pair

PROMPTS = ("A number?", "What?", "Hm", "Name a color")
ITEMS = [
    {"id": prompt, "prompt": prompt, "regex": "[0-9]{2,4}", "thinking": True} for prompt in PROMPTS
]
GUIDED = sorted(set(strategies.registry()) - {"unguided"})

Compare = Callable[..., pd.DataFrame]


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Run all strategies on the items; the rows of their outputs."""
    folder = tmp_path_factory.mktemp("thinking")
    target, draft = save_pair(folder)
    workload = folder / "items.jsonl"
    workload.write_text("\n".join(map(json.dumps, ITEMS)))

    def run(name: str, *arguments: str) -> pd.DataFrame:
        given = {
            "runs": folder / name,
            "pair.target": target,
            "pair.draft": draft,
            "pair.device": "cpu",
            "workload": "file",
            "workload.path": workload,
            "workload.max_new_tokens": 40,
        }
        with pytest.MonkeyPatch.context() as patch:
            settings = [f"{key}={value}" for key, value in given.items()]
            patch.setattr(sys, "argv", ["harness", *arguments, *settings])
            main()
        (path,) = (folder / name).iterdir()
        return pd.read_parquet(path / "requests.parquet").set_index("request")

    return run


@pytest.fixture(scope="module")
def free(compare: Compare) -> dict[str, str]:
    """What the target writes if nobody tells it what."""
    texts: dict[str, str] = compare("free", "+strategy=unguided").text.to_dict()
    return texts


@pytest.fixture(scope="module")
def marker(free: dict[str, str]) -> str:
    """Two letters, so two tokens, that the target writes by itself, but not at once."""
    found = re.search("(?<=.{4})[A-Z]{2}", free["What?"], re.DOTALL)
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def marked(compare: Compare, marker: str) -> pd.DataFrame:
    return compare("marked", f"workload.thinking_end='{marker}'")


@pytest.fixture(scope="module")
def forced(compare: Compare) -> pd.DataFrame:
    return compare("forced", "workload.thinking_budget=6")


@pytest.mark.parametrize("strategy", GUIDED)
def test_the_grammar_holds_behind_the_text_that_the_model_writes_by_itself(
    marked: pd.DataFrame, free: dict[str, str], marker: str, strategy: str
) -> None:
    """S4b, V1.5d: what stands before the marker is what the model writes anyway."""
    rows = marked[marked.strategy == strategy]
    assert not rows.error.any()
    assert rows.identical.dropna().all()
    text = rows.text["What?"]
    thoughts, end, answer = text.partition(marker)
    assert free["What?"].startswith(thoughts + end)
    assert re.fullmatch("[0-9]{2,4}", answer)
    assert rows.valid["What?"]


@pytest.mark.parametrize("strategy", GUIDED)
def test_a_spent_budget_ends_the_thinking(
    forced: pd.DataFrame, free: dict[str, str], strategy: str
) -> None:
    """S4e: six tokens are the model's own, then the default marker is forced."""
    rows = forced[forced.strategy == strategy]
    assert not rows.error.any()
    assert rows.identical.dropna().all()
    assert rows.valid.astype(bool).all()
    for request, text in rows.text.items():
        thoughts, _, answer = text.partition("</think>")
        assert free[request].startswith(thoughts.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert re.fullmatch("[0-9]{2,4}", answer)
    assert (rows.output_tokens <= 6 + len("</think>") + 4 + 1).all()


def test_an_output_that_was_cut_while_thinking_is_not_judged(marked: pd.DataFrame) -> None:
    cut = marked[(marked.finish == "length") & (marked.strategy != "unguided")]
    assert len(cut)
    assert cut.valid.isna().all()
