"""Scales across ranks: one answer for all, NaN and idle ranks included; quantized gathering."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distpool import run_ranks

from megatron.core import fp8
from megatron.core.comm_log import CommLog
from megatron.core.fp8 import (
    AmaxBook,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    Fp8Policy,
    Fp8State,
    Role,
    linear,
)
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel import mappings

NAN, INF = float("nan"), float("inf")
E4M3 = DelayedScaling(amax_history_len=4, amax_compute_algo="max", fp8_format=Format.E4M3)


def axis_of(rank, size):
    return Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD)


def sync_once(rank, size, amax_by_rank, recipe=E4M3):
    """Scale and history of one column after one update; rank r recorded `amax_by_rank[r]`."""
    book = AmaxBook(recipe)
    slot = book.register("layer").of(Role.INPUT)
    book.history[0, slot.index()] = amax_by_rank[rank]
    book.sync(axis_of(rank, size))
    return slot.scale.item(), book.history[:, slot.index()].tolist()


@pytest.mark.parametrize(
    ("amaxes", "scale", "newest"),
    [
        ((2.0, 8.0), 56, 8),
        ((8.0, 2.0), 56, 8),
        ((0.0, 8.0), 56, 8),  # rank 0 did not run the module
        ((NAN, 8.0), 56, 8),  # a number beats NaN whichever rank holds it
        ((8.0, NAN), 56, 8),
        ((INF, 8.0), 1, INF),
    ],
)
def test_ranks_agree_on_the_largest(amaxes, scale, newest):
    results = run_ranks(sync_once, 2, amaxes)
    assert results == [(scale, [0, 0, 0, newest])] * 2


def test_all_ranks_idle_or_all_nan():
    assert run_ranks(sync_once, 2, (0.0, 0.0)) == [(1.0, [0, 0, 0, 0])] * 2
    for scale, history in run_ranks(sync_once, 2, (NAN, NAN)):
        assert scale == 1.0
        assert history[-1] != history[-1]  # NaN was recorded by all


def test_reduction_can_be_switched_off():
    recipe = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, reduce_amax=False)
    scales = [scale for scale, _ in run_ranks(sync_once, 2, (2.0, 8.0), recipe)]
    assert scales == [224, 56]


def count_collectives(rank, size):
    book = AmaxBook(E4M3)
    for i in range(20):
        book.register(f"layer{i}")
    calls, original = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **kwargs: (
        calls.append(tensor.numel()) or original(tensor, **kwargs)
    )
    book.sync(axis_of(rank, size))
    return calls


def test_one_collective_for_all_layers():
    assert run_ranks(count_collectives, 2) == [[100], [100]]


# -- gathering -----------------------------------------------------------------------------------


def train_step(rank, size, recipe, sharded, *, wgrad=True, emulation="exact"):
    """Two steps of a column-parallel layer on a sequence split over the ranks, or on all of it.

    Ranks hold different halves of the weight, as in tensor parallelism.
    """
    generator = torch.Generator().manual_seed(4)
    full_weight = torch.randn(32, 16, generator=generator)
    full_x = torch.randn(8, 2, 16, generator=generator) * 3
    full_x[:4] *= 0.1  # the halves have different magnitudes
    full_dy = torch.randn(8, 2, 32, generator=generator)
    axis = axis_of(rank, size) if sharded else Axis.single("tp")
    state = Fp8State(Fp8Policy(recipe=recipe, wgrad=wgrad), emulation=emulation)
    precision = state.for_linear("decoder.layers.0.fc")
    out = 32 // axis.size
    weight = torch.nn.Parameter(full_weight[axis.rank * out : (axis.rank + 1) * out].bfloat16())
    weight.main_grad = torch.zeros(weight.shape)
    dy = full_dy[..., axis.rank * out : (axis.rank + 1) * out].bfloat16()
    for _ in range(2):
        x = mappings.split(full_x.bfloat16(), axis).requires_grad_()
        weight.main_grad.zero_()
        y = linear(x, weight, None, precision, gather=axis)
        y.backward(dy)
        state.sync(axis)
    return {
        "y": mappings.all_gather(y.detach(), axis, dim=-1).float().numpy(),
        "dx": mappings.all_gather(x.grad, axis).float().numpy(),
        "dw": mappings.all_gather(weight.main_grad, axis).numpy(),
        "scale": [] if state.book is None else state.book.scale.tolist(),
    }


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize(
    "recipe", [E4M3, DelayedScaling(amax_history_len=2)], ids=["e4m3", "hybrid"]
)
def test_gathered_delayed_layer_is_the_whole_layer(recipe, wgrad):
    whole = train_step(0, 1, recipe, False, wgrad=wgrad)
    for shard in run_ranks(train_step, 2, recipe, True, wgrad=wgrad):
        assert shard["scale"] == whole["scale"]
        assert (shard["y"] == whole["y"]).all()
        torch.testing.assert_close(
            torch.tensor(shard["dw"]), torch.tensor(whole["dw"]), rtol=1e-6, atol=1e-5
        )
        # The input gradient is a sum of two bf16 partial sums.
        dx = torch.tensor(whole["dx"])
        torch.testing.assert_close(
            torch.tensor(shard["dx"]), dx, rtol=2**-7, atol=2**-8 * dx.abs().max().item()
        )


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["bf16", "tensorwise"])
def test_gathered_layer_multiplies_the_whole_sequence(recipe):
    """With current scaling the ranks agree on the input's scale before they cast."""
    if recipe is None:
        whole = train_step(0, 1, None, False)
        for shard in run_ranks(train_step, 2, None, True):
            assert (shard["y"] == whole["y"]).all()
            torch.testing.assert_close(
                torch.tensor(shard["dw"]), torch.tensor(whole["dw"]), rtol=1e-6, atol=1e-5
            )
        return
    first, second = run_ranks(quantized_shard, 2)
    assert first["scale_inv"] == second["scale_inv"] == pytest.approx(8.0 / 448)
    assert first["gathered"] == second["gathered"] == first["local"] + second["local"]
    assert first["sent"] == [("all_gather", 64)]  # one byte an element travels


def quantized_shard(rank, size):
    axis = axis_of(rank, size)
    state = Fp8State(Fp8Policy(recipe=Float8CurrentScaling()))
    quantizer = state.for_linear("fc").quantizer(Role.INPUT)
    x = torch.linspace(-1, 1, 64).view(4, 16) * (8.0 if rank else 2.0)
    row = quantizer.rowwise(x, axis=axis)
    log = CommLog()
    whole = fp8.comm.gather_rows(row, replace(axis, log=log))
    return {
        "scale_inv": row.scale_inv.item(),
        "local": row.data.flatten().tolist(),
        "gathered": whole.data.flatten().tolist(),
        "sent": [(t.kind, t.sent_bytes) for t in log.counts.elements()],
    }


# -- library API ---------------------------------------------------------------------------------


def library_step(rank, size, group_size):
    groups = [dist.new_group([r]) for r in range(size)]
    group = None if group_size == size else groups[rank]
    module = fp8.Linear(16, 16, params_dtype=torch.bfloat16)
    x = torch.full((4, 16), 2.0 if rank == 0 else 8.0).bfloat16()
    with fp8.autocast(recipe=E4M3, fp8_group=group):
        y = module(x)
    (y.sum() * (1 + rank)).backward()
    meta = module.fp8_meta
    return meta["scaling_fwd"].scale[0].item(), meta["scaling_bwd"].scale[0].item()


def test_autocast_reduces_over_its_group():
    assert run_ranks(library_step, 2, 2) == [(56, 224), (56, 224)]
    assert run_ranks(library_step, 2, 1) == [(224, 448), (56, 224)]
