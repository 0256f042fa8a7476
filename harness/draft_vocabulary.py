"""The tokens that a draft model with a pruned head can choose from, as EAGLE-3's drafts have one.

Such a head has a logit per *draft id*, far fewer than the target has, and a map to the target's
ids (``d2t``). The draft model reads target ids, so only what leaves its head is translated: a mask
is gathered into draft ids before the choice (1.4a, step 4), the choice and its law are brought back
to target ids behind it (T18).

A grammar may allow tokens of which the head has none. That is no dead end of the grammar (T7 looks
at the target's ids): the draft's law is empty there, and its chain ends. As many drafts as q has
rows are verified (T18).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.bitmask import WORD_BITS
from harness.core import PAD


class DraftVocabulary:
    """A map from draft ids to target ids, and what has to be translated by it.

    Args:
        ids: by draft id, its target id; no two alike.
        vocab_size: of the target.
        device: where the draft's logits are.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.ids, self.vocab_size = tuple(ids), vocab_size
        on_host = torch.tensor(self.ids, dtype=torch.int64)
        bits = (1 << on_host % WORD_BITS).to(torch.int32)  # of bit 31 the sign is left
        self._ids = on_host.to(device)  # [draft_vocab]
        self._words = (on_host // WORD_BITS).to(device)
        self._bits = bits.to(device)

    def __len__(self) -> int:
        return len(self.ids)

    def target_id(self, draft_id: int) -> int:
        """The target id of a draft id on the host; ``PAD`` stays what it is."""
        return PAD if draft_id == PAD else self.ids[draft_id]

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids on the device, of any shape; only launched."""
        return self._ids[draft_ids]

    def spread(self, law: torch.Tensor) -> torch.Tensor:
        """``[rows, draft_vocab]`` probabilities as ``[rows, vocab]``, 0 at all other tokens."""
        return law.new_zeros(len(law), self.vocab_size).index_copy_(1, self._ids, law)

    def mask(self, logits: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Mask all rows in place by what the target may choose; on CUDA only launched.

        Args:
            logits: ``[rows, draft_vocab]``.
            bitmask: int32 ``[rows, words]`` over target ids, on the logits' device.
        """
        logits.masked_fill_((bitmask[:, self._words] & self._bits) == 0, -torch.inf)
