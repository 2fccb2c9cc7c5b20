"""Dense and expert parameters under one optimizer: what a step does does not depend on the layout.

The gradients are given. Each rank gets a share of the global gradient, as if it had seen a part of
the tokens, and one step has to end where a single process ends.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.config import make_config
from megatron.core.distributed import DistributedDataParallel, finalize_gradients
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.optimizer import build_optimizer
from megatron.core.shards import (
    gather_full,
    global_name,
    init_parameter,
    is_expert,
    mark_expert,
    mark_sharded,
    shard_axis,
    take_local,
)
from tests.distpool import run_ranks

EXPERTS, TOKENS = 4, 8
SHAPES = {"router": (EXPERTS, 4), "column": (16, 4), "row": (4, 8), "norm": (4,)}
EXPERT_SHAPE = (12, 4)


class Net(nn.Module):
    """Two stages with parameters of every kind, of which a pipeline rank holds one."""

    def __init__(self, mesh):
        super().__init__()
        stages = range(2) if mesh.pp.size == 1 else [mesh.pp.rank]
        for stage in stages:
            for name, shape in SHAPES.items():
                self.register_parameter(f"{name}{stage}", dense_param(mesh, name, shape))
            experts = EXPERTS // mesh.ep.size
            for local in range(experts):
                param = nn.Parameter(torch.empty(EXPERT_SHAPE[0] // mesh.etp.size, EXPERT_SHAPE[1]))
                mark_expert(param, mesh.ep.rank * experts + local)
                mark_sharded(param, 0, 2)
                self.register_parameter(f"expert{stage}_weight{local}", param)
        self.embedding = nn.Parameter(torch.empty(10, 4))
        self.embedding.shared_embedding = mesh.pp.size > 1
        self.embedding.shared = not mesh.pp.is_first
        for name, param in self.named_parameters():
            init_parameter(param, shard_axis(param, mesh), normal, 1, global_name(name, param))


def dense_param(mesh, name, shape):
    dim, local = {"column": 0, "row": 1}.get(name), list(shape)
    if dim is not None:
        local[dim] //= mesh.tp.size
    param = nn.Parameter(torch.empty(local))
    if dim is not None:
        mark_sharded(param, dim, 2 if name == "column" else 1)
    param.sequence_parallel = name in ("router", "norm") and mesh.tp.size > 1
    return param


def normal(tensor):
    return tensor.normal_()


def shares(mesh, param):
    """The ranks among which the tokens of this parameter's gradient are spread, and this one."""
    if is_expert(param):
        return mesh.edp.size, mesh.edp.rank
    count, place = mesh.dp_cp.size, mesh.dp_cp.rank
    if getattr(param, "sequence_parallel", False):
        count, place = count * mesh.tp.size, place * mesh.tp.size + mesh.tp.rank
    if getattr(param, "shared_embedding", False):
        count, place = count * 2, place * 2 + mesh.embedding.rank
    return count, place


def give_gradient(mesh, name, param, step):
    """This rank's share; shares differ, and are exact in binary."""
    shape = list(param.shape)
    axis = shard_axis(param, mesh)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= axis.size
    generator = torch.Generator().manual_seed(hash_of(global_name(name, param)) + step)
    full = torch.randint(-8, 9, shape, generator=generator) / 8.0
    count, place = shares(mesh, param)
    weight = 2.0 ** -(min(place + 1, count - 1)) if count > 1 else 1.0
    param.main_grad.add_(take_local(full, param, axis.rank, axis.size) * weight * TOKENS)


def hash_of(name):
    return sum(ord(c) * (i + 1) for i, c in enumerate(name))


def train(mesh, steps=2, *, zero=False, bucket=None, wire=torch.float32, **fields):
    cfg = make_config(
        num_layers=1, hidden_size=16, num_attention_heads=1, seq_length=8, mock_data=True,
        train_iters=9, lr=0.1, min_lr=0.1, weight_decay=0.1, clip_grad=0.5,
        log_num_zeros_in_grad=True, **fields,
    )  # fmt: skip
    net = Net(mesh)
    ddp = DistributedDataParallel(
        net, mesh.dp_cp_inner, expert_dp_axis=mesh.edp_inner, outer_axis=mesh.dp_cp_outer,
        expert_outer_axis=mesh.edp_outer, sharded=zero, bucket_size=bucket, reduce_dtype=wire,
    )  # fmt: skip
    optimizer = build_optimizer(cfg, net, mesh, ddp if zero else None)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    done = []
    for step in range(steps):
        ddp.zero_grad_buffer()
        for name, param in net.named_parameters():
            give_gradient(mesh, name, param, step)
        finalize_gradients(ddp, mesh, torch.tensor(TOKENS / mesh.dp_cp.size))
        outcome = optimizer.step()
        done.append((outcome.grad_norm, outcome.num_zeros))
    weights = {
        global_name(name, p): gather_full(p.detach(), p, shard_axis(p, mesh)).numpy()
        for name, p in net.named_parameters()
    }
    return done, optimizer.params_norm(), weights


LAYOUTS = [
    {"ep": 4}, {"ep": 2}, {"ep": 2, "etp": 2}, {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "ep": 4, "etp": 1}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 1, "etp": 2},
    {"tp": 4, "ep": 1, "etp": 1}, {"cp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2},
    {"pp": 2, "tp": 2, "ep": 1, "etp": 1}, {"ep": 1, "optimizer_instances": 2},
    {"ep": 2, "optimizer_instances": 2}, {"ep": 1, "optimizer_instances": 4},
    {"tp": 2, "etp": 2, "optimizer_instances": 2}, {"pp": 2, "optimizer_instances": 2},
]  # fmt: skip
# The gradients have few bits, so that bf16 on the wire loses none.
MODES = [
    {},
    {"zero": True, "bucket": 30, "wire": torch.bfloat16},
    {"zero": True, "optimizer": "sgd", "bucket": 1},
]


def every_layout(rank, world):
    results = []
    for layout in LAYOUTS:
        mesh = ParallelState.build(MeshSizes(world, **layout), rank, world)
        for mode in MODES:
            if layout.get("optimizer_instances", 1) == 1 or mode.get("zero"):
                results.append((layout, mode, train(mesh, **mode)))
    return results


def test_a_step_does_not_depend_on_the_layout():
    """Norm, zeros and clipping count tied, replicated and expert parameters once."""
    expected = {
        name: train(ParallelState.single(), optimizer=name)  # the bucket sizes do not matter
        for name in ("adam", "sgd")
    }
    for results in run_ranks(every_layout, 4, detail=False):
        for layout, mode, (done, norm, weights) in results:
            steps, total, exact = expected[mode.get("optimizer", "adam")]
            for (own, zeros), (other, counted) in zip(done, steps, strict=True):
                assert own == pytest.approx(other, rel=1e-6), (layout, mode)
                assert zeros == counted, (layout, mode)
            assert norm == pytest.approx(total, rel=1e-6), (layout, mode)
            for name, value in weights.items():
                # Weights are about 1, and the norm, by which gradients are scaled, is rounded.
                assert abs(value - exact[name]).max() < 2e-6, (name, layout, mode)
