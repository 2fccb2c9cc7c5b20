"""Gradients over ranks: what is summed over which axis, and by what it is divided."""

from __future__ import annotations

import torch
from distpool import run_ranks
from torch import nn

from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, finalize_gradients
from megatron.core.mesh import MeshSizes, ParallelState

SHAPE = (3, 4)


def rank_gradient(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def model_with(*marks: str) -> nn.Module:
    """One parameter for each attribute that decides what its gradient is summed over."""
    module = nn.Module()
    for mark in ("plain", *marks):
        param = nn.Parameter(torch.zeros(SHAPE))
        if mark == "expert":
            param.allreduce = False
        elif mark != "plain":
            setattr(param, mark, True)
        module.register_parameter(mark, param)
    return module


def finalize(rank, world, sizes, marks, tokens, reduce_dtype=torch.float32):
    mesh = ParallelState.build(sizes, rank, world)
    module = model_with(*marks)
    ddp = DistributedDataParallel(
        module, mesh.dp_cp, expert_dp_axis=mesh.edp, reduce_dtype=reduce_dtype
    )
    for param in module.parameters():
        param.main_grad.copy_(rank_gradient(rank))
    total = finalize_gradients(ddp, mesh, tokens[rank])
    return total.item(), {name: p.main_grad.clone() for name, p in module.named_parameters()}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_replicas_are_summed_and_divided_by_all_tokens():
    tokens = [5, 0, 3, 4]
    results = run_ranks(finalize, 4, MeshSizes(4), (), tokens)
    expected = sum(rank_gradient(r) for r in range(4)) / 12
    for total, grads in results:
        assert total == 12
        close(grads["plain"], expected)
        assert torch.equal(grads["plain"], results[0][1]["plain"])


def test_context_parallel_ranks_are_replicas_too():
    results = run_ranks(finalize, 4, MeshSizes(4, cp=2), (), [1, 2, 3, 4])
    for total, grads in results:
        assert total == 10
        close(grads["plain"], sum(rank_gradient(r) for r in range(4)) / 10)


def test_only_partial_gradients_are_summed_over_tensor_parallel_ranks():
    marks = ("sequence_parallel", "tensor_model_parallel")
    results = run_ranks(finalize, 4, MeshSizes(4, tp=2), marks, [2, 2, 6, 6])
    for rank, (total, grads) in enumerate(results):
        assert total == 8
        replicas = [rank_gradient(r) for r in (rank % 2, rank % 2 + 2)]
        close(grads["plain"], sum(replicas) / 8)
        close(grads["tensor_model_parallel"], sum(replicas) / 8)
        close(grads["sequence_parallel"], sum(rank_gradient(r) for r in range(4)) / 8)


def test_tied_embeddings_are_summed_over_the_stages_that_hold_them():
    """After the sum over replicas; the middle stage of three has no copy."""
    marks = ("shared_embedding",)
    results = run_ranks(finalize, 3, MeshSizes(3, pp=3), marks, [1, 1, 1])
    for rank, (_, grads) in enumerate(results):
        close(grads["plain"], rank_gradient(rank))
        ends = rank_gradient(0) + rank_gradient(2)
        close(grads["shared_embedding"], rank_gradient(1) if rank == 1 else ends)


def test_experts_are_summed_over_their_own_replicas():
    sizes = MeshSizes(4, ep=2, etp=1)
    results = run_ranks(finalize, 4, sizes, ("expert",), [1, 1, 1, 1])
    for rank, (_, grads) in enumerate(results):
        close(grads["plain"], sum(rank_gradient(r) for r in range(4)) / 4)
        own = [rank_gradient(r) for r in (rank % 2, rank % 2 + 2)]
        close(grads["expert"], sum(own) / 4)


def test_bf16_on_the_wire_rounds_each_addend_and_the_sum():
    (_, grads), _ = run_ranks(finalize, 2, MeshSizes(2), ("expert",), [1, 0], torch.bfloat16)
    parts = [rank_gradient(r).bfloat16() for r in range(2)]
    assert torch.equal(grads["plain"], (parts[0] + parts[1]).float())
    assert torch.equal(grads["expert"], grads["plain"])


def use_facade(rank, world):
    ps.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=1)
    value = torch.tensor([float(rank)])
    torch.distributed.all_reduce(value, group=ps.get_tensor_model_parallel_group())
    answer = (
        value.item(),
        ps.get_tensor_model_parallel_rank(),
        ps.get_data_parallel_rank(),
        ps.get_tensor_model_parallel_src_rank(),
    )
    ps.destroy_model_parallel()
    return answer


def test_the_facade_makes_real_groups():
    assert run_ranks(use_facade, 4) == [(1, 0, 0, 0), (1, 1, 0, 0), (5, 0, 1, 2), (5, 1, 1, 2)]


def sharded(rank, world, sizes, marks, overlap):
    """Gradients by ranges: what each rank keeps, put together from all replicas."""
    mesh = ParallelState.build(sizes, rank, world)
    module = model_with(*marks)
    ddp = DistributedDataParallel(
        module, mesh.dp_cp, sharded=True, bucket_size=1, overlap_reduce=overlap
    )
    for param in module.parameters():
        param.main_grad.copy_(rank_gradient(rank))
    finalize_gradients(ddp, mesh, 1)
    kept = {}
    for name, param in module.named_parameters():
        own = ddp.owned_range(param)
        kept[name] = (own.start, ddp.summed_grad(param).clone().numpy())
    return kept


def joined(results, ranks, name):
    parts = sorted((results[r][name] for r in ranks), key=lambda part: part[0])
    return torch.cat([torch.from_numpy(values) for _, values in parts]).view(SHAPE)


def test_sharded_gradients_of_partial_and_tied_parameters():
    """A tied embedding on two stages: its copies are cut alike, so ranges can be summed."""
    for overlap in (False, True):
        results = run_ranks(sharded, 4, MeshSizes(4, pp=2), ("shared_embedding",), overlap)
        for stage in ((0, 1), (2, 3)):
            total = sum(rank_gradient(r) for r in range(4)) / 2
            close(joined(results, stage, "shared_embedding"), total)
            own = sum(rank_gradient(r) for r in stage) / 2
            close(joined(results, stage, "plain"), own)
        results = run_ranks(sharded, 4, MeshSizes(4, tp=2), ("sequence_parallel",), overlap)
        for replicas in ((0, 2), (1, 3)):
            total = sum(rank_gradient(r) for r in range(4)) / 2
            close(joined(results, replicas, "sequence_parallel"), total)
            own = sum(rank_gradient(r) for r in replicas) / 2
            close(joined(results, replicas, "plain"), own)
