"""A causal LM run in static shapes: captured once as CUDA graphs, replayed ever after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.argmax import largest
from harness.captures import Captures
from harness.models.buckets import Bucket, Buckets
from harness.models.causal_lm import CausalLM, see_causally
from harness.models.compiling import compile_decoder
from harness.models.language_model import RowInput
from harness.parallel.ranks import Ranks
from harness.static_logits import Mailbox, Places


class StaticLM:
    """``CausalLM`` in static shapes; satisfies ``LanguageModel``, adds chains and running ahead.

    On CUDA each shape is a graph: the copy of its inputs from pinned memory, the forward with
    its cache writes, and the choice of the wanted rows. Elsewhere the same code runs as it is,
    which is how it is tested. A returned tensor is overwritten by the next forward.

    Args:
        model: the model and its cache.
        decode_width: most tokens that a decode step feeds per row.
        places: gets the logits of every shape.
        compile: run torch.compile on the decoder first.
    """

    def __init__(
        self, model: CausalLM, decode_width: int, places: Places, compile: bool = False
    ) -> None:
        self.model = model
        self.vocab_size, self.device = model.vocab_size, model.device
        self.max_length, self.draft_vocabulary = model.max_length, model.draft_vocabulary
        self.buckets = Buckets(model.slots, model.max_length, decode_width)
        self._places = places
        self._forwards: dict[Bucket, Forward] = {}
        self._chains: dict[tuple[Bucket, int], Chain] = {}
        self._expected: tuple[Station, Sequence[RowInput]] | None = None
        if compile:
            compile_decoder(model.model)

    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """See ``LanguageModel.forward``."""
        station = self._forward(inputs)
        if station is None:
            self._expected = None
            with torch.compiler.set_stance("force_eager"):  # trees have too many shapes
                return self.model.forward(inputs)
        self._launch(station, inputs)
        return station.logits[: sum(row.logits for row in inputs)]

    def greedy_chain(self, inputs: Sequence[RowInput], k: int) -> list[list[int]] | None:
        """Draft ``k`` tokens per row by argmax, without coming back to the host in between.

        Args:
            inputs: the pending tokens.
            k: drafts per row; the cache is written up to draft ``k - 1``.

        Returns:
            The drafts, or None if a row has so many pending tokens that this is a prefill.
        """
        station = self._chain(inputs, k)
        if station is None:
            return None
        self._launch(station, inputs)
        drafts = station.mailbox.read().tolist()
        return [drafts[row.slot] for row in inputs]

    def run_ahead(self, inputs: Sequence[RowInput], k: int = 0) -> bool:
        """Launch what is expected next: a forward, or with ``k`` a chain. The call with just
        these inputs finds it launched; any other call starts anew, behind it on the device.

        Returns:
            Whether it was launched.
        """
        station = self._chain(inputs, k) if k else self._forward(inputs)
        if station is None:
            return False
        self._launch(station, inputs)
        self._expected = station, inputs
        return True

    def _launch(self, station: Station, inputs: Sequence[RowInput]) -> None:
        expected, self._expected = self._expected, None
        if expected != (station, inputs):
            station.load(inputs)
            station.run()

    def _forward(self, inputs: Sequence[RowInput]) -> Forward | None:
        """The station of a forward; None for a tree."""
        bucket = self.buckets.choose(inputs)
        if bucket is None:
            return None
        station = self._forwards.get(bucket)
        if station is None:
            station = self._forwards[bucket] = Forward(self.model, bucket)
            station.record(self._places.captures)
            self._places.add(station.logits, self.draft_vocabulary)
        return station

    def _chain(self, inputs: Sequence[RowInput], k: int) -> Chain | None:
        """The station of a chain; None behind pending tokens that take a prefill."""
        first = self.buckets.choose(inputs, ahead=k - 1)
        if first is None or first.gathered:
            return None
        station = self._chains.get((first, k))
        if station is None:
            bucket = first._replace(kept=1)
            station = self._chains[first, k] = Chain(self.model, bucket, k, self._places.ranks)
            station.record(self._places.captures)
        return station

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """See ``LanguageModel.keep_path``."""
        self.model.keep_path(slot, start, path)


class Station:
    """Static buffers of one bucket, and a body that runs on them."""

    def __init__(self, model: CausalLM, bucket: Bucket) -> None:
        self._model, self.bucket = model, bucket
        rows, width = bucket.rows, bucket.width
        self._sizes = [rows * width, rows * width, rows * bucket.kept, rows]
        cuda = model.device.type == "cuda"
        self._host = torch.zeros(sum(self._sizes), dtype=torch.long, pin_memory=cuda)
        torch.split(self._host, self._sizes)[1].fill_(model.max_length)  # scratch cells
        self._device = torch.zeros_like(self._host, device=model.device)
        self._inbox = self._host.numpy()
        self.run: Callable[[], None] = self._body

    def load(self, inputs: Sequence[RowInput]) -> None:
        """Lay the inputs out in the host buffer; rows end together, padding stands on the left.

        The buffer's last copy to the device has ended, for its result was read, or it belongs to
        work that nobody waits for and that the next replay does over.
        """
        size, width, _, kept, gathered = self.bucket
        tokens, slots = [0] * (size * width), [0] * size
        cells = [self._model.max_length] * (size * width)
        picked: list[int] = []
        for index, row in enumerate(inputs):
            b = index if gathered else row.slot
            end, n = (b + 1) * width, len(row.tokens)
            tokens[end - n : end] = row.tokens
            cells[end - n : end] = range(row.start, row.start + n)
            slots[b] = row.slot
            picked += range((b + 1) * kept - row.logits, (b + 1) * kept)
        unpicked = [0] * (size * kept - len(picked))
        # One conversion of all: NumPy's price is per call.
        self._inbox[:] = tokens + cells + picked + unpicked + slots

    def record(self, captures: Captures) -> None:
        """Capture the body, on scratch cells."""
        # Prefills of several prompts come in many shapes, and few ever run: not worth their
        # compilation. One prompt is what a slot that has become free brings, again and again.
        several = self.bucket.gathered and self.bucket.rows > 1
        stance = "force_eager" if several else "default"
        with torch.compiler.set_stance(stance):
            self.run = captures.graph(self._body, self._model.device)

    def _body(self) -> None:
        raise NotImplementedError

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, cells, wanted rows and slots, fresh on the device."""
        self._device.copy_(self._host, non_blocking=True)
        tokens, cells, picked, slots = torch.split(self._device, self._sizes)
        shape = self.bucket.rows, self.bucket.width
        return tokens.view(shape), cells.view(shape), picked, slots

    def _logits(
        self, tokens: torch.Tensor, cells: torch.Tensor, rows: slice | torch.Tensor, kept: int
    ) -> torch.Tensor:
        """One forward, ``[rows, kept, columns]``."""
        positions = cells.where(cells < self._model.max_length, 0)
        visible = see_causally(positions, self.bucket.span)
        return self._model.compute(tokens, positions, cells, visible, rows, kept)


class Forward(Station):
    """One forward of a bucket.

    Attributes:
        logits: fp32 ``[rows * kept, columns]``; the wanted rows come first.
    """

    def __init__(self, model: CausalLM, bucket: Bucket) -> None:
        super().__init__(model, bucket)
        shape = bucket.rows * bucket.kept, model.columns
        self.logits = torch.empty(shape, dtype=torch.float32, device=model.device)

    @torch.inference_mode()
    def _body(self) -> None:
        tokens, cells, picked, slots = self._inputs()
        rows = slots if self.bucket.gathered else slice(0, self.bucket.rows)
        logits = self._logits(tokens, cells, rows, self.bucket.kept)
        self.logits.copy_(logits.flatten(0, 1)[picked])


class Chain(Station):
    """K greedy draft steps of a bucket.

    Args:
        model: see ``Station``.
        bucket: see ``Station``.
        k: drafts per row.
        ranks: that draft alike, what rank 0 chooses: each draft is told before the next, for a
            model that borrows the target's embeddings reads its drafts together with the others.

    Attributes:
        mailbox: gets the drafts, int64 ``[rows, k]``.
    """

    def __init__(self, model: CausalLM, bucket: Bucket, k: int, ranks: Ranks) -> None:
        super().__init__(model, bucket)
        self._k, self._ranks = k, ranks
        drafts = torch.empty((bucket.rows, k), dtype=torch.long, device=model.device)
        self.mailbox = Mailbox(drafts)

    @torch.inference_mode()
    def _body(self) -> None:
        tokens, cells, _, _ = self._inputs()
        rows, scratch = slice(0, self.bucket.rows), self._model.max_length
        pruned = self._model.draft_vocabulary
        drafts = []
        for _ in range(self._k):
            logits = self._logits(tokens, cells, rows, 1)
            tokens = self._ranks.decided(largest(logits[:, -1])[:, None])
            if pruned is not None:  # what the model reads next is a target id
                tokens = pruned.target_ids(tokens)
            cells = (cells[:, -1:] + 1).clamp(max=scratch)  # an idle row stays there
            drafts.append(tokens)
        self.mailbox.send(torch.cat(drafts, dim=1))
