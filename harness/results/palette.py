"""Colours and marks of everything that is drawn: one fixed pair for each strategy.

The colours are those of Okabe and Ito (2008), "Color Universal Design", which colour-blind eyes
tell apart; their black is a grey here, which can be seen on a dark page too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

INK = "#262626"
"""Text and axes; ``harness.mplstyle`` has it too."""

GREY, ORANGE, SKY, GREEN = "#999999", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"


class Look(NamedTuple):
    """How a strategy is drawn: a colour and, for those who do not see it, a marker."""

    colour: str
    marker: str


LOOKS: dict[str, Look] = {
    "plain": Look(GREY, "o"),
    "unguided": Look(SKY, "s"),
    "vllm": Look(BLUE, "^"),
    "trtllm": Look(GREEN, "v"),
    "llamacpp": Look(ORANGE, "D"),
    "sglang": Look(VERMILLION, "P"),
    "deepinfer": Look(PURPLE, "X"),
}

_OTHERS = [Look(colour, marker) for marker in "*<>" for colour in (YELLOW, BLUE, VERMILLION)]

FATES: dict[str, str] = {
    "accepted": GREEN,
    "rejected_model": BLUE,
    "rejected_grammar": ORANGE,
    "trimmed": PURPLE,
    "past_stop": GREY,
}
"""What becomes of a draft; the names are step columns, in the order of drawing."""

PHASES: dict[str, str] = {
    "draft_us": SKY,
    "verify_us": BLUE,
    "grammar_us": ORANGE,
    "host_us": GREY,
}
"""Where the time of a step goes; the names are step columns."""

KINDS: dict[str, str] = {
    "preview": SKY,
    "draft": GREEN,
    "rejected": VERMILLION,
    "retokenize": PURPLE,
}
"""Kinds of rollbacks."""


def looks(strategies: Iterable[str]) -> dict[str, Look]:
    """A look for each strategy; one that is not ours gets the next free one, in this order."""
    names = list(dict.fromkeys(strategies))
    others = [name for name in names if name not in LOOKS]
    free = {name: _OTHERS[index % len(_OTHERS)] for index, name in enumerate(others)}
    return {name: LOOKS.get(name) or free[name] for name in names}
