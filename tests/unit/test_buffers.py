"""Where parameters lie in gradient buffers, how these are cut, and who owns what."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import bucket as bucket_module
from megatron.core.distributed.buffers import GradBuffer, default_bucket_size, plan_layout
from megatron.core.errors import MegatronError
from megatron.core.mesh import Axis
from megatron.core.shards import FlatRange

FP32 = torch.float32


def axis(size, rank=0):
    return Axis("dp", size, rank, tuple(range(size)))


def test_a_bucket_ends_with_the_parameter_that_fills_it():
    layout = plan_layout([3, 4, 5, 100, 1], 7)
    assert layout.offsets == (0, 3, 7, 12, 112)
    assert layout.buckets == ((0, 7, 0, 2), (7, 112, 2, 4), (112, 113, 4, 5))
    assert layout.elements == 113


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_sharded_layouts_are_aligned(shards):
    sizes = [3, 64, 65, 700, 1, 1]
    layout = plan_layout(sizes, 100, num_shards=shards)
    assert all(offset % 64 == 0 for offset in layout.offsets)
    ends = [o + s for o, s in zip(layout.offsets, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    step = math.lcm(shards, 128)
    position = 0
    for start, stop, first, last in layout.buckets:
        assert start == position
        assert (stop - start) % step == 0
        assert all(start <= layout.offsets[i] and ends[i] <= stop for i in range(first, last))
        position = stop
    assert position == layout.elements


def test_a_shared_embedding_has_a_bucket_to_itself():
    alone = [False, True, False, False]
    layout = plan_layout([10, 20, 30, 40], 1000, num_shards=2, alone=alone)
    assert [b[2:] for b in layout.buckets] == [(0, 1), (1, 2), (2, 4)]


def test_the_default_size():
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 15), nn.Linear(15, 7), nn.Linear(7, 3, bias=False)).bfloat16()


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("bucket_size", [1, 130, 10**6])
def test_every_element_has_one_owner(size, bucket_size):
    owners = None
    for rank in range(size):
        module = model()
        buffer = GradBuffer(
            list(module.parameters()), axis(size, rank), FP32, bucket_size=bucket_size, sharded=True
        )
        if owners is None:
            owners = [torch.zeros(p.numel()) for p in module.parameters()]
        for param, counts in zip(module.parameters(), owners, strict=True):
            owned = buffer.owned(param)
            counts[owned.start : owned.stop] += 1
    assert all((counts == 1).all() for counts in owners)


def test_without_sharding_a_rank_owns_all():
    module = model()
    buffer = GradBuffer(list(module.parameters()), axis(4, 2), FP32)
    assert all(buffer.owned(p) == FlatRange(0, p.numel()) for p in module.parameters())


def test_parameters_move_into_one_tensor_and_stay_the_same_objects():
    module, twin = model(), model()
    before = {name: (p, p._version) for name, p in module.named_parameters()}
    before[next(iter(before))][0].tensor_model_parallel = True
    ddp = DistributedDataParallel(module, axis(1), sharded=True)
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == 1
    for (name, p), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert p is before[name][0]
        assert torch.equal(p, other)
        assert p.is_leaf
        assert p._version > before[name][1]
    assert next(module.parameters()).tensor_model_parallel
    x = torch.randn(2, 9).bfloat16()
    assert torch.equal(ddp(x), twin(x))


def test_gathering_bumps_versions_even_on_one_rank():
    module = model()
    ddp = DistributedDataParallel(module, axis(1), sharded=True)
    before = [p._version for p in module.parameters()]
    ddp.gather_params()
    assert all(p._version > v for p, v in zip(module.parameters(), before, strict=True))


class Late:
    """A gathering whose data arrive only when somebody waits for them."""

    def __init__(self, out):
        self.out = out

    def wait(self):
        self.out.fill_(2.0)


def test_modules_wait_for_their_own_parameters(monkeypatch):
    monkeypatch.setattr(bucket_module, "start_all_gather", lambda out, *_: Late(out))
    module = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    ddp = DistributedDataParallel(
        module, axis(2), sharded=True, bucket_size=1, overlap_reduce=True, overlap_gather=True
    )
    ddp.gather_params()
    arrived = [p.eq(2.0).all().item() for p in module.parameters()]
    assert arrived == [False] * 3
    assert torch.equal(module[1](torch.ones(1, 3)), torch.full((1, 3), 6.0))
    arrived = [p.eq(2.0).all().item() for p in module.parameters()]
    assert arrived == [False, True, False]
    ddp.finish_param_sync()
    assert all(p.eq(2.0).all() for p in module.parameters())


def test_number_of_buckets():
    module = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(8)))
    (buffer,) = DistributedDataParallel(module, axis(1), num_buckets=4).buffers_by_axis
    assert [len(b.params) for b in buffer.buckets] == [2, 2, 2, 2]


def test_parameters_of_different_types_lie_apart():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).bfloat16())
    found = DistributedDataParallel(module, axis(1), sharded=True).buffers_by_axis
    assert [b.params[0].dtype for b in found] == [torch.float32, torch.bfloat16]


def test_buckets_start_in_order_and_only_in_the_last_backward(monkeypatch):
    module = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    ddp = DistributedDataParallel(module, axis(1), bucket_size=1, overlap_reduce=True)
    launched = []
    for index, bucket in enumerate(ddp.buffers_by_axis[0].buckets):
        monkeypatch.setattr(bucket, "start_reduce", lambda i=index: launched.append(i))
    ddp.zero_grad_buffer()
    ddp(torch.ones(1, 3)).sum().backward()
    assert launched == []
    ddp.expect_last_backward()
    # The middle layer is frozen out of this graph: the buckets behind it have to wait.
    module[2](module[0](torch.ones(1, 3))).sum().backward()
    assert launched == [0]
    ddp.finish_grad_sync()
    assert launched == [0, 1, 2]


def test_a_gradient_that_comes_too_late_is_an_error():
    module = nn.Linear(3, 3)
    ddp = DistributedDataParallel(module, axis(1), overlap_reduce=True)
    ddp.zero_grad_buffer()
    ddp.expect_last_backward()
    ddp(torch.ones(1, 3)).sum().backward()
    with pytest.raises(MegatronError, match="second backward"):
        ddp(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (1, 6), (6, 1), (3, 2, 4)])
def test_ranges_are_cut_into_blocks(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    flat = whole.reshape(-1)
    for start in range(flat.numel() + 1):
        for stop in range(start, flat.numel() + 1):
            part = flat[start:stop]
            blocks = FlatRange(start, stop).rectangles(shape)
            assert len(blocks) <= max(1, 2 * len(shape) - 1)
            assert sum(math.prod(b.shape) for b in blocks) == part.numel()
            for block in blocks:
                assert torch.equal(part[block.local].view(block.shape), whole[block.window])
