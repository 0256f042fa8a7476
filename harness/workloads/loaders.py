"""Reads workloads from JSON Lines.

Your own file (``workload=file workload.path=...``) has one object per line, for example::

    {"id": "tag-1", "prompt": "Tag this: ...", "choice": ["bug", "feature"], "kind": "tags"}

``id``
    required, unique in the file
``prompt`` or ``messages``
    the user's words, or a list of ``{"role", "content"}``
``json_schema``, ``regex``, ``choice``, ``ebnf``
    the grammar, at most one of them (none = free text); see ``harness.grammar.spec.GrammarSpec``
``max_new_tokens``
    bound of this output; default: the workload's
``trigger``
    what starts the grammar, ``{"kind", "tokens", "bound", "text", "implicit", "budget"}``; see
    ``harness.grammar.gate.Trigger``
``thinking``
    true = the model thinks first: its output is free until it writes ``workload.thinking_end``,
    which is forced after ``workload.thinking_budget`` tokens, and the grammar starts behind that
``valid_regex``
    a regular expression that the whole output must match to count as valid
``kind``
    category in the results; default: the kind of the grammar, or ``text``
``smoke``
    true = part of a smoke test

A line that breaks these rules becomes an item with an ``error``; the others are served.
``mini`` is such a file, our own.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, RequestError
from harness.workloads.item import (
    THINKING_END,
    ChatTokenizer,
    Item,
    Thinking,
    derive_seed,
    prompt_ids,
)
from harness.workloads.records import (
    Record,
    bad_item,
    bfcl_item,
    jsonschemabench_item,
    own_item,
)

BUILDERS: dict[str, Callable[[Record], Item]] = {
    "mini": own_item,
    "bfcl": bfcl_item,
    "jsonschemabench": jsonschemabench_item,
    "file": own_item,
}
SOURCES = {
    "bfcl": "get the prompts from the PyPI package bfcl-eval",
    "jsonschemabench": "get the schemas from epfl-dlab/JSONSchemaBench on the Hugging Face hub",
}
SPLITS = ("train", "eval")


@dataclass
class WorkloadConfig:
    """Which items to run.

    Attributes:
        name: ``mini`` (ours), ``bfcl``, ``jsonschemabench`` or ``file``.
        path: the JSON Lines file. Needed by ``file``, refused by ``mini``; the others default
            to ``workloads/<name>.jsonl`` in ``$HARNESS_SHARED``, or else in ``../shared``.
        split: of ``bfcl``: ``eval``, or ``train``, which a draft may have been distilled on.
        kinds: categories to keep; None = all.
        smoke_only: keep the items marked ``smoke``; no effect on a workload that marks none.
        limit: number of items; None = all.
        seed: of the sample that ``limit`` takes; None = the first ones of the file.
        max_prompt_tokens: leave out items with a longer prompt; None = keep all.
        max_new_tokens: bound of the outputs of items that name none, thinking included.
        thinking_end: the text that ends the thinking of items with ``thinking``.
        thinking_budget: tokens of thinking after which its end is forced; None = none.

    Raises:
        ConfigError: a value is out of its range.
    """

    name: str = "mini"
    path: str | None = None
    split: str = "eval"
    kinds: list[str] | None = None
    smoke_only: bool = False
    limit: int | None = None
    seed: int | None = 0
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 96
    thinking_end: str = THINKING_END
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        if self.name not in BUILDERS:
            raise ConfigError(f"workload.name: {self.name!r} is none of {', '.join(BUILDERS)}")
        if self.split not in SPLITS:
            raise ConfigError(f"workload.split: {self.split!r} is none of {', '.join(SPLITS)}")
        for name in ("limit", "max_prompt_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"workload.{name}: {value} is below 1; raise it")
        if not self.thinking_end:
            raise ConfigError("workload.thinking_end: empty; give the text that ends thinking")
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise ConfigError(
                f"workload.thinking_budget: {self.thinking_budget} is negative; give 0 or more"
            )
        if self.name == "mini" and self.path:
            raise ConfigError("workload.path: mini has its own data; use workload=file")
        if self.name == "file" and not self.path:
            raise ConfigError("workload.path: missing; give the path of a JSON Lines file")


def load(config: WorkloadConfig, tokenizer: ChatTokenizer | None = None) -> list[Item]:
    """The items of a workload, in the order of its file.

    Args:
        config: which ones.
        tokenizer: of the target; only ``max_prompt_tokens`` needs it.

    Raises:
        ConfigError: the file is missing or cannot be read, ids are not unique, or no item is left.
        RequestError: the chat template refuses a prompt that ``max_prompt_tokens`` measures.
    """
    items = _read(config)
    _check_ids(items)
    items = _sample(_filter(items, config), config, tokenizer)
    if not items:
        raise ConfigError("workload.path: no items; check split and max_prompt_tokens too")
    return items


def data_path(config: WorkloadConfig) -> Path:
    """The file that a workload is read from.

    Raises:
        ConfigError: it does not exist; the message says how to get it.
    """
    if config.name == "mini":
        return Path(__file__).with_name("mini.jsonl")
    shared = Path(os.environ.get("HARNESS_SHARED", "../shared"))
    path = Path(config.path or shared / "workloads" / f"{config.name}.jsonl")
    if not path.is_file():
        remedy = SOURCES.get(config.name, "write one")
        raise ConfigError(f"workload.path: no file {path}; {remedy}, then give its path")
    return path


def _read(config: WorkloadConfig) -> list[Item]:
    """An item for each line (of the split); a bad line is an item with its reason."""
    build = BUILDERS[config.name]
    items = []
    for number, line in enumerate(_bytes_of(data_path(config)).splitlines(), start=1):
        if not line.strip():
            continue
        record: Any = None
        try:
            record = _decode(line)
            if config.name != "bfcl" or record.get("split", config.split) == config.split:
                items.append(_with_thinking(build(record), config))
        except (ValueError, RecursionError) as error:
            items.append(bad_item(record, number, str(error)))
    return items


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"workload.path: {path} cannot be read ({error.strerror}); name one that can"
        ) from None


def _with_thinking(item: Item, config: WorkloadConfig) -> Item:
    """The item, thinking as the config says if it thinks at all."""
    if item.thinking is None:
        return item
    return replace(item, thinking=Thinking(config.thinking_end, config.thinking_budget))


def _decode(line: bytes) -> dict[str, Any]:
    """One line as an object.

    Raises:
        ValueError: it is no JSON object, or holds what cannot be encoded again (half of a
            surrogate pair), which tokenizers choke on.
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 ({error}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON ({error}); write one object a line") from None
    json.dumps(record, ensure_ascii=False).encode()
    if not isinstance(record, dict):
        raise RequestError("give a JSON object")
    return record


def _check_ids(items: list[Item]) -> None:
    for item_id, count in Counter(item.id for item in items).items():
        if count > 1:
            raise ConfigError(f"workload.path: id {item_id!r} stands {count} times; rename them")


def _filter(items: list[Item], config: WorkloadConfig) -> list[Item]:
    """Keeps bad items, so that they are reported."""
    if config.kinds is not None:
        known = {item.kind for item in items}
        for kind in config.kinds:
            if kind not in known:
                have = ", ".join(sorted(known))
                raise ConfigError(f"workload.kinds: {kind!r} is not in the file; it has {have}")
        items = [item for item in items if item.kind in config.kinds or item.error]
    if config.smoke_only and any(item.smoke for item in items):
        items = [item for item in items if item.smoke or item.error]
    return items


def _sample(
    items: list[Item], config: WorkloadConfig, tokenizer: ChatTokenizer | None
) -> list[Item]:
    """At most ``limit`` items whose prompts fit, in the order of the file.

    An item's rank depends on its id and the seed alone, so samples of other files or limits
    share as many items as they can.
    """
    seed = config.seed
    ranked = items if seed is None else sorted(items, key=lambda item: derive_seed(seed, item.id))
    fitting = (item for item in ranked if _fits(item, config.max_prompt_tokens, tokenizer))
    chosen = {item.id for item in islice(fitting, config.limit)}
    return [item for item in items if item.id in chosen]


def _fits(item: Item, max_prompt_tokens: int | None, tokenizer: ChatTokenizer | None) -> bool:
    if max_prompt_tokens is None or item.error:
        return True
    if tokenizer is None:
        raise ConfigError("workload.max_prompt_tokens: cannot be measured without a tokenizer")
    return len(prompt_ids(item, tokenizer)) <= max_prompt_tokens
