"""Collectives and their gradients on gloo ranks, against the same sums done by hand."""

from __future__ import annotations

import pytest
import torch
from distpool import RankError, run_ranks

from megatron.core.errors import MeshError
from megatron.core.mesh import Axis, MeshSizes, ParallelState
from megatron.core.tensor_parallel import mappings as m

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def tp_axis(rank: int, world: int) -> Axis:
    return ParallelState.build(MeshSizes(world, tp=world), rank, world).tp


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def plain(rank, world):
    axis = tp_axis(rank, world)
    everyone = [values(r, 4, 2, 8) for r in range(world)]
    mine, total = everyone[rank].clone(), sum(everyone)
    torch.testing.assert_close(m.all_reduce(mine, axis), total, rtol=1e-6, atol=1e-6)
    assert torch.equal(mine, everyone[rank])
    assert torch.equal(m.all_reduce(mine, axis, "max"), torch.stack(everyone).amax(0))
    assert torch.equal(m.all_reduce(mine, axis, "min"), torch.stack(everyone).amin(0))
    assert m.all_reduce_(mine, axis) is mine
    torch.testing.assert_close(mine, total, rtol=1e-6, atol=1e-6)
    for dim in (0, 1, 2, -1):
        assert torch.equal(m.all_gather(everyone[rank], axis, dim), torch.cat(everyone, dim))
    for dim in (0, 2, -1):
        part = m.reduce_scatter(everyone[rank], axis, dim)
        torch.testing.assert_close(part, total.chunk(world, dim)[rank], rtol=1e-6, atol=1e-6)
        assert torch.equal(m.split(total, axis, dim), total.chunk(world, dim)[rank])
    strided = everyone[rank].transpose(0, 2)
    assert torch.equal(
        m.all_gather(strided, axis), torch.cat([v.transpose(0, 2) for v in everyone])
    )
    told = m.broadcast(everyone[rank].clone(), axis, src=world - 1)
    assert torch.equal(told, everyone[-1])


@pytest.mark.parametrize("world", [2, 4])
def test_plain_collectives(world):
    run_ranks(plain, world)


def every_type(rank, world):
    axis = tp_axis(rank, world)
    for dtype in DTYPES:
        everyone = [(values(r, 4, 6) * 10).abs().to(dtype) for r in range(world)]
        for dim in (0, 1):
            gathered = m.all_gather(everyone[rank], axis, dim)
            expected = torch.cat([v.float() for v in everyone], dim)
            assert gathered.dtype == dtype
            assert torch.equal(gathered.float(), expected)
        told = m.broadcast(everyone[rank].clone(), axis, src=1)
        assert torch.equal(told.float(), everyone[1].float())


def test_bytes_of_every_type_arrive():
    run_ranks(every_type, 2)


def pairs(rank, world):
    """Each pair's gradient equals autograd's through the same arithmetic on one process.

    The loss is the sum over ranks of <output, weight of the rank>.
    """
    axis = tp_axis(rank, world)
    inputs = [values(r, 4, 8) for r in range(world)]

    def gradient(op, x, weight):
        x = x.clone().requires_grad_()
        y = op(x, axis)
        (y * weight).sum().backward()
        return y.detach(), x.grad

    def close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)

    total = sum(inputs)
    # A replicated input feeds every rank's own branch: its gradient is the sum over branches.
    branch = [values(10 + r, 4, 8) for r in range(world)]
    y, grad = gradient(m.copy_to_region, inputs[0], branch[rank])
    close(y, inputs[0])
    close(grad, sum(branch))
    # Partial sums become one replicated output, whose consumer is the same on every rank.
    same = values(20, 4, 8)
    y, grad = gradient(m.reduce_from_region, inputs[rank], same)
    close(y, total)
    close(grad, same)
    # Shards of the sequence are gathered for different branches.
    wide = [values(30 + r, 4 * world, 8) for r in range(world)]
    y, grad = gradient(m.gather_along_first_dim, inputs[rank], wide[rank])
    close(y, torch.cat(inputs))
    close(grad, sum(wide).chunk(world)[rank])
    # Partial sums are scattered; the consumers see different rows.
    shards = [values(40 + r, 4 // world, 8) for r in range(world)]
    y, grad = gradient(m.reduce_scatter_along_first_dim, inputs[rank], shards[rank])
    close(y, total.chunk(world)[rank])
    close(grad, torch.cat(shards))
    # A replicated tensor is split over rows or columns.
    y, grad = gradient(m.scatter_along_first_dim, inputs[0], shards[rank])
    close(y, inputs[0].chunk(world)[rank])
    close(grad, torch.cat(shards))
    columns = [values(50 + r, 4, 8 // world) for r in range(world)]
    y, grad = gradient(m.scatter_to_region, inputs[0], columns[rank])
    close(y, inputs[0].chunk(world, -1)[rank])
    close(grad, torch.cat(columns, -1))
    # Columns are gathered for one replicated consumer.
    same = values(60, 4, 8 * world)
    y, grad = gradient(m.gather_from_region, inputs[rank], same)
    close(y, torch.cat(inputs, -1))
    close(grad, same.chunk(world, -1)[rank])


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_the_pairs(world):
    run_ranks(pairs, world)


def uneven(rank, world):
    m.reduce_scatter(torch.ones(3, 2), tp_axis(rank, world))


def test_uneven_split_is_refused_on_every_rank():
    with pytest.raises(RankError, match=r"shape along dim 0: got \(3, 2\)"):
        run_ranks(uneven, 2)


def different_shapes(rank, world):
    m.all_reduce(torch.ones(4 + rank), tp_axis(rank, world))


def test_ranks_with_different_shapes_are_caught():
    """Plain gloo lets most ranks return garbage; the test pool has torch compare the calls."""
    with pytest.raises(RankError, match="mismatch"):
        run_ranks(different_shapes, 2)


def test_one_rank_is_the_identity():
    axis = Axis.single("tp")
    x = torch.ones(3, requires_grad=True)
    for op in (
        m.all_reduce,
        m.all_gather,
        m.reduce_scatter,
        m.broadcast,
        m.split,
        m.copy_to_region,
        m.reduce_from_region,
        m.gather_along_first_dim,
        m.reduce_scatter_along_first_dim,
        m.scatter_along_first_dim,
        m.scatter_to_region,
        m.gather_from_region,
    ):
        assert op(x, axis) is x


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float8_e4m3fn, "max"), (torch.bool, "sum"), (torch.float32, "mean")]
)
def test_meaningless_reductions_are_refused_even_on_one_rank(dtype, op):
    with pytest.raises(MeshError, match="reduction: got"):
        m.all_reduce(torch.zeros(2).to(dtype), Axis.single("tp"), op)


def test_scalars_cannot_be_concatenated():
    with pytest.raises(MeshError, match="cannot be split"):
        m.all_gather(torch.tensor(1.0), Axis("tp", 2, 0, (0, 1)))
