"""Run folders of toy models, small and of the largest size that a page has to carry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.core import StepTrace
from harness.grammar.matcher import TokenTable
from harness.grammar.spec import GrammarSpec
from harness.results.record import Recorder, RunFolder
from harness.results.viewer.tokens import token_texts, used_ids
from tests.results import prefill, request as request_row, verify
from tests.toys import Law, Toy, ToyCodec, request, toy_table

TABLE = toy_table(["p", "a", "b", "c", "d", "x", " ", "\n", "ab", "é", "a\tb"])
GRAMMARS = {
    "choice": GrammarSpec.choice(["ab\nc", "ab\nd"]),
    "regex": GrammarSpec.regex("a[bé ]+c"),
}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "vllm": {},
    "trtllm": {},
    "sglang": {"tree_width": 2, "hold_back_last": 1},
}


class NamingCodec(ToyCodec):
    """Spells special tokens out, as a real tokenizer does."""

    def decode(self, tokens: Any) -> str:
        return "".join(
            "<|end|>" if token in self.table.stop_ids else self.table.tokens[token].decode()
            for token in tokens
        )


def wants(*ranking: str) -> Law:
    """A model that prefers these tokens, in turn."""

    def law(tokens: tuple[int, ...]) -> list[float]:
        scores = [-float(token) for token in range(len(TABLE))]
        for place, text in enumerate(ranking):
            token = TABLE.eos_id if text == "$" else TABLE.ids_by_bytes[text.encode()]
            scores[token] = 3.0 - (len(tokens) - 1 - place) % len(ranking)
        return scores

    return law


def toy_run(path: Path, detail: bool = True) -> RunFolder:
    """Two requests under four strategies, with drafts that die of everything."""
    recorder = Recorder()
    for name, options in STRATEGIES.items():
        toy = Toy(TABLE, wants("a", "b", "\n", "$"), wants("a", "b", "x", "c"), detail=detail)
        asked = [request(TABLE, each, kind, max_new_tokens=12) for kind, each in GRAMMARS.items()]
        watch = toy.run(toy.strategy(name, **options), asked)
        recorder.steps += watch.steps
        recorder.requests += watch.request_traces(name)
    return write(path, recorder, TABLE)


def write(path: Path, recorder: Recorder, table: TokenTable) -> RunFolder:
    """The files that the viewer reads."""
    folder = RunFolder.create(path)
    steps, requests = recorder.frames()
    folder.write_manifest({})
    folder.write_summary({})
    folder.write_frames(steps, requests)
    folder.write_tokens(token_texts(table, NamingCodec(table), used_ids(steps)))
    return folder


def large_run(
    path: Path, strategies: int = 7, requests: int = 300, tokens: int = 100, vocab: int = 50_000
) -> RunFolder:
    """A detailed run whose numbers are noise, which compresses worse than real ones."""
    table = toy_table(f"t{token}" for token in range(vocab - 1))
    rng, recorder = np.random.default_rng(0), Recorder()
    names = [f"strategy{i}" for i in range(strategies)]
    for name in names:
        for number in range(requests):
            who = f"request-{number}"
            recorder.requests.append(request_row(name, who, [7] * tokens))
            recorder.steps.append(prefill(name, who, 0, legal=[9], emitted_p=[0.5]))
            emitted = 1
            while emitted < tokens:
                trace = _noise(rng, name, who, vocab, len(recorder.steps))
                recorder.steps.append(trace)
                emitted += trace.emitted
    return write(path, recorder, table)


def _noise(
    rng: np.random.Generator, name: str, who: str, vocab: int, step: int, drafts: int = 4
) -> StepTrace:
    """A step with four drafts, zero to three of them accepted; ids are as uneven as words are."""
    accepted = int(rng.integers(0, 4))
    ids = [int(token) % (vocab - 1) for token in rng.zipf(1.3, drafts + 1)]
    law = rng.random(2 * drafts + 1) ** 2
    return verify(
        name,
        who,
        step,
        step,
        (accepted, 1, drafts - accepted - 1, 0),
        draft_ids=ids[:drafts],
        emitted_ids=[*ids[:accepted], ids[-1]],
        draft_p=law[:drafts].tolist(),
        draft_q=law[drafts:-1].tolist(),
        emitted_p=[*law[:accepted], law[-1]],
        legal=[int(n) for n in rng.choice([1, 3, 97, 2210, 48_011], drafts + 1)],
        draft_us=float(rng.uniform(800, 1200)),
        verify_us=float(rng.uniform(2800, 3300)),
        grammar_us=float(rng.uniform(20, 300)),
        exposed_us=float(rng.uniform(0, 50)),
        host_us=float(rng.uniform(80, 150)),
    )
