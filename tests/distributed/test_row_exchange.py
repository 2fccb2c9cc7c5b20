"""Rows between ranks that hold different numbers of them, none included; and their gradients."""

from __future__ import annotations

import pytest
import torch
from distpool import run_ranks

from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.tensor_parallel.row_exchange import (
    exchange_rows,
    gather_rows,
    reduce_scatter_rows,
)

# TABLE[i][j]: rows from rank i to rank j.
TABLE = [[1, 0, 3], [2, 0, 0], [0, 0, 4]]
ROWS = [3, 0, 2]


def rows_of(rank, count):
    return torch.arange(count * 2.0).view(count, 2) + 100 * rank


def exchanged(rank, world):
    axis = ParallelState.build(MeshSizes(world=world, tp=world), rank, world).tp
    sent, received = TABLE[rank], [row[rank] for row in TABLE]
    x = rows_of(rank, sum(sent)).requires_grad_()
    y = exchange_rows(x, sent, received, axis)
    (y * (rank + 1)).sum().backward()
    parts = [rows_of(i, sum(TABLE[i])).split(TABLE[i])[rank] for i in range(world)]
    assert torch.equal(y, torch.cat(parts))
    weights = torch.cat([torch.full((n, 2), j + 1.0) for j, n in enumerate(sent)])
    assert torch.equal(x.grad, weights)


def gathered(rank, world):
    axis = ParallelState.build(MeshSizes(world=world, tp=world), rank, world).tp
    x = rows_of(rank, ROWS[rank]).requires_grad_()
    y = gather_rows(x, ROWS, axis)
    (y * (rank + 1)).sum().backward()
    assert torch.equal(y, torch.cat([rows_of(i, n) for i, n in enumerate(ROWS)]))
    assert torch.equal(x.grad, torch.full_like(x, 6.0))  # 1 + 2 + 3
    whole = rows_of(rank, sum(ROWS)).requires_grad_()
    z = reduce_scatter_rows(whole, ROWS, axis)
    (z * (rank + 1)).sum().backward()
    expected = sum(rows_of(i, sum(ROWS)) for i in range(world)).split(ROWS)[rank]
    assert torch.equal(z, expected)
    weights = torch.cat([torch.full((n, 2), j + 1.0) for j, n in enumerate(ROWS)])
    assert torch.equal(whole.grad, weights)


@pytest.mark.parametrize("case", [exchanged, gathered])
def test_uneven_rows(case):
    run_ranks(case, 3)
