"""FP8 attention over context-parallel ranks is that of the whole sequence, and travels as bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from distpool import run_ranks

from megatron.core.comm_log import AMAX, CommLog
from megatron.core.fp8 import DelayedScaling, Float8CurrentScaling, Fp8Policy, Fp8State
from megatron.core.fp8.attention import AttentionChoice
from megatron.core.transformer.attention_fp8 import Whole, fp8_attention
from megatron.core.transformer.attention_kernel import Block
from megatron.core.transformer.context_parallel import context_attention, take_local, to_sequence
from megatron.core.transformer.context_parallel_fp8 import placement
from megatron.training.parity.ranks import compile_kernels
from tests.distributed.test_ring_attention import COMMS, B, D, N, S, job_of, packed, ranks_for

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
    "tensorwise": Float8CurrentScaling(),
}
SCALE = 0.3  # that of `job_of`


def whole(groups, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(S, B, N, D), (S, B, groups, D), (S, B, groups, D), (S, B, N * D)]
    # The last rank's values are the largest: the others cannot know the scale alone.
    ramp = torch.linspace(0.5, 2.0, S)
    return [
        torch.randn(shape, generator=generator) * ramp.view(-1, *[1] * (len(shape) - 1))
        for shape in shapes
    ]


def state_of(recipe, backward=True):
    state = Fp8State(Fp8Policy(recipe=RECIPES[recipe]), attention=AttentionChoice(True, backward))
    return state, state.for_attention("layers.0.core_attention")


def book_of(state):
    (book,) = [one for one in state.books if one.paths()]
    return book


def step(inputs, precision, place):
    q, k, v, d_out = inputs
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fp8_attention(*leaves, precision, place)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, d_out))]


def alone(recipe, groups, starts, backward):
    """Results of two steps, and the magnitudes that the first one left."""
    state, precision = state_of(recipe, backward)
    for seed in range(2):
        found = step(whole(groups, seed), precision, Whole(Block(SCALE, 0, starts)))
        state.sync()
        if seed == 0:
            scales = book_of(state).scale.clone()
    return found, scales


def together(rank, size, comm, recipe, groups, starts, backward, in_fp8=True):
    """This rank's part of the same, and its scales after the first step."""
    axis, job = job_of(rank, size, comm, starts)
    state, precision = state_of(recipe, backward)
    place = placement(comm, axis, job, in_fp8)
    for seed in range(2):
        inputs = [take_local(x, axis, dim=0) for x in whole(groups, seed)]
        found = step(inputs, precision, place)
        state.sync(axis)
        if seed == 0:
            scales = book_of(state).scale.clone()
    return found, scales


def agree(found, expected):
    """Equal but for casts of values that sums in another order put on the other side of a boundary.

    Such a value is one in some ten thousand; what depends on it moves by up to a grid step.
    """
    for one, other in zip(found, expected, strict=True):
        error = (one - other).abs() / other.abs().amax()
        assert (error > 1e-5).float().mean() < 5e-3
        assert error.max() < 0.07


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("comm", COMMS)
def test_it_equals_one_process(comm, recipe):
    compile_kernels()
    size, groups, starts = ranks_for(comm), 2, packed()
    expected, scales = alone(recipe, groups, starts, backward=True)
    parts = run_ranks(together, size, comm, recipe, groups, starts, True)
    found = [to_sequence(torch.cat(x), size) for x in zip(*(p[0] for p in parts), strict=True)]
    agree(found, expected)
    for part in parts:
        torch.testing.assert_close(part[1], scales, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_it_equals_one_process_with_a_plain_backward(comm):
    expected, _ = alone("delayed", 2, None, backward=False)
    parts = run_ranks(together, 2, comm, "delayed", 2, None, False)
    found = [to_sequence(torch.cat(x), 2) for x in zip(*(p[0] for p in parts), strict=True)]
    agree(found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("comm", COMMS)
def test_sending_bytes_costs_nothing(comm, recipe):
    """The same bits as without FP8 on the way: what travels is what is multiplied."""
    size = ranks_for(comm)
    as_bytes = run_ranks(together, size, comm, recipe, 4, packed(), True)
    in_bf16 = run_ranks(together, size, comm, recipe, 4, packed(), True, False)
    for one, other in zip(as_bytes, in_bf16, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert torch.equal(one[1], other[1])


def sent(rank, size, comm, recipe):
    """Bytes of each transfer of one attention, by kind: in FP8, its values in bf16, and in bf16."""
    found = []
    for kind in ("fp8", "fp8 in bf16", "bf16"):
        log = CommLog()
        axis, job = job_of(rank, size, comm)
        axis, ring = replace(axis, log=log), replace(job.axis, log=log)
        inner = None if job.inner is None else replace(job.inner, log=log)
        job = replace(job, axis=axis if comm != "a2a+p2p" else ring, inner=inner)
        inputs = [take_local(x, axis, dim=0).bfloat16() for x in whole(N, 0)]
        if kind == "bf16":
            leaves = [x.requires_grad_() for x in inputs[:3]]
            out = context_attention(*leaves, job, comm)
            torch.autograd.grad(out, leaves, inputs[3])
        else:
            _, precision = state_of(recipe)
            step(inputs, precision, placement(comm, axis, job, kind == "fp8"))
        moved = Counter()
        for transfer, count in log.counts.items():
            if transfer.part != AMAX and transfer.kind != "recv":
                moved[transfer.kind] += transfer.payload_bytes * count
        found.append(moved)
    return found


ELEMENTS = S // 2 * B * N * D  # of a rank's keys, values or queries; two ranks
# name -> what travels as quantized values, and what in fp32: tensors of a rank
MOVES = {
    # Keys; keys and values; backward keys and values, and their gradients all the way around.
    ("p2p", "delayed"): ("send", 1 + 2 + 2, 2 * 2),
    # Keys and values twice; the gathered tensor counts.
    ("all_gather", "delayed"): ("all_gather", 2 * 4, 0),
    # Q, K, V and the result; its gradient and those of Q, K, V.
    ("a2a", "delayed"): ("all_to_all", 4 + 4, 0),
}


@pytest.mark.parametrize(("comm", "recipe"), MOVES)
def test_bytes_are_half_of_those_of_bf16(comm, recipe):
    kind, quantized, wide = MOVES[comm, recipe]
    for in_fp8, in_bf16, plain in run_ranks(sent, 2, comm, recipe):
        assert in_fp8[kind] == ELEMENTS * (quantized + 4 * wide)
        assert in_bf16[kind] == ELEMENTS * (2 * quantized + 4 * wide)
        # A ring goes around once more with the keys.
        again = 1 if comm == "p2p" else 0
        assert plain[kind] == ELEMENTS * (2 * (quantized - again) + 4 * wide)
        assert in_fp8["reduce_scatter"] == plain["reduce_scatter"]


def test_with_current_scaling_results_travel_in_bf16():
    """They are not quantized: Q, K, V and dO are bytes, the result and dQ, dK, dV are not."""
    in_fp8, in_bf16, plain = run_ranks(sent, 2, "a2a", "tensorwise")[0]
    assert in_fp8["all_to_all"] == ELEMENTS * (4 + 2 * 4)
    assert in_bf16["all_to_all"] == plain["all_to_all"] == ELEMENTS * 2 * 8
