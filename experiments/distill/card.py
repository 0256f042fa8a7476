"""The model card of a draft: what it is, how it was made, how often it agrees with its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.distill.data import Data, counts, load, rounds
from experiments.distill.evaluate import Shares, with_interval
from experiments.distill.export import draft_folders, students, trained
from experiments.distill.measure import KINDS
from experiments.distill.settings import Settings, defaults

CARD = """\
---
license: {licence}
base_model: {base}
library_name: transformers
---

# {name}

A draft model for speculative decoding with `{base}` as the target: its layers {layers} and its
final norm, distilled. Embeddings and head are the target's own tensors, taken at load
(`"embeddings": "shared"` in `config.json`), and so is the tokenizer.

Use: `pair.draft=PATH/{name}` with that target. Alone it is no language model: `transformers` by
itself would start the embeddings at random. It proposes tokens and is not meant to be sampled from.

## Agreement

Share of output tokens (end tokens included) where draft and target have the same best token,
teacher-forced in fp32, on BFCL's `eval` split, which training has not seen, with 95 % intervals by
bootstrap over the items. *reference* = the data set's own answers; *greedy* = what the target
itself writes under the item's grammar.

{kinds}

{shares}

## Training

Forward KL divergence to {law}, temperature 1,
whole vocabulary; {optimizer}, learning rate {lr:g} with warm-up and cosine to 0, batches of
{batch_tokens:,} tokens (padding included), all positions of the outputs and {prompt_share:.0%} of
those of the prompts: {steps:,} steps, {millions:.0f} million tokens, {minutes:.1f}
minutes{together}.

    {command}

| sequences | number | output tokens |
|---|---|---|
{data}

BFCL: the `train` split of `bfcl.jsonl` less a seeded tenth; prompts and functions from the Berkeley
Function Calling Leaderboard (Apache-2.0), answers from MaskBench (MIT). JSONSchemaBench (MIT): all
but a seeded tenth. All other outputs are the target's own. Most calls are variants of the data
set's: other names of functions and parameters, other values. The licence of these weights is the
target's.
"""
BASES = {"smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
"""The hub's name and the licence of targets that ``pair.target`` calls otherwise."""
LAWS = {
    "masked": "the law that the target decodes by (under a grammar: without what that forbids)",
    "own": "the target's own law, as if there were no grammar",
}
NAMED = ("pair", "layers", "rounds", "steps")
"""Settings that the command always names."""
LEFT_OUT = (
    "stages",
    "device",
    "data_seconds",
    "train_seconds",
    "checkpoint_seconds",
    "evaluate_every",
    "eval_items",
    "draft",
    "bench_seconds",
)
"""Settings that it never names: the weights do not depend on them."""


def write_card(settings: Settings, out: Path, student: str, shares: Shares) -> None:
    """Write ``README.md`` into the folder of an exported draft.

    Args:
        settings: that it was made with.
        out: of the distillation.
        student: its name.
        shares: what was measured of it.
    """
    folder, layers = draft_folders(settings, out)[student], students(settings)
    checkpoint, data = trained(out), load(out / "data")
    base, licence = BASES.get(settings.target, (settings.target, "other"))
    text = CARD.format(
        name=folder.name,
        base=base,
        licence=licence,
        layers=", ".join(map(str, layers[student])),
        kinds="\n".join(f"- *{kind}*: {doc}." for kind, doc in KINDS.items()),
        shares=_shares(shares),
        optimizer={"adamw": "AdamW", "muon": "Muon (matrices) and AdamW (norms)"}[
            settings.optimizer
        ],
        law=LAWS[settings.law],
        lr=settings.lr,
        batch_tokens=settings.batch_tokens,
        prompt_share=settings.prompt_share,
        steps=checkpoint.step,
        millions=checkpoint.tokens / 1e6,
        minutes=checkpoint.seconds / 60,
        together=f", shared by {len(layers)} students" if len(layers) > 1 else "",
        command=command(settings, rounds(out / "data"), checkpoint.step),
        data=_data(data),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def command(settings: Settings, rounds: int, steps: int) -> str:
    """What makes this draft again: its budgets in rounds and steps, whatever they were given in."""
    made = replace(settings, rounds=rounds, steps=steps)
    words = [
        f"{name}={getattr(made, name)}"
        for name, default in defaults().items()
        if name in NAMED or (name not in LEFT_OUT and str(getattr(made, name)) != default)
    ]
    return " ".join(["python -m experiments.distill", *words])


def _shares(shares: Shares) -> str:
    heads = ["outputs", *KINDS, "tokens"]
    rows = [
        [source, *(with_interval(each[kind]) for kind in KINDS), f"{each['tokens']:,}"]
        for source, each in shares.items()
    ]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _data(data: Data) -> str:
    return "\n".join(
        f"| {source} | {number:,} | {tokens:,} |" for source, number, tokens in counts(data)
    )
