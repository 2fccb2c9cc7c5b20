"""Attention over context-parallel ranks equals attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.transformer import context_parallel
from megatron.core.transformer.attention_kernel import causal_attention
from megatron.core.transformer.context_parallel import (
    ContextBlock,
    context_attention,
    take_local,
    to_sequence,
)
from tests.distpool import run_ranks

S, B, N, D = 144, 2, 4, 8
COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LEVELS = 4  # ranks that two levels take


def whole(groups, dtype, s=S, b=B):
    generator = torch.Generator().manual_seed(5)
    shapes = [(s, b, N, D), (s, b, groups, D), (s, b, groups, D), (s, b, N * D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def packed():
    """Documents that end inside chunks, at their borders, and one that spans most ranks."""
    first = torch.arange(S)
    for start in (5, 36, 40, 110):
        first = torch.where(torch.arange(S) >= start, start, first)
    first[:5] = 0
    second = torch.where(torch.arange(S) >= 100, 100, 0)
    return torch.stack([first, second])


def job_of(rank, size, comm, starts=None, dropout=0.0):
    """This rank's axis, and what its attention needs."""
    inner = 2 if comm == "a2a+p2p" else 1
    mesh = ParallelState.build(MeshSizes(world=size, cp=size, cp_a2a=inner), rank, size)
    job = ContextBlock(mesh.cp_p2p, 0.3, starts, dropout, seed=11 + rank, inner=mesh.cp_a2a)
    return mesh.cp, job


def ranks_for(comm, size=2):
    return max(size, LEVELS) if comm == "a2a+p2p" else size


def attend(rank, size, comm, groups, starts, dtype, dropout=0.0):
    """This rank's result and gradients, in the order of the whole sequence: one row per rank."""
    axis, job = job_of(rank, size, comm, starts, dropout)
    q, k, v, d_out = (take_local(x, axis, dim=0) for x in whole(groups, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = context_attention(*inputs, job, comm)
    return [x.detach() for x in (out, *torch.autograd.grad(out, inputs, d_out))]


def joined(parts, size):
    return [to_sequence(torch.cat(values), size) for values in zip(*parts, strict=True)]


def alone(groups, starts, dtype):
    q, k, v, d_out = whole(groups, dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = causal_attention(*inputs, scale=0.3, starts=starts)
    return [x.detach() for x in (out, *torch.autograd.grad(out, inputs, d_out))]


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(("size", "groups"), [(2, 4), (2, 2), (4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "packed"])
def test_it_equals_attention_of_one_process(comm, size, groups, documents):
    if (comm == "a2a" and groups % size) or (comm == "a2a+p2p" and size != LEVELS):
        pytest.skip("refused: whole groups only, and two levels of at least two ranks")
    starts = packed() if documents else None
    found = joined(run_ranks(attend, size, comm, groups, starts, torch.float32), size)
    for one, other in zip(found, alone(groups, starts, torch.float32), strict=True):
        # fp32 sums in another order, values of order 1
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("comm", COMMS)
def test_bf16_is_as_close_to_the_truth_as_one_process(comm):
    """Blocks are joined in fp32 and gradients travel in fp32: one rounding, as in one process."""
    found = joined(run_ranks(attend, 4, comm, 4, None, torch.bfloat16), 4)
    wide = [x.bfloat16() for x in whole(4, torch.float32)]
    q, k, v, d_out = (x.double() for x in wide)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = causal_attention(*inputs, scale=0.3)
    exact = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        error = (one.double() - other).norm() / other.norm()
        assert error < 2.5e-3  # 2^-9 / sqrt(3) = 1.1e-3 for a rounding, twice for gradients


def perturbed(rank, size, comm):
    axis, job = job_of(rank, size, comm, packed())
    results = []
    for change in (False, True):
        q, k, v, _ = whole(2, torch.float32)
        if change:
            for x in (q, k, v):
                x[:40, 0] = -7.0
                x[:100, 1] = 30.0
        q, k, v = (take_local(x, axis, dim=0) for x in (q, k, v))
        results.append(context_attention(q, k, v, job, comm))
    return results


@pytest.mark.parametrize("comm", COMMS)
def test_other_documents_do_not_change_a_bit(comm):
    size = ranks_for(comm)
    before, after = joined(run_ranks(perturbed, size, comm), size)
    assert torch.equal(before[40:, 0], after[40:, 0])
    assert torch.equal(before[100:, 1], after[100:, 1])
    assert not torch.equal(before[:40], after[:40])


def dropped(rank, size, comm):
    first = attend(rank, size, comm, 4, None, torch.float64, dropout=0.4)
    again = attend(rank, size, comm, 4, None, torch.float64, dropout=0.4)
    return first, all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("comm", COMMS)
def test_dropout_repeats_and_its_gradient_belongs_to_its_masks(comm):
    """out is linear in the values: <d_out, out> = <d_value, value> only with the same masks."""
    size = ranks_for(comm)
    parts = run_ranks(dropped, size, comm)
    assert all(same for _, same in parts)
    out, _, _, d_value = joined([values for values, _ in parts], size)
    _, _, value, d_out = whole(4, torch.float64)
    torch.testing.assert_close((out * d_out).sum(), (d_value * value).sum())
    plain = alone(4, None, torch.float64)[0]
    assert not torch.allclose(out, plain)


class Largest(TorchDispatchMode):
    """The largest tensor that anything produced, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return found


def memory(rank, size, comm, s):
    axis, job = job_of(rank, size, comm)
    q, k, v, _ = (take_local(x, axis, dim=0) for x in whole(N, torch.float32, s, b=1))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kept = []

    def keep(x):
        kept.append(x.numel() * x.element_size())
        return x

    with saved_tensors_hooks(keep, lambda x: x), Largest() as seen:
        out = context_attention(*inputs, job, comm)
    return sum(kept), seen.bytes, out.numel() * 4


@pytest.mark.parametrize("comm", COMMS)
def test_memory_grows_with_the_local_sequence(comm):
    """What is kept for the backward pass, and (but for gathered keys) any tensor in between."""
    size = ranks_for(comm)
    kept, largest, out = run_ranks(memory, size, comm, 512)[0]
    assert kept <= out * (4 + 1 / D)  # query, keys, values, result, lse
    twice, larger, _ = run_ranks(memory, size, comm, 1024)[0]
    assert twice == 2 * kept
    if size < 4:
        assert run_ranks(memory, 4, comm, 1024)[0][0] == kept
    scores = 2**20  # of a chunk: bounded
    assert larger <= max(2 * largest, scores) < N * 1024 * 1024 * 4


def watched(rank, size):
    """What happens in what order in a ring: forward, then backward."""
    events, wait = [], context_parallel.Transfer.wait

    class Watched(context_parallel.Transfer):
        def __init__(self, x, axis, tag):
            events.append(f"start {'kv' if tag == 0 else 'gradients'}")
            super().__init__(x, axis, tag)

        def wait(self):
            events.append("wait")
            return wait(self)

    def note(function, name):
        def noted(*args):
            if events[-1] != name:  # a step may have several blocks
                events.append(name)
            return function(*args)

        return noted

    context_parallel.Transfer = Watched
    for name in ("accumulate", "accumulate_gradients"):
        setattr(context_parallel, name, note(getattr(context_parallel, name), "work"))
    attend(rank, size, "p2p", 4, None, torch.float32)
    return events


def test_keys_and_gradients_travel_while_the_rank_works():
    forward = ["start kv", "work", "wait", "start kv", "work", "wait", "work"]
    backward = [
        *("start kv", "work", "start gradients"),
        *("wait", "start kv", "work", "wait", "start gradients"),
        *("wait", "work", "wait", "start gradients", "wait"),
    ]
    # One block of a step may see nothing under the causal mask, never all of them.
    for events in run_ranks(watched, 3):
        assert events == forward + backward
