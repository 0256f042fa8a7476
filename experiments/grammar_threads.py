"""What a step's grammar work takes on one thread and on several.

    python -m experiments.grammar_threads threads=1,2,4,8 slots=8,32

No model runs. A batch stands at random places of valid outputs of the workload's own schemas; each
step drafts the next ``DRAFT_TOKENS`` tokens of each output, so that all are legal and as much is
filled as ever, and emits ``EMITTED`` of them. Measured is vLLM's grammar section (trim, fill,
commit) as a run counts it, ``grammar_us``: the same steps for each number of threads, passes in
turn. Prints a table and writes ``grammar_threads.json`` (and the table as Markdown) below
``out``. Settings (``name=value``): ``threads``, ``slots``, ``engines``, ``workload`` (``bfcl`` or
``jsonschemabench``), ``whitespace``, ``steps``, ``passes``, ``out``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence as SequenceOf
from dataclasses import dataclass
from itertools import cycle
from random import Random
from statistics import median, quantiles
from typing import Any, cast

from experiments.study import Study, run_study
from harness.clock import Clock
from harness.core import Proposal, Request, Sequence, Verdict
from harness.drafters.model import ModelDrafter
from harness.errors import GrammarError
from harness.grammar.masks import MaskBuffer
from harness.grammar.matcher import CompiledGrammar, Whitespace
from harness.grammar.pool import GrammarPool
from harness.grammar.service import GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.tracked import TrackedMatcher
from harness.grammar.vocabulary import token_table
from harness.models.checkpoint import locate, read_tokenizer
from harness.models.pair import choose_device
from harness.models.sampling import Sampling
from harness.results.table import Table, print_tables
from harness.step import Step
from harness.text import HFCodec
from harness.workloads.loaders import WorkloadConfig, data_path
from strategies.base import Setup
from strategies.vllm import Vllm

DRAFT_TOKENS = 4
EMITTED = 3
DEFAULTS = {
    "threads": "1,2,4,8",
    "slots": "8,32",
    "engines": "xgrammar,llguidance",
    "workload": "bfcl",
    "whitespace": "free",
    "steps": "300",
    "passes": "5",
}
COLUMNS = {
    "slots": "sequences in the batch",
    "threads": "that fill the masks, the calling one included",
    "grammar": "grammar_us of a step; median of the steps of all passes (µs)",
    "p90": "the same, 90th percentile (µs)",
    "a sequence": "grammar / slots (µs)",
    "to one": "grammar / grammar on the first number of threads",
    "fill": "one mask fill; median (µs)",
}


@dataclass(frozen=True)
class Output:
    """A valid output of one grammar."""

    grammar: CompiledGrammar
    tokens: list[int]


class Place:
    """A sequence that walks through outputs, from random places of theirs, and its matcher."""

    def __init__(self, slot: int, outputs: SequenceOf[Output], clock: Clock) -> None:
        self._random, self._outputs, self._clock = Random(slot), outputs, clock
        self.sequence = Sequence(Request(f"slot {slot}", (0,), None, sys.maxsize), slot)
        self.fills: list[float] = []
        self._begin()

    def _begin(self) -> None:
        output = self._random.choice(self._outputs)
        self._tokens, self._at = output.tokens, self._random.randrange(len(output.tokens) - 5)
        matcher = output.grammar.matcher()
        assert matcher.accept(self._tokens[: self._at])
        self.sequence.matcher = TrackedMatcher(matcher, self._clock)

    @property
    def drafts(self) -> list[int]:
        return self._tokens[self._at : self._at + DRAFT_TOKENS]

    def move(self) -> None:
        """Count the fills, and begin another output where too little is left of this one."""
        assert self.sequence.error is None
        assert self.sequence.matcher is not None
        self.fills += self.sequence.matcher.take_fills()
        self._at += EMITTED
        if len(self._tokens) - self._at < DRAFT_TOKENS:
            self._begin()


class Script:
    """Stands for the draft model: it drafts what the outputs say."""

    def __init__(self, places: SequenceOf[Place]) -> None:
        self._places = places

    def free(self, *_: object) -> list[Proposal]:
        return [Proposal(place.drafts) for place in self._places]


def main(arguments: list[str]) -> None:
    study = Study.begin("grammar_threads", arguments, DEFAULTS)
    rows = list(measure(study.settings))
    table = as_table(rows, study.settings)
    print_tables([table])
    study.write([table], {"rows": rows})


def measure(settings: dict[str, str]) -> Iterator[dict[str, Any]]:
    """One row per engine, number of slots and number of threads."""
    tokenizer = read_tokenizer(locate("smollm2", "pair.target"), "pair.target")
    table = token_table(tokenizer)
    strategy = Vllm(Vllm.Options(), Setup(Sampling(), DRAFT_TOKENS, table, HFCodec(tokenizer)))
    threads = [int(count) for count in settings["threads"].split(",")]
    for name in settings["engines"].split(","):
        engine = grammar_engine(name, table, cast(Whitespace, settings["whitespace"]))
        outputs = list(valid_outputs(GrammarService(engine), HFCodec(tokenizer), settings))
        for slots in map(int, settings["slots"].split(",")):
            clock = Clock()
            pools = {count: GrammarPool(count, clock) for count in threads}
            times: dict[int, list[float]] = {count: [] for count in threads}
            fills: dict[int, list[float]] = {count: [] for count in threads}
            for count, _ in zip(cycle(threads), range(len(threads) * int(settings["passes"]))):
                places = [Place(slot, outputs, clock) for slot in range(slots)]
                times[count] += walk(strategy, places, pools[count], clock, int(settings["steps"]))
                fills[count] += [us for place in places for us in place.fills]
            for count in threads:
                yield {
                    "engine": name,
                    "outputs": len(outputs),
                    "slots": slots,
                    "threads": count,
                    "grammar_us": median(times[count]),
                    "grammar_us_p90": quantiles(times[count], n=10)[-1],
                    "to_one": median(times[count]) / median(times[threads[0]]),
                    "fill_us": median(fills[count]),
                }


def valid_outputs(
    service: GrammarService, codec: HFCodec, settings: dict[str, str], limit: int = 100
) -> Iterator[Output]:
    """Outputs of at least ten tokens that their grammar accepts, of the workload's first items."""
    for line in data_path(WorkloadConfig(settings["workload"])).read_text().splitlines():
        record = json.loads(line)
        value = record["instance"] if "instance" in record else next(iter(record["valid"]), None)
        tokens = codec.encode(json.dumps(value))
        try:
            grammar, _ = service.compile(GrammarSpec.json_schema(record["schema"]))
        except GrammarError:
            continue
        if len(tokens) >= 10 and grammar.matcher().accept(tokens):
            yield Output(grammar, tokens)
            limit -= 1
        if limit == 0:
            return


def walk(
    strategy: Vllm, places: list[Place], pool: GrammarPool, clock: Clock, steps: int
) -> list[float]:
    """The grammar time of each step, µs."""
    device = choose_device("auto")
    rows = MaskBuffer(len(places), 1 + DRAFT_TOKENS, len(strategy.setup.table), device)
    script = cast(ModelDrafter, Script(places))
    sequences, times = [place.sequence for place in places], []
    for _ in range(steps):
        rows.clear()
        step = Step(sequences, rows, rows, script, prefill=False, pool=pool)
        step.kept = [place.drafts[:EMITTED] for place in places]
        step.verdicts = [Verdict(kept, list(range(EMITTED - 1))) for kept in step.kept]
        clock.take()
        strategy.propose(step)
        strategy.verify_rows(step)
        strategy.commit(step)
        times.append(clock.take()["grammar"])
        for place in places:
            place.move()
    return times


def as_table(rows: list[dict[str, Any]], settings: dict[str, str]) -> Table:
    return Table(
        title=f"vllm's grammar work per step: {settings['workload']}, K = {DRAFT_TOKENS}",
        headers=("engine", *COLUMNS),
        docs=("grammar engine", *COLUMNS.values()),
        rows=tuple(
            (
                row["engine"],
                f"{row['slots']}",
                f"{row['threads']}",
                f"{row['grammar_us']:.0f}",
                f"{row['grammar_us_p90']:.0f}",
                f"{row['grammar_us'] / row['slots']:.1f}",
                f"{row['to_one']:.2f}",
                f"{row['fill_us']:.1f}",
            )
            for row in rows
        ),
    )


if __name__ == "__main__":
    run_study(main)
