"""Work on logits that every forward of one shape leaves in the same place.

There the masking and the choice of tokens can be graphs too: captured once, replayed ever after.
Elsewhere (eager forwards, trees, a CPU) the same work runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.bitmask import mask_rows, upload, words
from harness.captures import Captures
from harness.core import PAD
from harness.draft_vocabulary import DraftVocabulary
from harness.parallel.ranks import ALONE, Ranks
from harness.step_masks import StepMasks

EVERY_TOKEN = -1
"""A mask word that allows all of its tokens."""

Work = Callable[..., torch.Tensor]
"""From logits ``[R, vocab]`` and arguments with a row for each of theirs to a result whose last
dimension is the rows. Equal work is captured once."""


class Mailbox:
    """Memory on the CPU that a graph sends a result to.

    Args:
        values: the result, where the graph leaves it. The graph is replayed on the stream that
            is current now.
    """

    def __init__(self, values: torch.Tensor) -> None:
        cuda = values.is_cuda
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=cuda)
        self._stream = torch.cuda.current_stream(values.device) if cuda else None
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def send(self, values: torch.Tensor) -> None:
        """The copy to the CPU, part of the graph."""
        self._host.copy_(values, non_blocking=True)

    def read(self) -> torch.Tensor:
        """Wait for what has been launched; the result, until the next one is sent."""
        if self._sent is not None:
            self._sent.record(self._stream)
            self._sent.synchronize()
        return self._host


def read_back(values: torch.Tensor) -> torch.Tensor:
    """A copy of ``values`` on the CPU, where no graph sends it."""
    if values.device.type == "cpu":
        return values
    mailbox = Mailbox(values)
    mailbox.send(values)
    return mailbox.read()


class Inbox:
    """Where a graph finds an argument.

    Args:
        rows: R of the static logits; what is loaded has at most as many.
        example: a first value. Values on the CPU are copied to the device by the graph, values
            on the device before it.
        device: of the logits.
    """

    def __init__(self, rows: int, example: torch.Tensor, device: torch.device) -> None:
        self.values = torch.full(
            (rows, *example.shape[1:]), PAD, dtype=example.dtype, device=device
        )
        self._host: torch.Tensor | None = None
        if example.device.type == "cpu":
            pin = device.type == "cuda"
            self._host = torch.full_like(self.values, PAD, device="cpu", pin_memory=pin)

    def load(self, values: torch.Tensor) -> None:
        """Lay out what comes next; rows that have none get ``PAD``."""
        inbox = self.values if self._host is None else self._host
        inbox[: len(values)] = values
        inbox[len(values) :] = PAD

    def receive(self) -> None:
        """The copy to the device, part of the graph."""
        if self._host is not None:
            self.values.copy_(self._host, non_blocking=True)


class Errand:
    """A piece of work on static logits, with its arguments and its result where they stay.

    Args:
        work: what is done.
        logits: the static logits, R rows.
        arguments: the first ones.
        ranks: that do the work; what comes of it is rank 0's.
    """

    def __init__(
        self, work: Work, logits: torch.Tensor, arguments: Sequence[torch.Tensor], ranks: Ranks
    ) -> None:
        self._work, self._logits, self._ranks = work, logits, ranks
        self._inboxes = [Inbox(len(logits), each, logits.device) for each in arguments]
        self._mailbox = Mailbox(self._result())

    def load(self, arguments: Sequence[torch.Tensor]) -> None:
        """Lay the arguments out. The copy of the last ones has ended: what came of them has
        been read."""
        for inbox, values in zip(self._inboxes, arguments, strict=True):
            inbox.load(values)

    def body(self) -> None:
        """What is captured."""
        for inbox in self._inboxes:
            inbox.receive()
        self._mailbox.send(self._result())

    def read(self) -> torch.Tensor:
        """Wait for the result."""
        return self._mailbox.read()

    def _result(self) -> torch.Tensor:
        result = self._work(self._logits, *(inbox.values for inbox in self._inboxes))
        return self._ranks.decided(result)


class StaticLogits:
    """One place for logits, with what is done to them as graphs.

    Args:
        logits: fp32 ``[R, vocab]``; each forward writes the rows that it wants to the front.
        captures: makes the graphs.
        pruned: what the logits stand for, if not for all tokens.
        ranks: that act on them; what rank 0 chooses counts for all.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        captures: Captures,
        pruned: DraftVocabulary | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.logits, self._captures = logits, captures
        self._pruned, self._ranks = pruned, ranks
        rows, vocab_size = logits.shape
        shape = rows, words(vocab_size if pruned is None else pruned.vocab_size)
        cuda = logits.is_cuda
        self._masks = torch.full(shape, EVERY_TOKEN, dtype=torch.int32, pin_memory=cuda)
        self._on_device = torch.empty_like(self._masks, device=logits.device)
        self._host = self._masks.numpy()
        self._masked: set[int] = set()
        self._replays: dict[object, Callable[[], None]] = {}
        self._errands: dict[tuple[Work, int], Errand] = {}
        self._step_masks: dict[tuple[int, int], StepMasks] = {}

    def mask(self, bitmask: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Mask ``logits[targets]`` by ``bitmask[sources]``, int32 on the CPU; only launched.

        The copy of the last masks has ended: what was chosen with them has been read.
        """
        for row in self._masked.difference(targets):  # others allow every token already
            self._host[row] = EVERY_TOKEN
        self._masked = set(targets)
        rows = bitmask.numpy()
        for source, target in zip(sources, targets, strict=True):
            self._host[target] = rows[source]
        self._run(mask_rows, self._apply)

    def mask_by_step(
        self,
        bitmask: torch.Tensor,
        first_row: Sequence[int],
        steps: Sequence[Sequence[int]],
        rows: int,
    ) -> None:
        """``apply_by_step`` (D16) for each position of requests; only launched.

        The copy of the last masks has ended: what was chosen with them has been read.

        Args:
            bitmask: int32 ``[requests, positions, words]`` on the CPU.
            first_row: by request, its first row; each owns one at least.
            steps: by position, the requests to mask.
            rows: of the logits that these requests own together.
        """
        requests, positions, _ = bitmask.shape
        key = min(requests, len(self.logits)), positions
        if key not in self._step_masks:
            self._step_masks[key] = StepMasks(self.logits, *key)
        step_masks = self._step_masks[key]
        step_masks.load(bitmask, first_row, steps, rows)
        self._run(step_masks, step_masks.body)

    def choose(self, work: Work, arguments: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """``work(logits, *arguments)`` of all R rows on the CPU, overwritten by the next call.

        Args:
            work: what is done.
            arguments: of the first rows. Those on the CPU are copied by the graph; those on the
                device must not be its results.
        """
        key = work, len(arguments)
        if key not in self._errands:
            self._errands[key] = Errand(work, self.logits, arguments, self._ranks)
        errand = self._errands[key]
        errand.load(arguments)
        self._run(key, errand.body)
        return errand.read()

    def _apply(self) -> None:
        self._on_device.copy_(self._masks, non_blocking=True)
        if self._pruned is None:
            mask_rows(self.logits, self._on_device)
        else:
            self._pruned.mask(self.logits, self._on_device)

    def _run(self, what: object, body: Callable[[], None]) -> None:
        if what not in self._replays:
            self._replays[what] = self._captures.graph(body, self.logits.device)
        self._replays[what]()


class Places:
    """The static logits of all models of a run, found by where they lie.

    Args:
        captures: makes the graphs of these models and of the work on their logits.
        ranks: that act on these logits; what rank 0 chooses counts for all.
    """

    def __init__(self, captures: Captures, ranks: Ranks = ALONE) -> None:
        self.captures, self.ranks = captures, ranks
        self._by_address: dict[int, StaticLogits] = {}

    def add(self, logits: torch.Tensor, pruned: DraftVocabulary | None = None) -> None:
        """From now on every forward of some shape writes its logits here.

        Args:
            logits: fp32 ``[R, vocab]``, or ``[R, draft_vocab]`` of a pruned head.
            pruned: what they stand for, if not for all tokens.
        """
        place = StaticLogits(logits, self.captures, pruned, self.ranks)
        self._by_address[logits.data_ptr()] = place

    def find(self, logits: torch.Tensor) -> StaticLogits | None:
        """The place whose first rows ``logits`` are, if they are."""
        return self._by_address.get(logits.data_ptr())


def choose(
    work: Work, logits: torch.Tensor, places: Places | None, *arguments: torch.Tensor
) -> torch.Tensor:
    """``work(logits, *arguments)`` on the CPU, by a graph where there can be one. Waits for the
    device; the result is overwritten by the next call. Under tensor parallelism it is rank 0's.

    Args:
        work: see ``Work``.
        logits: ``[rows, vocab]``.
        places: where logits stay, if they do.
        arguments: ``[rows, ...]`` each, on the CPU or on the device.
    """
    place = places.find(logits) if places else None
    if place is None:
        return decide(work(logits, *(_beside(logits, each) for each in arguments)), places)
    return place.choose(work, arguments)[..., : len(logits)]


def decide(values: torch.Tensor, places: Places | None) -> torch.Tensor:
    """``values`` on the CPU, for the loop to act on: rank 0's, on every rank."""
    return read_back(places.ranks.decided(values) if places else values)


def _beside(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return upload(values, logits.device) if values.device.type == "cpu" else values
