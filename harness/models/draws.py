"""Random draws, seeded per request and addressed by position.

A draw belongs to a request and a place in its output, not to a call of a generator. So what
a request draws depends neither on what shares its batch nor on how many drafts were tried
before, and two strategies that emit each position's own sample (L14) emit the same tokens.
The generator is Philox, which is counter-based: block ``c`` is computed from ``c`` alone, and
holds exactly four 64-bit words, one for each stream.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

COIN: Final = 0
"""The accept test of the draft at a position."""
SAMPLE: Final = 1
"""The target's own token at a position: residual, bonus or plain sample."""
RESAMPLE: Final = 2
"""The second draw of check-then-resample (L4)."""
ORACLE: Final = 3
"""Whether the oracle's draft at a position is right, and which it is if not."""

Draws = npt.NDArray[np.float64]

_TARGET_KEY: Final = 0
_DRAFT_KEY: Final = 1


def uniforms(seed: int, position: int, n: int) -> Draws:
    """Draws for the output positions ``position .. position + n - 1``.

    Args:
        seed: of the request, taken modulo 2**64.
        position: index in the output, from 0.
        n: number of positions.

    Returns:
        ``[n, 4]`` in [0, 1): a column for each stream (``COIN``, ``SAMPLE``, ``RESAMPLE``,
        ``ORACLE``).
    """
    return _generator(seed, _TARGET_KEY, position).random((n, 4))


def draft_uniforms(seed: int, step: int, n: int) -> Draws:
    """``[n]`` draws in [0, 1) for drafting in one step of a request.

    Addressed by step, not by output position. A position behind a rejected draft is drafted
    again in the next step, and what became of the first attempt (its law, a legal prefix, a
    cleared draft, L10) may have depended on its draw. Given that, the same draw is not uniform
    any more and a draft made with it is not distributed as q. A fresh key keeps drafts
    independent of the verification, as the ratio test needs (V1.7b).
    """
    # A step owns 2**64 blocks: its number is the second word of the counter.
    return _generator(seed, _DRAFT_KEY, step << 64).random(n)


def _generator(seed: int, key: int, counter: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=(key << 64) | seed % 2**64, counter=counter))
