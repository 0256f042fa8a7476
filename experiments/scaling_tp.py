"""What a target costs that devices share, by tensor parallelism: per step, and by what.

    python -m experiments.scaling_tp tp=1,2 layers=16

A target of random weights in the shape of an 8B Llama (32 query and 8 key/value heads; by default
half of its 32 layers, which are made and read quickly) and a draft of one layer and a quarter of
the width are made in a temporary folder, over the vocabulary of ``tokenizer``; nothing of them is
kept. Random weights under a grammar and a token limit write nonsense, and next to no draft is
accepted: read the costs, not the counts. With ``mode=eager``, launching a layer takes longer than
reading its weights, and sharing them out gains nothing.

All numbers of ranks decode the same requests in the same batches, passes in turn. Grammar work is
done by every rank; behind each step the ranks compare where they stand (``agree``). Prints tables
and writes ``scaling_tp.json`` (and the tables as Markdown) below ``out``. Settings
(``name=value``): ``tp`` (the first is what the others are compared with), ``slots``, ``turns``
(batches of full slots), ``passes``, ``strategies``, ``workload``, ``path``, ``limit`` (new tokens),
``whitespace``, ``tokenizer`` (a pair's target), ``layers``, ``hidden``, ``heads``, ``kv_heads``,
``mode`` (``engine.mode``), ``timeout`` (``engine.tp_timeout_s``), ``device``, ``out``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from experiments.scaling import DRAFT_TOKENS, same_outputs
from experiments.scaling_ranks import Pass, RankPool
from experiments.study import Study, numbers
from harness.config import Config
from harness.engine import EngineConfig
from harness.errors import ConfigError, exit_status
from harness.grammar.service import GrammarConfig
from harness.models.checkpoint import locate, read_tokenizer
from harness.models.pair import PairConfig, choose_device, choose_dtype
from harness.results.manifest import cores
from harness.results.metrics import TIMES
from harness.results.table import Table
from harness.workloads.loaders import WorkloadConfig

DEFAULTS = {
    "tp": "1,2",
    "slots": "8",
    "turns": "1",
    "passes": "3",
    "strategies": "plain,vllm,trtllm",
    "workload": "bfcl",
    "path": "",
    "limit": "64",
    "whitespace": "free",
    "tokenizer": "smollm2",
    "layers": "16",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "mode": "auto",
    "timeout": "60",
    "device": "auto",
}
CONTEXT, SEED = 2048, 0
DRAFT_SHARE = 4
"""The draft's width and heads are the target's by this."""
SPEED = {
    "tp": "devices that share the target",
    "tok/s": "output tokens / time of rank 0's steps; median of the passes (1/s)",
    "range": "slowest and fastest pass (1/s)",
    "speed-up": "tok/s / tok/s at the first tp; median of the passes",
    "same %": "outputs equal to those at the first tp; a sum over other parts flips near-ties",
}
TIME = {
    "tp": "devices that share the target",
    "prefill": "the target's forward over a batch of prompts, token chosen (ms)",
    "verify": "the same of a verify step (ms)",
    "draft": "all draft forwards of a verify step (ms)",
    "grammar": "grammar work on the CPU, rank 0 (µs per verify step)",
    "slowest": "the same on the rank where it takes longest (µs)",
    "host": "everything else, rank 0 (µs per verify step)",
    "agree": "part of host: the ranks compare where they stand, rank 0 (µs per step of any kind)",
}


def main(arguments: Sequence[str]) -> int:
    """The command line; returns its exit status, 2 for what the user can correct."""
    return exit_status(lambda: _study(arguments))


def _study(arguments: Sequence[str]) -> int:
    study = Study.begin("scaling_tp", arguments, DEFAULTS)
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_pair(folder, study.settings)
        study.by_slots(
            lambda slots: measure(slots, study.settings, folder), (speed_table, time_table)
        )
    return 0


def make_pair(folder: Path, settings: Mapping[str, str]) -> None:
    """Save a random ``target`` and ``draft``, made on the device that will run them.

    Raises:
        ConfigError: the tokenizer cannot be found or read.
    """
    tokenizer = read_tokenizer(locate(settings["tokenizer"], "tokenizer"), "tokenizer")
    if tokenizer is None:
        raise ConfigError(f"tokenizer: {settings['tokenizer']} has none; name another model")
    device = choose_device(settings["device"])
    layers = int(settings["layers"])
    for name, config in {
        "target": shape(settings, tokenizer, layers, share=1),
        "draft": shape(settings, tokenizer, layers=1, share=DRAFT_SHARE),
    }.items():
        torch.manual_seed(SEED)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=choose_dtype("auto", device))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the ranks need it


def shape(
    settings: Mapping[str, str], tokenizer: PreTrainedTokenizerFast, layers: int, share: int
) -> LlamaConfig:
    """A Llama with a feed-forward layer 3.5 times as wide as it is, as the 8B one has it."""
    hidden = int(settings["hidden"]) // share
    return LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,  # ranks share the rows of the head evenly
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=int(settings["heads"]) // share,
        num_key_value_heads=int(settings["kv_heads"]) // share,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def measure(slots: int, settings: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """One number of slots: all numbers of ranks."""
    counts = numbers(settings["tp"])
    configs = [configuration(count, slots, settings, folder) for count in counts]
    with ExitStack() as stack:
        with ThreadPoolExecutor() as threads:
            pools = dict(zip(counts, threads.map(started, configs), strict=True))
        for pool in pools.values():
            stack.callback(pool.close)
        passes: dict[int, list[list[Pass]]] = {count: [] for count in counts}
        for _ in range(int(settings["passes"])):
            for count, pool in pools.items():
                passes[count].append(pool.decode())
    return {
        "cores": cores(),
        "measured": {
            name: [figures(passes[count], passes[counts[0]], name) for count in counts]
            for name in settings["strategies"].split(",")
        },
    }


def started(config: Config) -> RankPool:
    """Ranks that have compiled every grammar and loaded every kernel."""
    pool = RankPool(config)
    pool.decode()
    return pool


def configuration(count: int, slots: int, settings: Mapping[str, str], folder: Path) -> Config:
    """The same requests for every ``count``."""
    most = max(numbers(settings["tp"]))
    pair = PairConfig(str(folder / "target"), str(folder / "draft"), device=settings["device"])
    return Config(
        strategy="",
        compare=settings["strategies"].split(","),
        options={"sglang": {"jump_forward": False}},
        pair=pair,
        workload=WorkloadConfig(
            name=settings["workload"],
            path=settings["path"] or None,
            limit=slots * int(settings["turns"]),
            seed=None,
            max_prompt_tokens=700,
            max_new_tokens=int(settings["limit"]),
        ),
        grammar=GrammarConfig(whitespace=settings["whitespace"]),
        engine=EngineConfig(
            slots=slots,
            draft_tokens=DRAFT_TOKENS,
            turn=slots,
            threads=max(1, cores() // most),
            mode=settings["mode"],
            tp=count,
            tp_timeout_s=float(settings["timeout"]),
        ),
    )


def figures(
    passes: Sequence[Sequence[Pass]], first: Sequence[Sequence[Pass]], name: str
) -> dict[str, Any]:
    """One strategy on some number of ranks, against the first number: medians over passes."""
    ours, theirs = ([tok_s(each[0], name) for each in those] for those in (passes, first))
    by_rank = [
        {key: median(values[key] for values in mine) for key in mine[0]}
        for mine in zip(*([per_step(rank, name) for rank in each] for each in passes), strict=True)
    ]
    return {
        "tp": len(by_rank),
        "tok_s": median(ours),
        "range": [min(ours), max(ours)],
        "speed_up": median(our / their for our, their in zip(ours, theirs, strict=True)),
        "same": same_outputs(name, passes[0][0].requests, first[0][0].requests),
        "by_rank": by_rank,
    }


def tok_s(rank: Pass, name: str) -> float:
    """Output tokens over the time of all steps, prefills included, 1/s."""
    steps = rank.steps[rank.steps["strategy"] == name]
    requests = rank.requests[rank.requests["strategy"] == name]
    return float(requests["output_tokens"].sum() / steps[TIMES].to_numpy().sum() * 1e6)


def per_step(rank: Pass, name: str) -> dict[str, float]:
    """What a step of the whole batch takes on one rank, µs."""
    rows = rank.steps[rank.steps["strategy"] == name]
    prompts, verify = rows[rows["prefill"]], rows[~rows["prefill"]]
    spent = verify[TIMES].sum() / max(1, verify["tick"].nunique())
    return {
        "prefill_us": float(prompts["verify_us"].sum() / max(1, prompts["tick"].nunique())),
        **{key: float(spent[key]) for key in TIMES},
        "agree_us": rank.agree_us[name] / max(1, rows["tick"].nunique()),
    }


def speed_table(slots: int, measured: Mapping[str, Any]) -> Table:
    """One row per strategy and number of ranks."""
    rows = tuple(
        (
            name,
            str(line["tp"]),
            f"{line['tok_s']:.0f}",
            "–".join(f"{end:.0f}" for end in line["range"]),
            f"{line['speed_up']:.2f}",
            f"{100 * line['same']:.0f}",
        )
        for name, lines in measured["measured"].items()
        for line in lines
    )
    docs = ("strategy that ran", *SPEED.values())
    return Table(f"Speed: {slots} slots", ("strategy", *SPEED), docs, rows)


def time_table(slots: int, measured: Mapping[str, Any]) -> Table:
    """Where the time of a step goes: one row per strategy and number of ranks."""
    rows = []
    for name, lines in measured["measured"].items():
        for line in lines:
            zero = line["by_rank"][0]
            slowest = max(each["grammar_us"] for each in line["by_rank"])
            rows.append(
                (
                    name,
                    str(line["tp"]),
                    *(f"{zero[f'{key}_us'] / 1e3:.1f}" for key in ("prefill", "verify", "draft")),
                    f"{zero['grammar_us']:.0f}",
                    f"{slowest:.0f}",
                    f"{zero['host_us']:.0f}",
                    f"{zero['agree_us']:.0f}",
                )
            )
    docs = ("strategy that ran", *TIME.values())
    return Table(f"Time: {slots} slots, one step of all", ("strategy", *TIME), docs, tuple(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
