"""Exchange of rows between ranks that hold different numbers of them.

All functions take the numbers of rows as plain integers, which every rank knows beforehand, and can
be differentiated: the gradient takes the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core import wire
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather, reduce_scatter

Rows = Sequence[int]


def exchange_rows(x: torch.Tensor, sent: Rows, received: Rows, axis: Axis) -> torch.Tensor:
    """Send a run of rows to each rank and receive one from each.

    Args:
        x: `[sum(sent), ...]`, the rows for the first rank of the axis in front.
        sent: Rows for each rank.
        received: Rows from each rank.
        axis: Ranks that take part.

    Returns:
        `[sum(received), ...]`, the rows of the first rank in front.
    """
    return x if axis.size == 1 else _exchange(x, tuple(sent), tuple(received), axis)


def gather_rows(x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
    """Concatenate every rank's rows; the gradients of all ranks are summed on the way back.

    Args:
        x: `[rows[axis.rank], ...]`.
        rows: Rows of each rank.
        axis: Ranks that take part.

    Returns:
        `[sum(rows), ...]`.
    """
    return x if axis.size == 1 else _gather(x, tuple(rows), axis)


def reduce_scatter_rows(x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
    """Sum over the ranks and keep this rank's rows; the inverse of `gather_rows`.

    Args:
        x: `[sum(rows), ...]`.
        rows: Rows that each rank keeps.
        axis: Ranks that take part.

    Returns:
        `[rows[axis.rank], ...]`.
    """
    return x if axis.size == 1 else _reduce_scatter(x, tuple(rows), axis)


def _all_to_all(x: torch.Tensor, sent: Rows, received: Rows, axis: Axis) -> torch.Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    wire.all_to_all(out, x.contiguous(), axis, received=received, sent=sent)
    return out


def _gather_uneven(x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
    """Gather blocks of one size, filled up with zeros, and cut them to their own."""
    most = max(rows)
    block = x.new_zeros((most, *x.shape[1:]))
    block[: x.shape[0]] = x
    gathered = all_gather(block, axis).view(axis.size, *block.shape)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def _reduce_scatter_uneven(x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
    blocks = x.new_zeros((axis.size, max(rows), *x.shape[1:]))
    for block, part in zip(blocks, torch.split(x, list(rows)), strict=True):
        block[: part.shape[0]] = part
    return reduce_scatter(blocks.flatten(0, 1), axis)[: rows[axis.rank]]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: Rows, received: Rows, axis: Axis) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _all_to_all(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.axis), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
        ctx.rows, ctx.axis = rows, axis
        return _gather_uneven(x, rows, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduce_scatter_uneven(grads[0], ctx.rows, ctx.axis), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
        ctx.rows, ctx.axis = rows, axis
        return _reduce_scatter_uneven(x, rows, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gather_uneven(grads[0], ctx.rows, ctx.axis), None, None


_exchange: Callable[..., torch.Tensor] = _Exchange.apply
_gather: Callable[..., torch.Tensor] = _Gather.apply
_reduce_scatter: Callable[..., torch.Tensor] = _ReduceScatter.apply
