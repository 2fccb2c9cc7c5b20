"""Where the parts of a sharded parameter lie, and that their initial values ignore the layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core import shards
from megatron.core.errors import MeshError
from megatron.core.mesh import Axis, MeshSizes, ParallelState
from megatron.core.shards import (
    global_name,
    global_shape,
    init_parameter,
    is_counted_here,
    is_expert,
    local_rectangles,
    mark_expert,
    mark_sharded,
    replica_axis,
    shard_axis,
    take_local,
)


def tp_axis(rank: int, size: int) -> Axis:
    return Axis("tp", size, rank, tuple(range(size)))


def local_param(full_shape, dim, stride, size, dtype=torch.float32):
    shape = list(full_shape)
    shape[dim] //= size
    param = nn.Parameter(torch.empty(shape, dtype=dtype))
    mark_sharded(param, dim, stride)
    return param


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (0, 2), (1, 1), (1, 2), (-1, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rectangles_cover_the_global_tensor_once(dim, stride, size):
    full = torch.arange(16 * 24.0).view(16, 24)
    rebuilt = torch.full_like(full, -1)
    seen = torch.zeros_like(full)
    for rank in range(size):
        param = local_param(full.shape, dim, stride, size)
        local = take_local(full, param, rank, size)
        for rectangle in local_rectangles(param, tp_axis(rank, size)):
            assert local[rectangle.local].shape == rectangle.shape
            rebuilt[rectangle.window] = local[rectangle.local]
            seen[rectangle.window] += 1
    assert torch.equal(rebuilt, full)
    assert torch.equal(seen, torch.ones_like(seen))
    assert global_shape(param, size) == (16, 24)


def test_gated_layer_holds_its_gate_above_its_up_rows():
    """Global [gate; up]; rank r holds [gate_r; up_r]."""
    full = torch.cat([torch.arange(4.0), 100 + torch.arange(4.0)])
    param = local_param(full.shape, 0, 2, 2)
    assert take_local(full, param, 1, 2).tolist() == [2, 3, 102, 103]


def test_replicated_parameters_are_whole_everywhere():
    param = nn.Parameter(torch.randn(3, 2))
    (rectangle,) = local_rectangles(param, tp_axis(1, 4))
    assert rectangle.shape == (3, 2)
    assert rectangle.offset == (0, 0)
    assert global_shape(param, 4) == (3, 2)
    full = torch.randn(3, 2)
    assert take_local(full, param, 1, 4) is full


def test_only_the_global_shape_can_be_split():
    with pytest.raises(MeshError, match="global shape is"):
        take_local(torch.zeros(8, 3), local_param((16, 3), 0, 1, 2), 0, 2)


def test_sections_must_split_evenly():
    param = nn.Parameter(torch.empty(5, 2))
    mark_sharded(param, 0, 2)
    with pytest.raises(MeshError, match="partition_stride: got 2"):
        local_rectangles(param, tp_axis(0, 2))


def test_counted_once():
    sharded, replicated, tied = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    mark_sharded(sharded, 0)
    tied.shared = True
    counts = [
        sum(is_counted_here(p, tp_axis(rank, 4)) for rank in range(4))
        for p in (sharded, replicated, tied)
    ]
    assert counts == [4, 1, 0]


def expert(index):
    param = nn.Parameter(torch.zeros(2, 2))
    mark_expert(param, index)
    return param


def test_experts_have_axes_of_their_own():
    sizes = MeshSizes(world=8, tp=2, ep=2, etp=1)
    mesh = ParallelState.build(sizes, 3, 8, make_group=lambda _: None)
    dense = nn.Parameter(torch.zeros(2))
    assert shard_axis(dense, mesh) is mesh.tp
    assert shard_axis(expert(1), mesh) is mesh.etp
    assert replica_axis(dense, mesh) is mesh.dp_cp
    assert replica_axis(expert(1), mesh) is mesh.edp
    assert is_expert(expert(0))
    assert not is_expert(dense)


def test_an_expert_is_counted_on_every_rank_that_holds_a_part_of_it():
    whole, split = expert(0), expert(0)
    mark_sharded(split, 0)
    counts = [sum(is_counted_here(p, tp_axis(r, 2)) for r in range(2)) for p in (whole, split)]
    assert counts == [1, 2]


def test_names_number_experts_over_all_ranks():
    name = "decoder.layers.3.mlp.experts.linear_fc1.weight"
    assert global_name(f"{name}1", expert(13)) == f"{name}13"
    assert global_name(f"{name}0", nn.Parameter(torch.zeros(1))) == f"{name}0"
    with pytest.raises(MeshError, match="expert_index: got 13"):
        global_name(name, expert(13))


def normal(tensor):
    return nn.init.normal_(tensor, std=0.02)


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (0, 2), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_ignore_the_tensor_parallel_size(monkeypatch, dim, stride, dtype):
    monkeypatch.setattr(shards, "_BLOCK_ELEMENTS", 100)  # several blocks, cut across the shards
    shape = (48, 24)
    alone = local_param(shape, dim, stride, 1, dtype)
    init_parameter(alone, tp_axis(0, 1), normal, 7, "a.weight")
    assert 0.015 < alone.float().std() < 0.025
    for size in (2, 4):
        for rank in range(size):
            part = local_param(shape, dim, stride, size, dtype)
            init_parameter(part, tp_axis(rank, size), normal, 7, "a.weight")
            assert torch.equal(part, take_local(alone.detach(), part, rank, size))


def test_initial_values_depend_on_seed_and_path_and_leave_the_generator_alone():
    def values(seed, path):
        param = local_param((8, 8), 0, 1, 1)
        init_parameter(param, tp_axis(0, 1), normal, seed, path)
        return param

    before = torch.random.get_rng_state()
    first = values(1, "a")
    assert torch.equal(first, values(1, "a"))
    assert not torch.equal(first, values(2, "a"))
    assert not torch.equal(first, values(1, "b"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_vocabulary_padding_changes_no_real_row():
    real = 13
    narrow, wide = local_param((14, 8), 0, 1, 1), local_param((24, 8), 0, 1, 1)
    for param in (narrow, wide):
        init_parameter(param, tp_axis(0, 1), normal, 1, "embedding", real_rows=real)
    assert torch.equal(narrow[:real], wide[:real])
    assert narrow[:real].count_nonzero() == real * 8
    assert wide[real:].count_nonzero() == 0
    for rank in range(4):
        part = local_param((24, 8), 0, 1, 4)
        init_parameter(part, tp_axis(rank, 4), normal, 1, "embedding", real_rows=real)
        assert torch.equal(part, wide[rank * 6 : rank * 6 + 6])


def test_vectors_and_stacks_of_matrices():
    for shape in ((12,), (4, 6, 3)):
        whole = local_param(shape, 0, 1, 1)
        init_parameter(whole, tp_axis(0, 1), normal, 1, "p")
        part = local_param(shape, 0, 1, 2)
        init_parameter(part, tp_axis(1, 2), normal, 1, "p")
        assert torch.equal(part, whole[shape[0] // 2 :])
