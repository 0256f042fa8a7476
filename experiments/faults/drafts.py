"""Drafts that no draft model should make, and logits that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from experiments.faults.cases import Case, Outcome, draw
from experiments.faults.scene import VICTIM, Scene, play
from harness.core import PAD, Proposal, Request, Sequence as Decoded
from harness.drafters.chain import DraftChain
from harness.drafters.model import ModelDrafter
from harness.grammar.spec import GrammarSpec
from tests.strategies.letters import REGEXES, TABLE, ask
from tests.toys import Law, Toy, random_law

PROMPT = 1
"""The victim's prompt, by which a model knows it; the neighbours' is token 0."""

GRAMMARS = (None, GrammarSpec.regex("a[bcd]{6,9}e"), GrammarSpec.choice(["abcdex", "abcdey"]))

Spoil = Callable[[Random, list[int]], list[int]]
"""What becomes of a victim's drafts."""

SPOILED: dict[str, Spoil] = {
    "out of range": lambda random, drafts: _put(random, drafts, random.choice((len(TABLE), 10**9))),
    "negative": lambda random, drafts: _put(random, drafts, -random.randint(2, 2**33)),
    "padding inside": lambda random, drafts: _put(random, drafts, PAD),
    "all padding": lambda random, drafts: [PAD] * len(drafts),
    "stop token inside": lambda random, drafts: _put(random, drafts, TABLE.eos_id),
    "repeated": lambda random, drafts: [random.randrange(len(TABLE))] * len(drafts),
    "illegal everywhere": lambda random, drafts: [TABLE.ids_by_bytes[b"t"]] * len(drafts),
    "arbitrary": lambda random, drafts: [random.randint(-2, len(TABLE) + 1) for _ in drafts],
    "too few": lambda random, drafts: drafts[: random.randint(0, len(drafts))],
    "too many": lambda random, drafts: drafts + drafts[:1] * random.randint(1, 9),
}

POISONS: dict[str, Sequence[float]] = {
    "nan": (math.nan,),
    "+inf": (math.inf,),
    "-inf": (-math.inf,),
    "huge": (3e38, -3e38),
    "nan and infinite": (math.nan, math.inf, -math.inf),
}


def run(case: Case) -> Outcome:
    """Spoil the drafts, or the logits of the draft model or of the target."""
    random = case.random()
    settings = draw(random, constrained=False)
    laws: dict[str, Any] = {"target": random_law(TABLE, random.getrandbits(32))}
    laws["draft"] = random_law(TABLE, random.getrandbits(32))
    drafter: type[ModelDrafter] = ModelDrafter
    if settings.strategy == "plain" or random.random() < 0.4:
        poison, where = random.choice(list(POISONS)), random.choice(("target", "draft"))
        laws[where] = poisoned(laws[where], POISONS[poison], random.getrandbits(32))
        fault = f"{poison} in the logits of the {where}"
    else:
        fault = random.choice(list(SPOILED))
        drafter = spoiling(SPOILED[fault], random.getrandbits(32))
    toy = Toy(
        TABLE,
        **laws,
        engine=settings.engine,
        sampling=settings.sampling,
        drafter=drafter,
        **settings.fields,
    )
    victim = ask(random.choice(GRAMMARS), VICTIM, prompt_ids=(PROMPT,), max_new_tokens=16)
    return play(case, Scene(settings, toy, among(random, victim), fault))[0]


def among(random: Random, *victims: Request) -> list[Request]:
    """Victims at random places among sound requests."""
    requests = [ask(GrammarSpec.regex(text), f"r{i}", seed=i) for i, text in enumerate(REGEXES)]
    requests = [*random.sample(requests, 3), ask(None, "free", max_new_tokens=8)]
    for victim in victims:
        requests.insert(random.randint(0, len(requests)), victim)
    return requests


def poisoned(law: Law, values: Sequence[float], seed: int) -> Law:
    """A law whose rows for the victim are spoiled: half of them, in a few places or all over."""

    def other(tokens: tuple[int, ...]) -> Sequence[float]:
        row, random = list(law(tokens)), Random(f"{seed} {tokens}")
        if tokens[0] == PROMPT and random.random() < 0.5:
            many = random.choice((1, 3, len(row)))
            for place in random.sample(range(len(row)), many):
                row[place] = random.choice(values)
        return row

    return other


def spoiling(spoil: Spoil, seed: int) -> type[ModelDrafter]:
    """A drafter that spoils the victim's drafts, however the strategy asks for them."""
    random = Random(seed)

    class Spoiling(ModelDrafter):
        def chain(self, sequences: Sequence[Decoded], *given: Any, **named: Any) -> DraftChain:
            chain = super().chain(sequences, *given, **named)
            sound = chain.proposals

            def proposals() -> list[Proposal]:
                return [
                    replace(proposal, tokens=spoil(random, proposal.tokens))
                    if sequence.request.id == VICTIM and proposal.tokens
                    else proposal
                    for sequence, proposal in zip(sequences, sound(), strict=True)
                ]

            chain.proposals = proposals  # type: ignore[method-assign]
            return chain

    return Spoiling


def _put(random: Random, drafts: list[int], token: int) -> list[int]:
    """The drafts with ``token`` in the place of one of them."""
    place = random.randrange(len(drafts))
    return [*drafts[:place], token, *drafts[place + 1 :]]
