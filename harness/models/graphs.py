"""A causal LM run in static shapes: captured once as CUDA graphs, replayed ever after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness.clock import Clock
from harness.models.buckets import Bucket, Buckets
from harness.models.causal_lm import CausalLM, see_causally
from harness.models.language_model import RowInput

WARM_UPS = 2
"""Runs before a capture: they allocate, choose kernels and compile."""


class StaticLM:
    """``CausalLM`` in static shapes; satisfies ``LanguageModel`` and adds ``greedy_chain``.

    On CUDA each shape is a graph: the copy of its inputs from pinned memory, the forward with
    its cache writes, and the choice of the wanted rows. Elsewhere the same code runs as it is,
    which is how it is tested. A returned tensor is overwritten by the next forward.

    Args:
        model: the model and its cache.
        decode_width: most tokens that a decode step feeds per row.
        clock: takes the time of captures out of the step that needs them, as ``capture``.
        compile: run torch.compile on the decoder layers first.

    Attributes:
        graphs: captured shapes so far.
        capture_s: time to warm up, compile and capture them, s.
    """

    def __init__(
        self, model: CausalLM, decode_width: int, clock: Clock, compile: bool = False
    ) -> None:
        self.model = model
        self.vocab_size, self.device = model.vocab_size, model.device
        self.max_length = model.max_length
        self.buckets = Buckets(model.slots, model.max_length, decode_width)
        self.graphs, self.capture_s = 0, 0.0
        self._clock = clock
        self._forwards: dict[Bucket, Forward] = {}
        self._chains: dict[tuple[Bucket, int], Chain] = {}
        if compile:
            compile_layers(model.model, one_row=model.slots == 1)

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """See ``LanguageModel.forward``."""
        bucket = self.buckets.choose(inputs)
        if bucket is None:
            return self.model.forward(inputs)
        if bucket not in self._forwards:
            self._forwards[bucket] = Forward(self.model, bucket)
            self._record(self._forwards[bucket])
        station = self._forwards[bucket]
        rows = station.load(inputs)
        station.run()
        return station.logits[:rows]

    @torch.inference_mode()
    def greedy_chain(self, inputs: Sequence[RowInput], k: int) -> list[list[int]] | None:
        """Draft ``k`` tokens per row by argmax, without coming back to the host in between.

        Args:
            inputs: pending tokens, at most two per row.
            k: drafts per row; the cache is written up to draft ``k - 1``.

        Returns:
            The drafts, or None if a row has more than two pending tokens.
        """
        if max(len(row.tokens) for row in inputs) > 2:
            return None
        end = max(row.start + len(row.tokens) for row in inputs) + k - 1
        first = self.buckets.choose(inputs)
        assert first is not None
        bucket = Bucket(first.rows, 2, self.buckets.span(end), 1, gathered=False)
        if (bucket, k) not in self._chains:
            self._chains[bucket, k] = Chain(self.model, bucket, k)
            self._record(self._chains[bucket, k])
        station = self._chains[bucket, k]
        station.load(inputs)
        station.run()
        drafts = station.drafts.tolist()  # waits for the device
        return [drafts[row.slot] for row in inputs]

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """See ``LanguageModel.keep_path``."""
        self.model.keep_path(slot, start, path)

    def _record(self, station: Station) -> None:
        with self._clock.span("capture") as span:
            station.record()
        self.graphs += 1
        self.capture_s += span.us / 1e6


class Station:
    """Static buffers of one bucket, and a body that runs on them.

    Attributes:
        tokens, cells: ``[rows, width]`` in pinned memory, as NumPy sees it.
    """

    def __init__(self, model: CausalLM, bucket: Bucket) -> None:
        self._model, self.bucket = model, bucket
        rows, width = bucket.rows, bucket.width
        self._sizes = [rows * width, rows * width, rows * bucket.kept, rows]
        cuda = model.device.type == "cuda"
        host = torch.zeros(sum(self._sizes), dtype=torch.long, pin_memory=cuda)
        self._host, self._device = host, torch.zeros_like(host, device=model.device)
        parts = [part.numpy() for part in torch.split(host, self._sizes)]
        self.tokens, self.cells = parts[0].reshape(rows, width), parts[1].reshape(rows, width)
        self._picked, self._slots = parts[2], parts[3]
        self._clear()
        self.run: Callable[[], None] = self._body

    def load(self, inputs: Sequence[RowInput]) -> int:
        """Lay the inputs out in the host buffer; rows end together, padding stands on the left.

        Returns:
            The number of wanted rows of logits.
        """
        self._clear()
        kept, count = self.bucket.kept, 0
        for index, row in enumerate(inputs):
            b = index if self.bucket.gathered else row.slot
            n = len(row.tokens)
            self.tokens[b, -n:] = row.tokens
            self.cells[b, -n:] = range(row.start, row.start + n)
            self._slots[b] = row.slot
            wanted = range((b + 1) * kept - row.logits, (b + 1) * kept)
            self._picked[count : count + row.logits] = wanted
            count += row.logits
        return count

    def record(self) -> None:
        """Warm up on scratch cells, then capture; without CUDA the body is run directly."""
        if self._model.device.type != "cuda":
            return
        # Prefills come in many shapes and keep the device busy: not worth a compilation.
        stance = "force_eager" if self.bucket.gathered else "default"
        with torch.compiler.set_stance(stance):
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        self.run = graph.replay

    def _body(self) -> None:
        raise NotImplementedError

    def _clear(self) -> None:
        self.tokens[:] = 0
        self.cells[:] = self._model.max_length  # scratch

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, cells, wanted rows and slots, fresh on the device."""
        self._device.copy_(self._host, non_blocking=True)
        tokens, cells, picked, slots = torch.split(self._device, self._sizes)
        shape = self.bucket.rows, self.bucket.width
        return tokens.view(shape), cells.view(shape), picked, slots

    def _logits(
        self, tokens: torch.Tensor, cells: torch.Tensor, rows: slice | torch.Tensor, kept: int
    ) -> torch.Tensor:
        """One forward, ``[rows, kept, vocab]``."""
        positions = cells.where(cells < self._model.max_length, 0)
        visible = see_causally(positions, self.bucket.span)
        return self._model.compute(tokens, positions, cells, visible, rows, kept)


class Forward(Station):
    """One forward of a bucket.

    Attributes:
        logits: fp32 ``[rows * kept, vocab]``; the wanted rows come first.
    """

    logits: torch.Tensor

    def _body(self) -> None:
        tokens, cells, picked, slots = self._inputs()
        rows = slots if self.bucket.gathered else slice(0, self.bucket.rows)
        logits = self._logits(tokens, cells, rows, self.bucket.kept)
        self.logits = logits.flatten(0, 1)[picked].float()


class Chain(Station):
    """K greedy draft steps of a bucket.

    Attributes:
        drafts: ``[rows, k]`` on the device.
    """

    drafts: torch.Tensor

    def __init__(self, model: CausalLM, bucket: Bucket, k: int) -> None:
        super().__init__(model, bucket)
        self._k = k

    def _body(self) -> None:
        tokens, cells, _, _ = self._inputs()
        rows, scratch = slice(0, self.bucket.rows), self._model.max_length
        drafts = []
        for _ in range(self._k):
            logits = self._logits(tokens, cells, rows, 1)
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            cells = (cells[:, -1:] + 1).clamp(max=scratch)  # an idle row stays there
            drafts.append(tokens)
        self.drafts = torch.cat(drafts, dim=1)


def compile_layers(model: torch.nn.Module, one_row: bool) -> None:
    """Put torch.compile under the decoder layers: one compilation per shape serves them all.

    Args:
        model: the causal LM.
        one_row: batches have one row, so matrix products may become reductions that fuse with
            their neighbours. Inductor does that together with a search that takes its time.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._dynamo.config.recompile_limit = 64
    options = {"coordinate_descent_tuning": one_row}
    for layer in model.get_decoder().layers:  # type: ignore[operator]
        layer.compile(dynamic=False, options=options)
