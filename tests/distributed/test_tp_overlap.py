"""Overlapped transfers change nothing: against the same layer without overlap.

Sums over ranks run in rank order with and without overlap, at every size. What is left is the BLAS,
which may add up a row in another order when there are fewer rows (MKL does, up to 128): small
layers are compared bit by bit on integers, whose sums are exact in any order, and large ones on
random numbers.
"""

from __future__ import annotations

import functools
import itertools
import time

import pytest
import torch
from distpool import RankError, run_ranks
from parity import run_layout, worst

from megatron.core import wire
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    comm,
    gemm,
    linear,
)
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.tensor_parallel import mappings, overlap
from megatron.core.tensor_parallel.mappings import reduce_scatter_along_first_dim
from megatron.core.tensor_parallel.overlap import Overlapped
from tests import fake_products
from tests.contract.test_fp8_linear import scaled_mm_on_cpu
from tests.small_models import small_config

SEQ, BATCH, IN, OUT = 16, 3, 32, 48
DELAYED = DelayedScaling(amax_history_len=4)
TENSORWISE = Float8CurrentScaling()
MX, BLOCKS = MXFP8BlockScaling(), Float8BlockScaling()
FP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = {
    "none": None, "delayed": DELAYED, "tensorwise": TENSORWISE, "mxfp8": MX, "blockwise": BLOCKS,
    "nvfp4": FP4,
}  # fmt: skip
SWITCHES = ("ag", "rs", "rs_dgrad", "bulk_dgrad", "bulk_wgrad")


def tp_axis(rank, world):
    return ParallelState.build(MeshSizes(world, tp=world), rank, world).tp


def values(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape, seed):
    """Integers from -7 to 7, both of which occur: FP8 scales become powers of two."""
    found = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed)).float()
    found.view(-1)[0], found.view(-1)[-1] = 7, -7
    return found


def tripled(*shape, seed):
    """As `integers` up to 21: the scale of an FP4 tensor becomes 2688 / 21, a power of two."""
    return 3 * integers(*shape, seed=seed)


def train(
    axis,
    *,
    kind,
    recipe,
    transfers,
    dtype=torch.float32,
    wgrad=True,
    bias=False,
    draw=integers,
    sizes=(SEQ, BATCH, IN, OUT),
    hardware=False,
):
    """Two steps of one layer whose sequence is split over the ranks.

    Returns what a step leaves behind: output, gradients, scaling state.
    """
    seq, batch, inner, outer = sizes
    state = Fp8State(Fp8Policy(recipe=recipe, wgrad=wgrad), params_dtype=dtype)
    state.hardware = hardware
    precision = state.for_linear("decoder.layers.0.fc")
    rank, size = axis.rank, axis.size
    full = draw(outer, inner, seed=1).to(dtype)
    own_weight = full.chunk(size, 0 if kind == "column" else 1)[rank]
    weight = torch.nn.Parameter(own_weight.clone())
    weight.main_grad = torch.zeros(weight.shape)
    shift = torch.nn.Parameter(draw(weight.shape[0], seed=2).to(dtype)) if bias else None
    found = []
    for step in range(2):
        x, dy = draw(seq, batch, inner, seed=3 + step), draw(seq, batch, outer, seed=5 + step)
        x[seq // 2 :] *= 2.0  # ranks do not agree on the magnitude by themselves
        dy[: seq // 2] *= 0.5
        if kind == "column":
            x, dy = x.chunk(size)[rank], dy.chunk(size, -1)[rank]
            where = {"gather": axis}
        else:
            x, dy = x.chunk(size, -1)[rank], dy.chunk(size)[rank]
            where = {"scatter": axis}
        x, dy = x.to(dtype).clone().requires_grad_(), dy.to(dtype)
        y = linear(x, weight, shift, precision, transfers=transfers, **where)
        y.backward(dy)
        state.sync(axis)
        found += [y.detach(), x.grad, weight.main_grad.clone()]
        if state.book is not None:
            found += [state.book.scale.clone(), state.book.history.clone()]
    return found


def both_ways(rank, world, kind):
    axis = tp_axis(rank, world)
    everything = Overlapped(rs_dgrad=True)
    cases = [
        {"recipe": recipe, "dtype": dtype, "wgrad": wgrad}
        for recipe, dtype, wgrad in itertools.product(
            RECIPES.values(), (torch.float32, torch.bfloat16), (True, False)
        )
        if recipe or wgrad
    ]
    cases.append({"recipe": None, "dtype": torch.bfloat16, "bias": kind == "column"})
    # Where a rank's rows are whole blocks they travel quantized for the weight's gradient, too.
    cases += [
        {"recipe": recipe, "dtype": torch.bfloat16, "sizes": (world * tokens, 1, 40, 48)}
        for recipe, tokens in ((MX, 32), (BLOCKS, 128), (FP4, 16))
    ]
    for case in cases:
        case["draw"] = tripled if case["recipe"] is FP4 else integers
    for case, transfers in itertools.product(cases, (Overlapped(), everything)):
        plain = train(axis, kind=kind, transfers=comm.PLAIN, **case)
        found = train(axis, kind=kind, transfers=transfers, **case)
        for one, other in zip(plain, found, strict=True):
            assert torch.equal(one, other), (case, transfers)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_overlap_is_bitwise(kind, world):
    run_ranks(both_ways, world, kind, detail=False)


def blocks_in_hardware(rank, world, kind):
    """Operands in the FP8 type with scales of blocks, as they travel on a GPU."""
    axis = tp_axis(rank, world)
    devices = ((BLOCKS, (9, 0)), (BLOCKS, (10, 0)), (MX, (10, 0)))
    # A rank's rows cut blocks, or are whole ones, which then travel for the weight's gradient, too.
    for (recipe, capability), sizes in itertools.product(
        devices, ((SEQ, BATCH, IN, OUT), (world * 128, 1, 40, 48))
    ):
        case = {"kind": kind, "recipe": recipe, "dtype": torch.bfloat16, "sizes": sizes}
        emulated = train(axis, transfers=comm.PLAIN, **case)
        with fake_products.device_like(capability, pytest.MonkeyPatch()):
            for transfers in (comm.PLAIN, Overlapped(), Overlapped(rs_dgrad=True)):
                found = train(axis, transfers=transfers, hardware=True, **case)
                for one, other in zip(emulated, found, strict=True):
                    assert torch.equal(one, other), (recipe, capability, sizes, transfers)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_scales_of_blocks_in_hardware(kind):
    run_ranks(blocks_in_hardware, 2, kind, detail=False)


def other_machines(rank, world, kind):
    """On a CPU that multiplies bf16, and in the FP8 type as on a GPU."""
    axis = tp_axis(rank, world)
    bf16 = {"dtype": torch.bfloat16}
    cases = [{"recipe": recipe, "hardware": True, **bf16} for recipe in (DELAYED, TENSORWISE)]
    cases += [{"recipe": recipe, **bf16} for recipe in (DELAYED, None, MX, BLOCKS, FP4)]
    for case in cases:
        gemm.gemm_dtype = lambda dtype, device: dtype
        plain = train(axis, kind=kind, transfers=comm.PLAIN, **case)
        found = train(axis, kind=kind, transfers=Overlapped(rs_dgrad=True), **case)
        for one, other in zip(plain, found, strict=True):
            assert torch.equal(one, other), case


@pytest.mark.skipif(not scaled_mm_on_cpu(), reason="this torch has no _scaled_mm for CPU")
@pytest.mark.parametrize("kind", ["column", "row"])
def test_overlap_is_bitwise_on_other_machines(kind):
    run_ranks(other_machines, 2, kind, detail=False)


def random_numbers(rank, world, sizes):
    """Largest difference between with and without, relative to the tensor's largest magnitude."""
    axis = tp_axis(rank, world)
    errors = []
    for kind, recipe in itertools.product(("column", "row"), RECIPES.values()):
        settings = {"kind": kind, "recipe": recipe, "draw": values, "sizes": sizes}
        plain = train(axis, transfers=comm.PLAIN, **settings)
        found = train(axis, transfers=Overlapped(rs_dgrad=True), **settings)
        pairs = zip(plain, found, strict=True)
        errors += [((one - two).abs().max() / one.abs().max()).item() for one, two in pairs]
    return max(errors)


@pytest.mark.parametrize("world", [2, 4])
def test_random_numbers_in_small_layers(world):
    # A sum of 48 products in another order, twice rounded at most.
    assert max(run_ranks(random_numbers, world, (SEQ, BATCH, IN, OUT), detail=False)) < 1e-6


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another BLAS, another limit")
def test_random_numbers_in_large_layers_are_bitwise():
    assert run_ranks(random_numbers, 2, (512, 1, 64, 96), detail=False) == [0.0, 0.0]


def one_switch(rank, world):
    axis = tp_axis(rank, world)
    off = dict.fromkeys(SWITCHES, False)
    for kind in ("column", "row"):
        plain = train(axis, kind=kind, recipe=DELAYED, transfers=comm.PLAIN)
        for name in SWITCHES:
            switched = Overlapped(**{**off, name: True})
            found = train(axis, kind=kind, recipe=DELAYED, transfers=switched)
            assert all(map(torch.equal, plain, found)), (kind, name)


def test_each_switch_alone():
    run_ranks(one_switch, 2, detail=False)


# -- what happens when ----------------------------------------------------------------------------


def events(axis, *, kind, transfers, backward, recipe=None):
    """What a pass of a layer does, in order: `send`, `wait`, `multiply` with its rows."""
    log = []
    start, wait, multiply = wire.Swap.__init__, wire.Swap.wait, gemm.gemm_nt
    accumulate = gemm.gemm_nt_accumulate

    def logged_start(self, *args):
        log.append("send")
        start(self, *args)

    def logged_wait(self):
        log.append("wait")
        wait(self)

    def logged_multiply(a, *args, **kwargs):
        log.append(f"multiply {a.shape[0]}")
        return multiply(a, *args, **kwargs)

    def logged_accumulate(*args, **kwargs):
        log.append("weight")
        accumulate(*args, **kwargs)

    from megatron.core.fp8 import linear as function

    module = __import__(function.__module__, fromlist=["linear"])
    wire.Swap.__init__, wire.Swap.wait = logged_start, logged_wait
    gemm.gemm_nt, module.gemm_nt_accumulate = logged_multiply, logged_accumulate
    try:
        state = Fp8State(Fp8Policy(recipe=recipe), params_dtype=torch.float32)
        precision = state.for_linear("decoder.layers.0.fc")
        weight = torch.nn.Parameter(values(OUT, IN, seed=1))
        weight.main_grad = torch.zeros(weight.shape)
        rows = SEQ // axis.size if kind == "column" else SEQ
        x = values(rows, IN, seed=2).requires_grad_()
        where = {"gather" if kind == "column" else "scatter": axis}
        y = linear(x, weight, None, precision, transfers=transfers, **where)
        if backward:
            log.clear()
            y.backward(torch.ones_like(y))
        return log
    finally:
        wire.Swap.__init__, wire.Swap.wait = start, wait
        gemm.gemm_nt, module.gemm_nt_accumulate = multiply, accumulate


def orders(rank, world):
    axis = tp_axis(rank, world)
    part, whole = f"multiply {SEQ // world}", f"multiply {SEQ}"
    default, chunked = Overlapped(), Overlapped(rs_dgrad=True)

    def of(kind, transfers, backward=False):
        return events(axis, kind=kind, transfers=transfers, backward=backward)

    assert of("column", comm.PLAIN) == ["send", "wait", whole]
    assert of("column", default) == ["send", part, "wait", part]
    assert of("row", comm.PLAIN) == [whole, "send", "wait"]
    assert of("row", default) == [part, "send", part, "wait"]
    assert of("column", comm.PLAIN, True) == [whole, "send", "wait", "send", "wait", "weight"]
    # Both transfers are on their way while a product runs: the input's and the gradient's.
    assert of("column", default, True) == ["send", whole, "send", "wait", "weight", "wait"]
    assert of("column", chunked, True) == ["send", part, "send", part, "wait", "weight", "wait"]
    assert of("row", comm.PLAIN, True) == ["send", "wait", whole, "weight"]
    assert of("row", default, True) == ["send", part, "wait", part, "weight"]


def test_products_run_while_messages_travel():
    run_ranks(orders, 2, detail=False)


def progress(rank, world):
    axis = tp_axis(rank, world)
    local = torch.full((1024, 512), rank + 1.0)
    out = torch.zeros(world * 1024, 512)
    steps = mappings.start_gather_steps(local, out, axis)
    deadline = time.monotonic() + 120
    while not out.all() and time.monotonic() < deadline:
        time.sleep(0.01)  # no call that could move anything
    arrived = bool(out.all())
    for step in steps:
        step.wait()
    return arrived


def test_messages_arrive_while_nobody_waits_for_them():
    assert run_ranks(progress, 2, detail=False) == [True, True]


# -- a row-parallel layer's output gradient -------------------------------------------------------


def by_hand(axis, recipe, *, wgrad, composed, dtype=torch.bfloat16):
    """A row-parallel layer as one node, or as a product and a collective that autograd joins."""
    state = Fp8State(Fp8Policy(recipe=recipe, wgrad=wgrad), params_dtype=dtype)
    precision = state.for_linear("decoder.layers.0.fc")
    weight = torch.nn.Parameter(values(OUT, IN, seed=axis.rank).to(dtype))
    weight.main_grad = torch.zeros(weight.shape)
    found = []
    for step in range(2):
        x = values(SEQ, BATCH, IN, seed=7 + step + axis.rank).to(dtype).requires_grad_()
        if composed:
            y = reduce_scatter_along_first_dim(linear(x, weight, None, precision), axis)
        else:
            y = linear(x, weight, None, precision, scatter=axis)
        # Ranks see gradients of different magnitude.
        y.backward(values(*y.shape, seed=9 + axis.rank).to(dtype) * 3.0**axis.rank)
        state.sync(axis)
        found += [y.detach(), x.grad, weight.main_grad.clone()]
        if state.book is not None:
            found += [state.book.scale.clone(), state.book.history.clone()]
    return found


def quantized_gradient(rank, world):
    axis = tp_axis(rank, world)
    sent, start = [], wire.Swap.__init__

    def spy(self, outgoing, *others):
        sent.append((str(outgoing.dtype), outgoing.numel()))
        start(self, outgoing, *others)

    for (name, recipe), wgrad in itertools.product(RECIPES.items(), (True, False)):
        composed = by_hand(axis, recipe, wgrad=wgrad, composed=True)
        wire.Swap.__init__ = spy
        found = by_hand(axis, recipe, wgrad=wgrad, composed=False)
        wire.Swap.__init__ = start
        for one, other in zip(composed, found, strict=True):
            assert torch.equal(one, other), (name, wgrad)
        rows = SEQ // world * BATCH
        forward, backward = sent[: world - 1], sent[world - 1 : 2 * (world - 1)]
        assert forward == [("torch.bfloat16", rows * OUT)] * (world - 1)
        # Casts along rows and along columns are two: high precision is as short, and travels once.
        in_bytes = recipe in (DELAYED, TENSORWISE) and wgrad
        dtype = "torch.uint8" if in_bytes else "torch.bfloat16"
        assert backward == [(dtype, rows * OUT)] * (world - 1), name
        sent.clear()


@pytest.mark.parametrize("world", [2, 4])
def test_quantizing_before_the_gather_is_bitwise_and_halves_the_bytes(world):
    run_ranks(quantized_gradient, world, detail=False)


# -- the edges ------------------------------------------------------------------------------------


def uneven(rank, world):
    axis = tp_axis(rank, world)
    precision = Fp8State.disabled(params_dtype=torch.float32).for_linear("fc")
    weight = torch.nn.Parameter(torch.ones(4, 4))
    linear(torch.ones(3, 4), weight, None, precision, scatter=axis, transfers=Overlapped())


def test_rows_that_do_not_split_are_refused():
    with pytest.raises(RankError, match=r"shape along dim 0: got \(3, 4\)"):
        run_ranks(uneven, 2, detail=False)


def no_rows(rank, world):
    axis = tp_axis(rank, world)
    for kind, transfers in itertools.product(("gather", "scatter"), (comm.PLAIN, Overlapped())):
        precision = Fp8State.disabled(params_dtype=torch.float32).for_linear("fc")
        weight = torch.nn.Parameter(torch.ones(4, 4))
        x = torch.ones(0, 4, requires_grad=True)
        y = linear(x, weight, None, precision, transfers=transfers, **{kind: axis})
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, 4)


def test_no_rows():
    run_ranks(no_rows, 2, detail=False)


def sums(rank, world):
    axis = tp_axis(rank, world)
    parts = [values(4 * world, 8, seed=r) * 10.0**r for r in range(world)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        everyone = [part.to(dtype) for part in parts]
        wide = [p.to(torch.promote_types(dtype, torch.float32)) for p in everyone]
        total = wide[0].clone() if dtype.is_floating_point else everyone[0].clone()
        for addend in (wide if dtype.is_floating_point else everyone)[1:]:
            total += addend
        expected = total.to(dtype).chunk(world)[rank]
        assert torch.equal(mappings.reduce_scatter(everyone[rank], axis), expected), dtype


@pytest.mark.parametrize("world", [2, 3])
def test_sums_run_in_rank_order_with_one_rounding(world):
    run_ranks(sums, world, detail=False)


# -- whole models ---------------------------------------------------------------------------------

OVERLAP = {"sequence_parallel": True, "tp_comm_overlap": True}
LAYOUTS = {
    "tp2": ({"tensor_model_parallel_size": 2}, 2),
    "tp4": ({"tensor_model_parallel_size": 4, "tp_comm_overlap_rs_dgrad": True}, 4),
    "tp2-pp2-recompute": (
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        4,
    ),
    "tp2-pp2-zb": (
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb-h1",
        },
        4,
    ),
}
FP8 = {
    "fp8_format": "hybrid",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "max",
    "fp8_emulation": "exact",
    "kv_channels": 16,  # four ranks need matrices of multiples of 16
    "micro_batch_size": 4,
}


@functools.cache
def alone(fp8, steps):
    return run_layout(FP8 if fp8 else {}, 1, steps)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_equal_one_process(layout):
    fields, ranks = LAYOUTS[layout]
    outcomes = run_layout(fields | OVERLAP, ranks, 2)
    expected = alone(False, 2)
    for outcome in outcomes:
        # Only the order of fp32 additions differs between layouts.
        assert worst(outcome.grads, expected.grads)[0] < 1e-5
        assert worst(outcome.final, expected.final)[0] < 1e-5
        assert outcome.losses == outcomes[0].losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_in_fp8_equal_one_process(layout):
    fields, ranks = LAYOUTS[layout]
    outcomes = run_layout(FP8 | fields | OVERLAP, ranks, 5)
    expected = alone(True, 5)
    for outcome in outcomes:
        for path, state in expected.fp8.items():
            for key, value in state.items():
                # A sum in another order moves an amax by a bit at most.
                torch.testing.assert_close(outcome.fp8[path][key], value, rtol=1e-6, atol=0)
        # Such a bit may push a value over a boundary of the grid.
        assert outcome.losses == outcomes[0].losses == pytest.approx(expected.losses, rel=1e-3)


def test_transfers_of_a_run():
    settings = {"tensor_model_parallel_size": 2, **OVERLAP}
    assert overlap.transfers_of(small_config()) is comm.PLAIN
    assert overlap.transfers_of(small_config(2, **settings)) == Overlapped()
    others = {
        name: name != "tp_comm_overlap_rs"
        for name in ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad")
    }
    expected = Overlapped(ag=True, rs=False, rs_dgrad=True)
    assert overlap.transfers_of(small_config(2, **settings, **others)) == expected
