"""Which PyTorch attention is fastest for a captured decode step over a ragged cache.

    python -m experiments.decode_attention

Shapes are those of the default target; rows have different lengths, so a mask or lengths come
along. Every variant is captured in a CUDA graph of ``REPETITIONS`` calls, each on keys and values
of its own, and replayed; the cache writes of the engine are left out. Without CUDA there are no
times, and the tables show by how much each variant differs from fp32 math; where one differs
too much the command fails. Prints tables and writes ``decode_attention.json`` (and the tables as
Markdown) below ``out``. Settings (``name=value``): ``rows``, ``widths`` (query tokens per row),
``spans`` (cells that are read), ``flex`` (spans at which FlexAttention, which takes seconds to
compile each shape, runs), ``out``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.study import Study, failure, run_study
from harness.captures import Captures
from harness.clock import Clock
from harness.models.attention import (
    mask_by_head,
    mask_by_position,
    ragged_attention,
)
from harness.models.causal_lm import see_causally
from harness.results.table import NONE, Table, print_tables

DEFAULTS = {
    "rows": "1,8,32",
    "widths": "1,5,16",
    "spans": "512,781,1024,2048",
    "flex": "1024",
}
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
GROUPS = HEADS // KV_HEADS
REPETITIONS = 30
"""Calls per graph: the layers of the default target."""
REPLAYS = 20
L2_BYTES = 256 * 2**20
"""Written before each replay: more than any cache of a device holds."""
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Largest error of an output, whose values are about 0.1."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of the batch, query tokens per row, and cells that are read."""

    rows: int
    width: int
    span: int


@dataclass(frozen=True, slots=True)
class Case:
    """The tensors of one shape.

    Attributes:
        query: ``[B, heads, T, D]``.
        keys, values: ``[repetitions, B, kv_heads, S, D]``.
        positions: ``[B, T]``, the cell of each query token, the last ones of its row.
        visible: bool ``[B, T, S]``.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor


Call = Callable[[int], torch.Tensor]
"""The attention of one repetition, ``[B, T, heads, D]``."""
Variant = Callable[[Case], Call]
"""Prepares what a step would prepare once for all layers: masks and lengths."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a variant came to.

    Attributes:
        us: time of a call, median of the replays; None without CUDA.
        max_error: largest difference from fp32 math.
        failed: why it cannot run; empty otherwise.
    """

    us: float | None = None
    max_error: float | None = None
    failed: str = ""

    @property
    def cell(self) -> str:
        """The time, the error where there is none, or the class of the failure."""
        if self.failed:
            return self.failed.partition(":")[0]
        return f"{self.max_error:.0e}" if self.us is None else f"{self.us:.1f}"


class Written:
    """Stands in for ``RaggedLayer``: the new keys and values are in the cache already."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def store(self, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RaggedLayer.store``."""
        return self.keys, self.values


def engine(by_head: bool) -> Variant:
    """``ragged_attention``: on CUDA two matrix products and a softmax, or cuDNN by head."""

    def prepare(case: Case) -> Call:
        dtype = case.query.dtype
        mask = (
            mask_by_head(case.visible, HEADS, dtype)
            if by_head
            else mask_by_position(case.visible, GROUPS, dtype)
        )

        def call(repetition: int) -> torch.Tensor:
            keys, values = case.keys[repetition], case.values[repetition]
            module = torch.nn.Module()
            module.ragged_layer = Written(keys, values)  # type: ignore[assignment]
            return ragged_attention(module, case.query, keys, values, mask)[0]

        return call

    return prepare


def sdpa(layout: str, backend: SDPBackend) -> Variant:
    """``F.scaled_dot_product_attention`` with a mask.

    Args:
        layout: of the query heads that share a key head: ``grouped`` side by side as more query
            tokens, ``gqa`` as ``enable_gqa`` takes them, ``repeated`` with a copy of the keys
            and values for each, made in the timed part.
        backend: the only one that is allowed.
    """

    def prepare(case: Case) -> Call:
        batch, heads, width, size = case.query.shape
        groups = GROUPS if layout == "grouped" else 1
        mask = mask_by_position(case.visible, groups, case.query.dtype)

        def call(repetition: int) -> torch.Tensor:
            query, keys, values = case.query, case.keys[repetition], case.values[repetition]
            if layout == "grouped":
                query = query.reshape(batch, KV_HEADS, GROUPS * width, size)
            elif layout == "repeated":
                keys, values = (each.repeat_interleave(GROUPS, 1) for each in (keys, values))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, enable_gqa=layout == "gqa"
                )
            return out.reshape(batch, heads, width, size).transpose(1, 2).contiguous()

        return call

    return prepare


def flex(case: Case) -> Call:
    """FlexAttention with a block mask from the lengths; compiled on CUDA."""
    (batch, width), span, positions = case.positions.shape, case.keys.shape[-2], case.positions

    def sees(
        row: torch.Tensor, _: torch.Tensor, token: torch.Tensor, cell: torch.Tensor
    ) -> torch.Tensor:
        return cell <= positions[row, token]

    mask = create_block_mask(sees, batch, None, width, span, device=positions.device)
    torch.compiler.reset()  # each shape for itself: none is made dynamic, none runs uncompiled
    attend: Any = flex_attention
    if positions.is_cuda:
        attend = torch.compile(flex_attention, dynamic=False)

    def call(repetition: int) -> torch.Tensor:
        keys, values = case.keys[repetition], case.values[repetition]
        out: torch.Tensor = attend(case.query, keys, values, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    return call


def varlen(case: Case) -> Call:
    """FlashAttention over packed rows, as a cache in its layout would hold them: no mask."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (younger than the rest)

    batch, heads, width, size = case.query.shape
    lengths = (case.positions[:, -1] + 1).tolist()
    keys, values = (
        [
            torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(each, lengths, strict=True)])
            for each in cache
        ]
        for cache in (case.keys, case.values)
    )
    starts = torch.tensor([0, *lengths], device=case.query.device).cumsum(0).int()
    query_starts = torch.arange(batch + 1, device=case.query.device).int() * width
    query = case.query.transpose(1, 2).reshape(batch * width, heads, size)
    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal, rows end together
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True

    def call(repetition: int) -> torch.Tensor:
        out = varlen_attn(
            query,
            keys[repetition],
            values[repetition],
            query_starts,
            starts,
            width,
            max(lengths),
            **options,
        )
        assert isinstance(out, torch.Tensor)
        return out.view(batch, width, heads, size)

    return call


VARIANTS: dict[str, Variant] = {
    "engine, by head": engine(by_head=True),
    "engine, products": engine(by_head=False),
    **{
        f"{name}, {layout}": sdpa(layout, backend)
        for name, backend in {
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }.items()
        for layout in ("grouped", "gqa", "repeated")
    },
    "flex": flex,
    "varlen": varlen,
}


def main(arguments: list[str]) -> None:
    study = Study.begin("decode_attention", arguments, DEFAULTS)
    results: dict[str, Any] = {"shapes": []}
    numbers = {name: [int(n) for n in text.split(",")] for name, text in study.settings.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables, wrong = [], set()
    for rows in numbers["rows"]:
        measured: dict[Shape, dict[str, Result]] = {}
        for width, span in product(numbers["widths"], numbers["spans"]):
            shape = Shape(rows, width, span)
            names = [name for name in VARIANTS if name != "flex" or span in numbers["flex"]]
            measured[shape] = measure(shape, names, device)
            wrong |= disagreeing(measured[shape], device)
            record = {name: asdict(result) for name, result in measured[shape].items()}
            results["shapes"].append({**asdict(shape), "variants": record})
        tables.append(as_table(rows, measured))
        print_tables(tables[-1:])
    study.write(tables, results)
    if wrong:
        sys.exit(f"error: {', '.join(sorted(wrong))}: other values than fp32 math; see max_error")


@torch.no_grad()
def measure(shape: Shape, names: list[str], device: torch.device) -> dict[str, Result]:
    """Every variant on one shape; one that cannot run says why."""
    case = make_case(shape, device)
    expected = reference(case)
    results = {}
    for name in names:
        try:
            call = VARIANTS[name](case)
            max_error = float((call(0).float() - expected).abs().max())
            us = captured_us(call, len(case.keys)) if device.type == "cuda" else None
            results[name] = Result(us, max_error)
        except Exception as error:  # whatever it is, the variant is no candidate here
            results[name] = Result(failed=failure(error))
    return results


def make_case(shape: Shape, device: torch.device) -> Case:
    """Random tensors; row 0 fills the span, the others end up to half of it earlier."""
    torch.manual_seed(0)
    rows, width, span = shape.rows, shape.width, shape.span
    dtype = DTYPES[device.type]
    cache = (REPETITIONS if device.type == "cuda" else 1, rows, KV_HEADS, span, HEAD_DIM)
    lengths = span - torch.arange(rows, device=device) * 37 % (span // 2)
    positions = lengths[:, None] - width + torch.arange(width, device=device)
    return Case(
        query=torch.randn(rows, HEADS, width, HEAD_DIM, device=device, dtype=dtype),
        keys=torch.randn(cache, device=device, dtype=dtype),
        values=torch.randn(cache, device=device, dtype=dtype),
        positions=positions,
        visible=see_causally(positions, span),
    )


def reference(case: Case) -> torch.Tensor:
    """Attention of repetition 0 in fp32, written out, ``[B, T, heads, D]``."""
    query = case.query.float()
    keys, values = (
        each[0].float().repeat_interleave(GROUPS, 1) for each in (case.keys, case.values)
    )
    scores = query @ keys.transpose(-1, -2) * HEAD_DIM**-0.5  # [B, heads, T, S]
    weights = scores.masked_fill(~case.visible[:, None], float("-inf")).softmax(-1)
    out: torch.Tensor = (weights @ values).transpose(1, 2)
    return out


def captured_us(call: Call, repetitions: int) -> float:
    """Time of one call in a graph of all repetitions, median of the replays, µs.

    Raises:
        RuntimeError: the call cannot be captured.
    """

    def body() -> None:
        for repetition in range(repetitions):
            call(repetition)

    replay = Captures(Clock()).graph(body, torch.device("cuda"))
    others = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(REPLAYS):
        others.zero_()  # in a real step, weights and other layers have pushed the cache out of L2
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repetitions)
    return median(times)


def disagreeing(results: dict[str, Result], device: torch.device) -> set[str]:
    """The variants whose values are not those of fp32 math."""
    bound = TOLERANCE[DTYPES[device.type]]
    return {
        name
        for name, result in results.items()
        if result.max_error is not None and not result.max_error <= bound
    }


def as_table(rows: int, measured: dict[Shape, dict[str, Result]]) -> Table:
    """One row per variant, one column per shape."""
    lines = []
    for name in VARIANTS:
        results = [each.get(name, Result(failed=NONE)) for each in measured.values()]
        errors = [each.max_error for each in results if each.max_error is not None]
        worst = f"{max(errors):.0e}" if errors else NONE
        lines.append((name, *(each.cell for each in results), worst))
    shown = "µs per call" if torch.cuda.is_available() else "largest difference from fp32 math"
    return Table(
        title=f"{rows} rows, {shown}",
        headers=("variant", *(f"{each.width} of {each.span}" for each in measured), "max error"),
        docs=(
            "who computes the attention",
            *(f"{each.width} tokens per row, {each.span} cells" for each in measured),
            "largest difference from fp32 math",
        ),
        rows=tuple(lines),
    )


if __name__ == "__main__":
    run_study(main)
