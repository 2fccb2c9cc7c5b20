"""Transfers of a linear layer while it multiplies (`--tp-comm-overlap`).

Rows travel between each two ranks, one message each way at a time. What runs meanwhile:

| switch | transfer | product meanwhile |
|---|---|---|
| `ag` | gather: input; output gradient of a row-parallel layer | of the rows that are here |
| `rs` | sum and scatter: output of a row-parallel layer | of the rows that stay here |
| `rs_dgrad` | the same: input gradient of a column-parallel layer | the same, then `dw` |
| `bulk_dgrad` | gather: input of a column-parallel layer again, for `dw` | all of `dx` |
| `bulk_wgrad` | sum and scatter: input gradient of a column-parallel layer | all of `dw` |

Rows of a product do not depend on each other, and sums over ranks run in rank order, so the result
is that of a CPU run without overlap, unless the BLAS adds up a row in another order when there are
fewer rows (MKL does, up to 128). NCCL's own reduce-scatter has an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatron.core.fp8.comm import (
    PLAIN,
    Transfers,
    from_wire,
    is_uniform,
    packing_of,
    tensor_of,
    to_wire,
)
from megatron.core.fp8.gemm import Operand, Product, ready, ready_dtype
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import (
    PairwiseSum,
    check_divisible,
    start_gather_steps,
)
from megatron.core.wire import Pending

if TYPE_CHECKING:
    from megatron.config import RunConfig


@dataclass(frozen=True)
class Overlapped(Transfers):
    """Transfers behind products.

    Attributes:
        ag: Multiply rows as they arrive.
        rs: Send results as they are made.
        rs_dgrad: The same for input gradients; `bulk_wgrad` then has nothing left to do.
        bulk_dgrad: Fetch the input again behind the input gradient.
        bulk_wgrad: Send the input gradient behind the weight gradient.
    """

    ag: bool = True
    rs: bool = True
    rs_dgrad: bool = False
    bulk_dgrad: bool = True
    bulk_wgrad: bool = True

    def gather_then_multiply(
        self, rows: Operand, axis: Axis, product: Product
    ) -> tuple[torch.Tensor, Callable[[], Operand]]:
        """See the base class."""
        if not self.ag:
            return super().gather_then_multiply(rows, axis, product)
        gathering = _Gathering(rows, axis, product.out_dtype.itemsize)
        product = product.for_parts()
        count = rows.shape[0]
        shape = (axis.size * count, product.width)
        out = tensor_of(rows).new_empty(shape, dtype=product.out_dtype)
        for index in gathering.order():
            product(gathering.part(index), out[index * count : (index + 1) * count])
        return out, gathering.whole

    def multiply_then_scatter(self, rows: Operand, axis: Axis, product: Product) -> torch.Tensor:
        """See the base class."""
        if not self.rs:
            return super().multiply_then_scatter(rows, axis, product)
        return _send_parts(rows, axis, product).finish()

    def start_input_grad(
        self, rows: Operand, axis: Axis, product: Product
    ) -> Callable[[], torch.Tensor]:
        """See the base class."""
        if self.rs_dgrad:
            return _send_parts(rows, axis, product).finish
        if self.bulk_wgrad:
            partial = product(rows)
            check_divisible(partial, axis, 0)
            parts = partial.chunk(axis.size)
            return PairwiseSum(parts[0], axis, parts).finish
        return super().start_input_grad(rows, axis, product)

    def start_gather(self, rows: Operand, axis: Axis, itemsize: int = 2) -> Callable[[], Operand]:
        """See the base class."""
        if not self.bulk_dgrad:
            return super().start_gather(rows, axis, itemsize)
        return _Gathering(rows, axis, itemsize).whole


class _Gathering:
    """Every rank's rows, arriving.

    Args:
        rows: This rank's `[m, K]`.
        axis: Ranks that hold the others.
        itemsize: As for `gather_rows`.
    """

    def __init__(self, rows: Operand, axis: Axis, itemsize: int) -> None:
        self._axis, self._rows, self._count = axis, rows, rows.shape[0]
        local = to_wire(rows)
        self._lines = local.shape[0]
        self._wire = torch.empty(
            (axis.size * self._lines, local.shape[1]), dtype=local.dtype, device=local.device
        )
        self._steps: list[Pending] = start_gather_steps(
            local, self._wire, axis.packed(packing_of(rows, itemsize))
        )
        # What arrives is multiplied where it lies, or converted into here first.
        dtype = ready_dtype(rows)
        self._ready: torch.Tensor | None = None
        if dtype.itemsize != local.dtype.itemsize:
            shape = (axis.size * self._count, rows.shape[1])
            self._ready = torch.empty(shape, dtype=dtype, device=local.device)
        self._there: set[int] = set()

    def order(self) -> list[int]:
        """Indices of the ranks in the order in which their rows arrive, the own one first."""
        return [(self._axis.rank - step) % self._axis.size for step in range(self._axis.size)]

    def part(self, index: int) -> Operand:
        """Rows of one rank, `[m, K]`, ready to be multiplied; waits until they are there."""
        span = slice(index * self._count, (index + 1) * self._count)
        if index not in self._there:
            step = (self._axis.rank - index) % self._axis.size
            if step and self._steps:
                self._steps[step - 1].wait()
            if self._ready is not None:
                lines = self._wire[index * self._lines : (index + 1) * self._lines]
                rows = from_wire(lines, self._rows) if step else self._rows
                self._ready[span] = tensor_of(rows if is_uniform(rows) else ready(rows))
            self._there.add(index)
        return self._like_own(span)

    def whole(self) -> Operand:
        """All rows, `[m * axis.size, K]`, ready to be multiplied."""
        for index in self.order():
            self.part(index)
        return self._like_own(slice(None))

    def _like_own(self, span: slice) -> Operand:
        if self._ready is None:
            high = max(1, self._count // max(1, self._lines))  # rows of a line
            lines = slice(span.start and span.start // high, span.stop and span.stop // high)
            return from_wire(self._wire[lines], self._rows)
        if not isinstance(self._rows, QuantizedTensor):
            return self._ready[span]
        # Values times their scales, where there is a scale for each block.
        return replace(self._rows, data=self._ready[span], folded=not is_uniform(self._rows))


def _send_parts(rows: Operand, axis: Axis, product: Product) -> PairwiseSum:
    """Multiply the rows of each rank and send them there; the own ones come last."""
    check_divisible(tensor_of(rows), axis, 0)
    product = product.for_parts()
    count = rows.shape[0] // axis.size
    like = tensor_of(rows).new_empty((count, product.width), dtype=product.out_dtype)
    total = PairwiseSum(like, axis)
    for index in total.order():
        total.send(index, product(_rows_of(rows, index * count, count)))
    return total


def _rows_of(rows: Operand, start: int, count: int) -> Operand:
    span = slice(start, start + count)
    if not isinstance(rows, QuantizedTensor):
        return rows[span]
    scales = rows.scale_inv if is_uniform(rows) else rows.scale_inv[span]
    return replace(rows, data=rows.data[span], scale_inv=scales)


def transfers_of(config: RunConfig) -> Transfers:
    """How the layers of a run transfer their rows."""
    if not config.tp_comm_overlap:
        return PLAIN
    return Overlapped(
        ag=config.tp_comm_overlap_ag,
        rs=config.tp_comm_overlap_rs,
        rs_dgrad=config.tp_comm_overlap_rs_dgrad,
        bulk_dgrad=config.tp_comm_bulk_dgrad,
        bulk_wgrad=config.tp_comm_bulk_wgrad,
    )


def parts_in_use(config: RunConfig) -> str:
    """What `--tp-comm-overlap` overlaps in a run, by the names of its switches."""
    # Where weight gradients are put off, nothing of theirs runs beside the input gradients.
    beside = config.pipeline_schedule != "zb-h1"
    names = {
        "ag": config.tp_comm_overlap_ag,
        "rs": config.tp_comm_overlap_rs,
        "rs-dgrad": config.tp_comm_overlap_rs_dgrad,
        "bulk-dgrad": config.tp_comm_bulk_dgrad and beside,
        "bulk-wgrad": config.tp_comm_bulk_wgrad and beside and not config.tp_comm_overlap_rs_dgrad,
    }
    return ", ".join(name for name, on in names.items() if on)
