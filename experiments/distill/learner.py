"""The target and its students on one device, and one step of learning.

Where the time goes on a GPU: the target's layers (30 forwards of a layer for a student's 3, which
count three times with their backward pass), then the head, whose logits of 49,152 tokens cost
as much as 8 layers of SmolLM2-135M, at the chosen positions only. The layers run in bf16 and
compiled, the students' own weights and their optimizers in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import nn

from experiments.distill.batches import Batch
from experiments.distill.masks import Masks, MaskTable
from experiments.distill.objective import (
    ChunkDivergence,
    Divergence,
    LegalLogits,
    chunk_divergence,
    divergences,
    legal_logits,
)
from experiments.distill.optimizers import make_optimizers, set_rate
from experiments.distill.settings import Settings
from experiments.distill.student import (
    head_of,
    hidden_states,
    make_student,
    parse_layers,
    trainable,
)
from harness.models.compiling import compile_decoder
from harness.models.pair import PairConfig, load_pair

MOST_GRADIENT = 1.0
"""Norm that a student's gradient is clipped to."""


class Learner:
    """A frozen target and students that learn from it.

    Args:
        settings: of the training.
        masks: int32 ``[rows, words]`` that the batches refer to; None = no grammar anywhere.

    Attributes:
        students: by name.
        head: ``[vocab, hidden]``, of them all.
    """

    def __init__(self, settings: Settings, masks: Masks | None = None) -> None:
        pair = load_pair(PairConfig(settings.target, device=settings.device))
        self.target, self.device = pair.target, pair.target.device
        total = self.target.config.get_text_config(decoder=True).num_hidden_layers
        chosen = parse_layers(settings.layers, total)
        self.head = head_of(self.target, pair.vocab_size)
        self.students = {name: make_student(self.target, layers) for name, layers in chosen.items()}
        self.own = {name: trainable(student) for name, student in self.students.items()}
        self.optimizers = {
            name: make_optimizers(
                own.values(), settings.optimizer, settings.lr, settings.weight_decay
            )
            for name, own in self.own.items()
        }
        known = MaskTable(-(-len(self.head) // 32)).masks if masks is None else masks
        self._masks = torch.from_numpy(known).to(self.device)
        self._of_chunk: ChunkDivergence = chunk_divergence
        self._legal: LegalLogits = legal_logits
        cuda = self.device.type == "cuda"
        self.compiled = settings.compile == "true" or (settings.compile == "auto" and cuda)
        if self.compiled:
            self._compile()

    def _compile(self) -> None:
        """Layer by layer, so that one compilation of a shape serves all layers."""
        compile_decoder(self.target)
        for student in self.students.values():
            for layer in student.get_decoder().layers:
                layer.compile(dynamic=False)
        self._of_chunk = torch.compile(chunk_divergence, dynamic=False)
        self._legal = torch.compile(legal_logits, dynamic=False)

    def stage(self, batch: Batch) -> Batch:
        """A batch of the CPU where the device can fetch it without anyone waiting."""
        return batch.pinned() if self.device.type == "cuda" else batch

    def learn(self, batch: Batch, lr: float) -> dict[str, torch.Tensor]:
        """One optimizer step of every student.

        Returns:
            By student, fp32 ``[3]`` on the device: divergence and agreement summed over the
            positions, and their number.
        """
        found = self._forward_and_backward(batch)
        self.update(lr)
        return {name: _with_count(each, batch) for name, each in found.items()}

    def warm_up(self, batches: Iterable[Batch]) -> None:
        """Compile for the shapes of these batches; nothing is learnt."""
        for batch in batches:
            self._forward_and_backward(batch.to(self.device))
        self._clear()

    def measure(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The sums of ``learn`` without learning. The students' forward is the same, its graph for
        the gradient included: no other is compiled for a few batches."""
        states = {name: self.states(name, batch) for name in self.students}
        found = self.divergences(self.target_states(batch), states, batch)
        return {name: _with_count(each, batch) for name, each in found.items()}

    def _forward_and_backward(self, batch: Batch) -> dict[str, Divergence]:
        target_states = self.target_states(batch)
        states = {name: self.states(name, batch) for name in self.students}
        found = self.divergences(target_states, states, batch)
        self.backward(states, found, batch)
        return found

    @torch.no_grad()
    def target_states(self, batch: Batch) -> torch.Tensor:
        """``[positions, hidden]`` of the target."""
        return _at_positions(hidden_states(self.target, batch.tokens), batch)

    def states(self, name: str, batch: Batch) -> torch.Tensor:
        """``[positions, hidden]`` of a student, with its graph."""
        mixed = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            return _at_positions(hidden_states(self.students[name], batch.tokens), batch)

    def divergences(
        self, target_states: torch.Tensor, states: dict[str, torch.Tensor], batch: Batch
    ) -> dict[str, Divergence]:
        """By student, see ``experiments.distill.objective.divergences``."""
        own = [each.detach() for each in states.values()]
        found = divergences(
            target_states, own, batch, self._masks, self.head, self._of_chunk, self._legal
        )
        return dict(zip(states, found, strict=True))

    def backward(
        self, states: dict[str, torch.Tensor], found: dict[str, Divergence], batch: Batch
    ) -> None:
        """Every student's gradient of its mean divergence."""
        for name, divergence in found.items():
            torch.autograd.backward(states[name], divergence.gradient / batch.total)

    def update(self, lr: float) -> None:
        """Step every student by its gradient."""
        for name, optimizers in self.optimizers.items():
            nn.utils.clip_grad_norm_(self.own[name].values(), MOST_GRADIENT)
            set_rate(optimizers, lr)
            for optimizer in optimizers:
                optimizer.step()
        self._clear()

    def _clear(self) -> None:
        for optimizer in chain.from_iterable(self.optimizers.values()):
            optimizer.zero_grad(set_to_none=True)


def _at_positions(states: torch.Tensor, batch: Batch) -> torch.Tensor:
    return states.flatten(0, 1).index_select(0, batch.positions)


def _with_count(divergence: Divergence, batch: Batch) -> torch.Tensor:
    """The sums, and the count as a kernel's argument: a copy would wait for the device."""
    return torch.cat([divergence.sums, divergence.sums.new_full((1,), batch.total)])
