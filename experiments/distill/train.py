"""The stage ``train``: students learn the target's law, several on one pass of the target."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType

import torch

from experiments.distill.batches import Batch, Batches, ahead, in_order
from experiments.distill.checkpoint import Checkpoint, Point
from experiments.distill.data import Data
from experiments.distill.learner import Learner
from experiments.distill.progress import Progress, progress
from experiments.distill.schedule import Budget, rate
from experiments.distill.sequences import by_source
from experiments.distill.settings import Settings, claim


def train(settings: Settings, data: Data, folder: Path) -> None:
    """Train all students to the end of the budget, from the last checkpoint on if there is one.

    Args:
        settings: of the training.
        data: with the masks of the law that is taught.
        folder: of its checkpoints.

    Raises:
        ConfigError: the folder holds a training with other settings.
        KeyboardInterrupt: it was interrupted; a checkpoint was written.
    """
    claim(folder, settings.values("train"))
    checkpoint = Checkpoint.read(folder)
    budget = Budget(settings.steps, settings.train_seconds)
    if checkpoint is not None and budget.done(checkpoint.step, checkpoint.seconds) >= 1:
        return
    learner = Learner(settings, data.masks)
    training = Training(settings, learner, data, checkpoint or Checkpoint())
    with progress("train") as shown, interruptible() as interrupted:
        finished = training.run(budget, shown, folder, interrupted)
    if not finished:
        raise KeyboardInterrupt(f"step {training.at.step} is kept; the same command goes on")


class Training:
    """A training under way.

    Args:
        settings: of it.
        learner: the models.
        data: what to learn from.
        at: where it stands; moved on.
    """

    def __init__(self, settings: Settings, learner: Learner, data: Data, at: Checkpoint) -> None:
        self._settings, self._learner, self.at = settings, learner, at
        size = settings.batch_tokens, settings.max_length
        self._batches = Batches(data.train, *size, settings.prompt_share, settings.seed)
        self._held_out = {
            source: [batch.to(learner.device) for batch in in_order(each, *size, full=True)]
            for source, each in by_source(data.held_out).items()
        }
        if at.step:
            self._restore()
        self._sums = {
            name: at.sums.get(name, torch.zeros(3)).to(learner.device) for name in learner.students
        }

    def run(
        self, budget: Budget, shown: Progress, folder: Path, interrupted: Callable[[], bool]
    ) -> bool:
        """Learn to the end of the budget, or until told to stop; a checkpoint is written then.

        Returns:
            Whether it came to the end.
        """
        at, settings = self.at, self._settings
        if self._learner.compiled:
            self._learner.warm_up(self._batches.one_of_each_shape())
        begun = perf_counter() - at.seconds
        written = perf_counter()
        with closing(ahead(self._staged, at.step)) as batches:
            while (done := budget.done(at.step, at.seconds)) < 1 and not interrupted():
                batch = next(batches)
                self._learn(batch, settings.lr * rate(done, settings.warm_up))
                at.seconds = perf_counter() - begun
                if at.step % settings.evaluate_every == 0:
                    self._add_points()
                if perf_counter() - written > settings.checkpoint_seconds:
                    self._write(folder)
                    written = perf_counter()
                if shown.due:
                    shown.at(budget.done(at.step, at.seconds), self._figures())
        ended = not interrupted()
        if ended and at.step % settings.evaluate_every:
            self._add_points()
        self._write(folder)
        return ended

    def _staged(self, index: int) -> Batch:
        return self._learner.stage(self._batches[index])

    def _learn(self, batch: Batch, lr: float) -> None:
        for name, sums in self._learner.learn(batch.to(self._learner.device), lr).items():
            self._sums[name] += sums
        self.at.step += 1
        self.at.tokens += batch.real

    def _figures(self) -> str:
        """For the progress; waits for the device."""
        each = {name: sums.tolist() for name, sums in self._sums.items()}
        figures = ", ".join(
            f"{name} {kl / positions:.3f} nats {100 * agreed / positions:.1f} %"
            for name, (kl, agreed, positions) in each.items()
            if positions
        )
        speed = self.at.tokens / self.at.seconds / 1e3
        return f"step {self.at.step}, {figures}, {speed:.0f}k tokens/s"

    def _add_points(self) -> None:
        """A point of every student's curve; the sums begin anew."""
        held_out = {source: self._measured(batches) for source, batches in self._held_out.items()}
        for name, sums in self._sums.items():
            kl, agreed, positions = sums.tolist()
            shares = {source: found[name] for source, found in held_out.items()}
            at = self.at
            self.at.curve.append(
                Point(
                    name, at.step, at.tokens, at.seconds, kl / positions, agreed / positions, shares
                )
            )
            sums.zero_()

    def _measured(self, batches: Sequence[Batch]) -> dict[str, float]:
        """By student, its agreement over some batches."""
        totals = {name: torch.zeros(3, device=self._learner.device) for name in self._sums}
        for batch in batches:
            for name, sums in self._learner.measure(batch).items():
                totals[name] += sums
        return {name: float(sums[1] / sums[2]) for name, sums in totals.items()}

    def _write(self, folder: Path) -> None:
        self.at.weights = {
            name: {key: each.detach() for key, each in own.items()}
            for name, own in self._learner.own.items()
        }
        self.at.optimizers = {
            name: [optimizer.state_dict() for optimizer in optimizers]
            for name, optimizers in self._learner.optimizers.items()
        }
        self.at.sums = self._sums
        self.at.write(folder)

    def _restore(self) -> None:
        """The weights and optimizers of the checkpoint."""
        for name, own in self._learner.own.items():
            with torch.no_grad():
                for key, parameter in own.items():
                    parameter.copy_(self.at.weights[name][key])
            for optimizer, state in zip(
                self._learner.optimizers[name], self.at.optimizers[name], strict=True
            ):
                optimizer.load_state_dict(state)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: a step is finished then; a second one ends the process."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
