"""What the adapters accept of real instances, beside what the engines themselves accept.

    python -m experiments.grammar_instances

Every valid and invalid instance of JSONSchemaBench goes through its schema twice: token by token
through this project's matcher, the stop token last, and through the engine's own public API
(``GrammarMatcher`` of xgrammar, ``LLMatcher`` of llguidance) over a tokenizer that the engine has
read by itself. Both write JSON with one space behind ``,`` and ``:`` and none elsewhere (xgrammar:
``any_whitespace=False`` and these separators; llguidance: ``whitespace_flexible=False`` and these
separators), and so are the instances written, their properties in the order of the data set. Where
both compile a schema, a different answer is a fault of the adapter. What the adapter refuses to
compile though the engine would take it is refused for a reason (V1.6f, V1.6g), which is counted.

Prints a table by engine and split, the refusals, and each difference; writes
``grammar_instances.json`` (and the tables as Markdown) below ``out``; exits 1 if there is a
difference. Settings (``name=value``): ``engines``, ``limit`` (schemas; 0 = all), ``timeout_s`` (of
one compilation), ``processes``, ``out``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import llguidance
import llguidance.hf
import torch
import xgrammar

from experiments.study import Study, run_study
from harness.errors import GrammarError
from harness.grammar.service import GrammarConfig, GrammarService, grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.grammar.vocabulary import token_table
from harness.models.checkpoint import locate, read_tokenizer
from harness.results.table import NONE, Table, print_tables
from harness.workloads.loaders import WorkloadConfig, data_path
from tests.toys import ENGINES

DEFAULTS = {
    "engines": ",".join(ENGINES),
    "limit": "0",
    "timeout_s": "20.0",
    "processes": str(os.cpu_count()),
}
SEPARATORS = (", ", ": ")
COLUMNS = {
    "schemas": "of the data set",
    "ours": "schemas that the adapter compiles",
    "own": "schemas that the engine compiles by itself",
    "valid": "valid instances of schemas that both compile",
    "valid, ours": "accepted by the adapter",
    "valid, own": "accepted by the engine",
    "invalid": "invalid instances of these schemas",
    "invalid, ours": "accepted by the adapter",
    "invalid, own": "accepted by the engine",
    "dropped": "invalid instances that the engine accepts of schemas that the adapter refuses",
    "different": "instances with two answers: goal none",
}
Accepts = Callable[[str], bool]
"""Whether a whole text is an output of a grammar."""


@dataclass
class Finding:
    """One schema under one engine.

    Attributes:
        schema, kind, engine: which.
        refused, own_refused: why the adapter, or the engine itself, does not compile it.
        valid, invalid: by instance, whether the adapter and whether the engine accepts it; None
            where it did not compile.
    """

    schema: str
    kind: str
    engine: str
    refused: str = ""
    own_refused: str = ""
    valid: list[tuple[bool | None, bool | None]] = field(default_factory=list)
    invalid: list[tuple[bool | None, bool | None]] = field(default_factory=list)

    @property
    def comparable(self) -> bool:
        return not self.refused and not self.own_refused

    @property
    def different(self) -> int:
        return self.comparable * sum(ours != own for ours, own in (*self.valid, *self.invalid))


def main(arguments: Sequence[str]) -> None:
    study = Study.begin("grammar_instances", arguments, DEFAULTS)
    settings = study.settings
    records = read_records()[: int(settings["limit"]) or None]
    with ProcessPoolExecutor(
        int(settings["processes"]), get_context("forkserver"), partial(torch.set_num_threads, 1)
    ) as pool:
        findings = [
            finding
            for engine in settings["engines"].split(",")
            for finding in pool.map(
                partial(examine, engine=engine, timeout_s=float(settings["timeout_s"])), records
            )
        ]
    tables = [by_split(findings), by_reason(findings)]
    print_tables(tables)
    study.write(tables, {"findings": [asdict(finding) for finding in findings]})
    if different := [finding for finding in findings if finding.different]:
        for finding in different:
            print(f"{finding.engine} {finding.schema}: {finding.valid} {finding.invalid}")
        sys.exit("error: the adapter and its engine give different answers; see above")


def read_records() -> list[dict[str, Any]]:
    """The data set, in its order."""
    text = data_path(WorkloadConfig("jsonschemabench")).read_text()
    return [json.loads(line) for line in text.splitlines()]


def examine(record: dict[str, Any], engine: str, timeout_s: float) -> Finding:
    """Put all instances of a record through its schema, twice."""
    finding = Finding(record["id"], record["kind"], engine)
    ours = own = None
    try:
        ours = adapter(engine, record["schema"], timeout_s)
    except GrammarError as error:
        finding.refused = str(error)
    if "not compiled within" in finding.refused:
        finding.own_refused = "not asked: it would hang"
        return finding
    try:
        own = OWN[engine](record["schema"])
    except (RuntimeError, ValueError) as error:
        finding.own_refused = " ".join(str(error).split())
    for kind in ("valid", "invalid"):
        for instance in record[kind]:
            text = json.dumps(instance, ensure_ascii=False, separators=SEPARATORS)
            answers = (ours and ours(text), own and own(text))
            getattr(finding, kind).append(answers)
    return finding


def adapter(engine: str, schema: Any, timeout_s: float = 20.0) -> Accepts:
    """A schema through this project's engines.

    Raises:
        GrammarError: it is refused.
    """
    service = _service(engine, timeout_s)
    grammar, _ = service.compile(GrammarSpec.json_schema(schema))
    table = service.engine.table

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        tokens = [*tokenizer().encode(text, add_special_tokens=False), table.eos_id]
        return all(matcher.accept([token]) for token in tokens)

    return accepts


def own_xgrammar(schema: Any) -> Accepts:
    """A schema through xgrammar's own API.

    Raises:
        RuntimeError: xgrammar refuses it.
    """
    compiled = _xgrammar_compiler().compile_json_schema(
        json.dumps(schema, ensure_ascii=False), any_whitespace=False, separators=SEPARATORS
    )

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        tokens = [*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id]
        return all(matcher.accept_token(token) for token in tokens)

    return accepts


def own_llguidance(schema: Any) -> Accepts:
    """A schema through llguidance's own API.

    Raises:
        ValueError: llguidance refuses it.
    """
    item, key = SEPARATORS
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    wanted = {} if schema is True else schema
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps({**wanted, "x-guidance": options} if isinstance(wanted, dict) else wanted)
    )
    start = llguidance.LLMatcher(_llguidance_tokenizer(), grammar, log_level=0)
    if start.is_error():
        raise ValueError(start.get_error())

    def accepts(text: str) -> bool:
        matcher = start.deep_copy()
        tokens = tokenizer().encode(text, add_special_tokens=False)
        whole: bool = matcher.try_consume_tokens(tokens) == len(tokens)
        return whole and bool(matcher.is_accepting())

    return accepts


OWN: dict[str, Callable[[Any], Accepts]] = {
    "xgrammar": own_xgrammar,
    "llguidance": own_llguidance,
}


@cache
def tokenizer() -> Any:
    """The default pair's."""
    return read_tokenizer(locate("smollm2", "pair.target"), "pair.target")


@cache
def _service(engine: str, timeout_s: float) -> GrammarService:
    return GrammarService(
        grammar_engine(engine, token_table(tokenizer())), GrammarConfig(timeout_s=timeout_s)
    )


@cache
def _xgrammar_compiler() -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer())
    return xgrammar.GrammarCompiler(info, cache_enabled=False)


@cache
def _llguidance_tokenizer() -> Any:
    return llguidance.hf.from_tokenizer(tokenizer())


def by_split(findings: Sequence[Finding]) -> Table:
    """A row per engine and split, and one per engine for all."""
    kinds = list(dict.fromkeys(finding.kind for finding in findings))
    rows = []
    for engine in dict.fromkeys(finding.engine for finding in findings):
        group = [finding for finding in findings if finding.engine == engine]
        for kind in kinds:
            rows.append(_row(engine, kind, [each for each in group if each.kind == kind]))
        rows.append(_row(engine, "all", group))
    return Table(
        "Instances of JSONSchemaBench: accepted by the adapter, and by the engine itself",
        ("engine", "split", *COLUMNS),
        ("grammar engine", "of the data set", *COLUMNS.values()),
        tuple(rows),
    )


def _row(engine: str, kind: str, group: Sequence[Finding]) -> tuple[str, ...]:
    both = [finding for finding in group if finding.comparable]
    cells = [len(group), sum(not each.refused for each in group)]
    cells.append(sum(not each.own_refused for each in group))
    for name in ("valid", "invalid"):
        answers = [answer for each in both for answer in getattr(each, name)]
        cells += [len(answers), sum(bool(ours) for ours, _ in answers)]
        cells.append(sum(bool(own) for _, own in answers))
    only_own = [each for each in group if each.refused and not each.own_refused]
    cells.append(sum(bool(own) for each in only_own for _, own in each.invalid))
    cells.append(sum(each.different for each in group))
    return (engine, kind, *map(str, cells))


def by_reason(findings: Sequence[Finding]) -> Table:
    """Why adapters refuse what their engines compile."""
    reasons = Counter(
        (finding.engine, _sort(finding.refused))
        for finding in findings
        if finding.refused and not finding.own_refused
    )
    rows = tuple((engine, reason, str(count)) for (engine, reason), count in _sorted(reasons))
    return Table(
        "Schemas that only the engine itself compiles",
        ("engine", "the adapter's reason", "schemas"),
        ("grammar engine", "without what it quotes", "how many"),
        rows or ((NONE, NONE, "0"),),
    )


def _sorted(counts: Counter[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], int]]:
    yield from sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))


def _sort(reason: str) -> str:
    """A reason without what is particular to one schema."""
    return re.sub(r"'[^']*'|\$\.[^:]*", "…", reason.removeprefix("grammar.json_schema: "))


if __name__ == "__main__":
    run_study(main)
