"""The peers beside the harness: generation by ``transformers`` under xgrammar, plain and assisted.

    python -m experiments.peers requests=32 limit=128

Decodes the requests of ``experiments.engine_limits`` at one slot, greedily, with
``model.generate``: without a draft and with the pair's draft as ``assistant_model``. In both the
grammar is a logits processor that replays the output so far (``ReplayingProcessor``). The
processor that ships with xgrammar goes through the same assisted generation, to record what
comes of it. Grammars are compiled outside the timed part. Prints tables and writes
``peers.json`` (and the tables as Markdown) below ``out``. Settings (``name=value``):
``requests``, ``limit`` (new tokens), ``whitespace``, ``passes``, ``out``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
import xgrammar
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from xgrammar.contrib.hf import LogitsProcessor as StockProcessor

from experiments import engine_limits
from experiments.study import Study, failure, run_study
from harness.config import Config
from harness.core import Request, longest_common_prefix
from harness.errors import HarnessError, MatcherError
from harness.grammar.matcher import CompiledGrammar, GrammarEngine, Whitespace
from harness.grammar.service import GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.vocabulary import token_table
from harness.models.checkpoint import logits_width
from harness.models.pair import Pair, load_pair
from harness.results.table import NONE, Table, print_tables
from harness.workloads.item import to_request
from harness.workloads.loaders import load

DEFAULTS = {
    "requests": "32",
    "limit": "128",
    "whitespace": "free",
    "passes": "1",
}
PEERS = {"transformers": False, "transformers, assisted": True}
"""By name, whether the pair's draft model assists."""

COLUMNS = {
    "tok_s": "output tokens / wall time, prefill included; median of the passes (1/s)",
    "range": "slowest and fastest pass (1/s)",
    "tokens": "output tokens, stop tokens included",
    "length": "output tokens per target forward, the prefill's included",
    "accepted": "accepted drafts / drafts; a draft that ends the output is not counted (%)",
    "same": "requests whose output is the one without a draft",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A request, its grammar, and that compiled."""

    request: Request
    spec: GrammarSpec
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class Bench:
    """What all peers share.

    Attributes:
        pair: its models run ``transformers``' own attention: no ``CausalLM`` is built on them.
        engine: that compiled the grammars.
        jobs: the requests that can be served.
        refused: by item, why it cannot.
    """

    pair: Pair
    engine: GrammarEngine
    jobs: list[Job]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True)
class Pass:
    """All jobs, one after the other.

    Attributes:
        outputs: by request id, the tokens, stop token included.
        seconds: wall time.
        forwards: of the target and of the draft, which makes one token in each of them.
    """

    outputs: dict[str, list[int]]
    seconds: float
    forwards: Counter[str]

    def figures(self) -> dict[str, float | None]:
        """What the pass comes to; each target forward emits one token of the target's own."""
        tokens = sum(map(len, self.outputs.values()))
        verified, drafted = self.forwards["target"], self.forwards["draft"]
        return {
            "tok_s": tokens / self.seconds,
            "tokens": tokens,
            "target_forwards": verified,
            "draft_forwards": drafted,
            "mean_accept_len": tokens / verified,
            "accept_rate": (tokens - verified) / drafted if drafted else None,
        }


class ReplayingProcessor(LogitsProcessor):  # type: ignore[misc]
    """Masks logits by the state that the output so far puts the grammar in, whatever came before.

    In assisted generation one processor serves both models: the assistant calls it draft by
    draft, then the verification calls it for each position of the candidates, from the first one
    on. So nothing may be concluded from the number of calls: the tokens that the matcher holds
    are compared with those that are given, rolled back to what both share, and advanced.

    Args:
        grammar: what the output must match.
        prompt_length: tokens that stand before the output.
    """

    def __init__(self, grammar: CompiledGrammar, prompt_length: int) -> None:
        self._matcher = grammar.matcher()
        self._prompt_length = prompt_length
        self._held: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask one position of each row, in place.

        Args:
            input_ids: ``[rows, prompt + output]``; behind a stop token stands padding.
            scores: fp32 ``[rows, vocab]``.

        Raises:
            MatcherError: the grammar does not allow the output.
        """
        mask = xgrammar.allocate_token_bitmask(*scores.shape)
        for row, output in enumerate(input_ids[:, self._prompt_length :].tolist()):
            self._follow(output)
            self._matcher.fill(mask, row)
        xgrammar.apply_token_bitmask_inplace(scores, mask.to(scores.device))
        return scores

    def _follow(self, output: list[int]) -> None:
        shared = longest_common_prefix(self._held, output)
        self._matcher.rollback(len(self._held) - shared)
        del self._held[shared:]
        for token in output[shared:]:
            if self._matcher.terminated:
                break
            if not self._matcher.accept([token]):
                raise MatcherError(f"token {token} is illegal behind {len(self._held)} others")
            self._held.append(token)


def main(arguments: list[str]) -> None:
    run = Study.begin("peers", arguments, DEFAULTS)
    study = measure(configuration(run.settings), int(run.settings["passes"]))
    tables = as_tables(study)
    print_tables(tables)
    run.write(tables, study)


def configuration(settings: dict[str, str]) -> Config:
    """The requests, grammars and models of ``experiments.engine_limits`` at one slot."""
    own = {name: settings[name] for name in ("requests", "limit", "whitespace")}
    return engine_limits.configuration(1, engine_limits.DEFAULTS | own)


def measure(config: Config, passes: int) -> dict[str, Any]:
    """Every peer's passes in turn, then the stock processor; ready for JSON.

    Args:
        config: pair, workload, grammar and draft length; of the engine nothing else counts.
        passes: timed ones. A first one over one request loads the kernels.
    """
    bench = prepare(config)
    for assisted in PEERS.values():
        decode_all(bench.pair, bench.jobs[:1], assisted)
    peers: dict[str, list[dict[str, float | None]]] = {name: [] for name in PEERS}
    outputs: dict[str, dict[str, list[int]]] = {}
    for _ in range(passes):
        for name, assisted in PEERS.items():
            done = decode_all(bench.pair, bench.jobs, assisted)
            peers[name].append(done.figures())
            outputs[name] = done.outputs
    plain, _ = outputs.values()
    return {
        "pair": bench.pair.name,
        "dtype": str(bench.pair.target.dtype).removeprefix("torch."),
        "device": str(bench.pair.target.device),
        "requests": len(bench.jobs),
        "refused": bench.refused,
        "draft_tokens": config.engine.draft_tokens,
        "peers": peers,
        "same_outputs": {
            name: sum(plain[request] == ids for request, ids in own.items())
            for name, own in outputs.items()
        },
        "stock_processor_assisted": Counter(stock_outcomes(bench, plain)),
    }


def prepare(config: Config) -> Bench:
    """Load the pair, compile the grammars, and let the draft draft ``engine.draft_tokens`` each
    time: ``transformers`` reads that from the assistant's own generation config.

    Raises:
        HarnessError: the pair or the workload cannot be loaded.
    """
    pair = load_pair(config.pair)
    assert pair.draft is not None, "peers are compared on a pair"
    pair.draft.generation_config = GenerationConfig(
        num_assistant_tokens=config.engine.draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,  # else drafting stops at the first unsure token
    )
    table = token_table(pair.tokenizer, pair.stop_ids)
    whitespace = cast(Whitespace, config.grammar.whitespace)
    engine = grammar_engine(config.grammar.engine, table, whitespace)
    service = GrammarService(engine)
    jobs: list[Job] = []
    refused: dict[str, str] = {}
    for item in load(config.workload, pair.tokenizer):
        try:
            if item.error:
                raise HarnessError(item.error)
            request = to_request(item, pair.tokenizer, config.workload.max_new_tokens, config.seed)
            assert request.grammar is not None, f"{request.id} asks for no grammar"
            grammar, _ = service.compile(request.grammar)
            jobs.append(Job(request, request.grammar, grammar))
        except HarnessError as error:
            refused[item.id] = str(error)
    return Bench(pair, engine, jobs, refused)


def decode_all(pair: Pair, jobs: Sequence[Job], assisted: bool) -> Pass:
    """Decode the jobs one after the other, timed; counting forwards costs well below 1 %."""
    forwards: Counter[str] = Counter()
    outputs: dict[str, list[int]] = {}
    assert pair.draft is not None
    with (
        pair.target.register_forward_pre_hook(lambda *_: forwards.update(["target"])),
        pair.draft.register_forward_pre_hook(lambda *_: forwards.update(["draft"])),
    ):
        start = perf_counter()
        for job in jobs:
            processor = ReplayingProcessor(job.grammar, len(job.request.prompt_ids))
            outputs[job.request.id] = decode(pair, job.request, processor, assisted)
        seconds = perf_counter() - start
    return Pass(outputs, seconds, forwards)


def decode(pair: Pair, request: Request, processor: LogitsProcessor, assisted: bool) -> list[int]:
    """Greedy output of ``model.generate``, stop token included."""
    prompt = torch.tensor([request.prompt_ids], device=pair.target.device)
    sequences = pair.target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(pair.stop_ids),
            pad_token_id=pair.tokenizer.eos_token_id,
        ),
        logits_processor=LogitsProcessorList([processor]),
        assistant_model=pair.draft if assisted else None,
    )
    return cast(list[int], sequences[0, len(request.prompt_ids) :].tolist())


def stock_outcomes(bench: Bench, expected: dict[str, list[int]]) -> list[str]:
    """What xgrammar's own processor does in assisted generation: one line for each request.

    Args:
        bench: grammars are compiled anew, as the processor's documentation says.
        expected: by request id, the output without a draft.
    """
    pair = bench.pair
    info = xgrammar.TokenizerInfo.from_huggingface(
        pair.tokenizer,
        vocab_size=logits_width(pair.target.config),
        stop_token_ids=sorted(pair.stop_ids),
    )
    compiler = xgrammar.GrammarCompiler(info)
    outcomes = []
    for job in bench.jobs:
        compiled = compiler.compile_json_schema(
            job.spec.text,
            any_whitespace=bench.engine.whitespace == "free",
            separators=bench.engine.separators,
        )
        try:
            output = decode(pair, job.request, StockProcessor(compiled), assisted=True)
        except Exception as error:  # whatever it is, it is what the study asks for
            outcomes.append(failure(error))
        else:
            same = output == expected[job.request.id]
            outcomes.append("the output without a draft" if same else "another output")
    return outcomes


def as_tables(study: dict[str, Any]) -> list[Table]:
    """The peers, medians over the passes; and the outcomes of the stock processor."""
    rows = []
    for name, passes in study["peers"].items():
        speeds, last = [each["tok_s"] for each in passes], passes[-1]
        cells = (
            f"{median(speeds):.0f}",
            f"{min(speeds):.0f}–{max(speeds):.0f}",
            str(last["tokens"]),
            f"{last['mean_accept_len']:.2f}",
            NONE if last["accept_rate"] is None else f"{100 * last['accept_rate']:.1f}",
            f"{study['same_outputs'][name]} of {study['requests']}",
        )
        rows.append((name, *cells))
    title = f"1 slot, K = {study['draft_tokens']}, {study['dtype']} on {study['device']}"
    peers = Table(title, ("peer", *COLUMNS), ("who decoded", *COLUMNS.values()), tuple(rows))
    stock = Table(
        title="xgrammar.contrib.hf.LogitsProcessor in assisted generation",
        headers=("outcome", "requests"),
        docs=("error, or output", "requests that ended so"),
        rows=tuple((what, str(n)) for what, n in study["stock_processor_assisted"].items()),
    )
    return [peers, stock]


if __name__ == "__main__":
    run_study(main)
