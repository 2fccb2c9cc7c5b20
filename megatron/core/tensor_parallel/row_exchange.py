"""Exchange of rows between ranks that hold different numbers of them.

All functions take the numbers of rows as plain integers, which every rank knows beforehand, and can
be differentiated: the gradient takes the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron.core import wire
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_gather, reduce_scatter, with_adjoint

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
    sent, received = tuple(sent), tuple(received)
    return with_adjoint(
        x, axis, partial(_all_to_all, sent, received), partial(_all_to_all, received, sent)
    )


def gather_rows(x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
    """Concatenate every rank's rows; the gradients of all ranks are summed on the way back.

    Args:
        x: `[rows[axis.rank], ...]`.
        rows: Rows of each rank.
        axis: Ranks that take part.

    Returns:
        `[sum(rows), ...]`.
    """
    rows = tuple(rows)
    return with_adjoint(x, axis, partial(_gather, rows), partial(_reduce_scatter, rows))


def reduce_scatter_rows(x: torch.Tensor, rows: Rows, axis: Axis) -> torch.Tensor:
    """Sum over the ranks and keep this rank's rows; the inverse of `gather_rows`.

    Args:
        x: `[sum(rows), ...]`.
        rows: Rows that each rank keeps.
        axis: Ranks that take part.

    Returns:
        `[rows[axis.rank], ...]`.
    """
    rows = tuple(rows)
    return with_adjoint(x, axis, partial(_reduce_scatter, rows), partial(_gather, rows))


def _all_to_all(sent: Rows, received: Rows, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    wire.all_to_all(out, x.contiguous(), axis, received=received, sent=sent)
    return out


def _gather(rows: Rows, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Gather blocks of one size, filled up with zeros, and cut them to their own."""
    most = max(rows)
    block = x.new_zeros((most, *x.shape[1:]))
    block[: x.shape[0]] = x
    gathered = all_gather(block, axis).view(axis.size, *block.shape)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def _reduce_scatter(rows: Rows, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    blocks = x.new_zeros((axis.size, max(rows), *x.shape[1:]))
    for block, part in zip(blocks, torch.split(x, list(rows)), strict=True):
        block[: part.shape[0]] = part
    return reduce_scatter(blocks.flatten(0, 1), axis)[: rows[axis.rank]]
