"""NVFP4 in linear layers: who draws which random numbers, and what a layout changes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core import fp8
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.fp8 import Fp8Policy, Fp8State, NVFP4BlockScaling, linear
from megatron.core.fp8.comm import from_wire, to_wire
from megatron.core.fp8.grouped import grouped_linear
from megatron.core.fp8.nvfp4 import NVFP4Quantizer
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.random import RngStreams, checkpoint
from tests.contract.sharded import run_whole
from tests.distpool import run_ranks
from tests.small_models import small_config

NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(seed=1, path="decoder.layers.0.fc", rng=True):
    state = Fp8State(Fp8Policy(recipe=NVFP4BlockScaling()))
    state.rng = RngStreams(seed) if rng else None
    return state, state.for_linear(path)


def gradients(state, precision, position=(1, 0), queue=None, recompute=False):
    """Gradients of input and weight; the position has moved on when the backward runs."""
    weight = nn.Parameter(normal(48, 40, seed=0).bfloat16())
    weight.main_grad = torch.zeros(48, 40)
    x = normal(37, 40, seed=1).bfloat16().requires_grad_()
    if state.rng is not None:
        state.rng.position = position

    def run(x):
        return linear(x, weight, None, precision, later=queue)

    y = checkpoint(run, x, fp8=state) if recompute else run(x)
    if state.rng is not None:
        state.rng.position = (99, 99)
    if queue is None:
        y.backward(normal(37, 48, seed=2).bfloat16())
    else:
        with queue.collect("late"):
            y.backward(normal(37, 48, seed=2).bfloat16())
        queue.run("late")
    return x.grad, weight.main_grad


def same(one, other):
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_random_numbers_are_a_function_of_seed_layer_and_position():
    first = gradients(*layer())
    assert all(same(first, gradients(*layer())))
    others = (
        gradients(*layer(seed=2)),
        gradients(*layer(path="decoder.layers.1.fc")),
        gradients(*layer(), position=(2, 0)),
        gradients(*layer(), position=(1, 1)),
    )
    for other in others:
        assert not any(same(first, other))


def test_late_weight_gradients_and_recomputation_round_as_the_forward_was_placed():
    first = gradients(*layer())
    assert all(same(first, gradients(*layer(), queue=WeightGradQueue())))
    assert all(same(first, gradients(*layer(), recompute=True)))


def test_without_streams_the_default_generator_decides():
    found = []
    for recompute in (False, False, True):
        torch.manual_seed(3)
        found.append([gradients(*layer(rng=False), recompute=recompute) for _ in range(2)])
    for other in found[1:]:
        assert all(all(same(a, b)) for a, b in zip(found[0], other, strict=True))
    assert not any(same(*found[0]))
    state = torch.get_rng_state()
    with torch.no_grad():
        linear(torch.ones(2, 40), nn.Parameter(torch.ones(3, 40)), None, layer(rng=False)[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_experts_draw_their_own_numbers():
    state = Fp8State(Fp8Policy(recipe=NVFP4BlockScaling()))
    state.rng = RngStreams(1)
    precisions = [state.for_linear(f"experts.{i}", is_expert=True) for i in range(2)]
    weight = nn.Parameter(normal(48, 40, seed=0).bfloat16())
    x = torch.cat([normal(21, 40, seed=1)] * 2).bfloat16().requires_grad_()
    y = grouped_linear(x, [weight, weight], precisions, [21, 21])
    y.backward(torch.cat([normal(21, 48, seed=2)] * 2).bfloat16())
    assert torch.equal(*y.chunk(2))
    assert not torch.equal(*x.grad.chunk(2))
    alone = nn.Parameter(weight.detach().clone())
    part = x.detach()[:21].clone().requires_grad_()
    linear(part, alone, None, precisions[0]).backward(normal(21, 48, seed=2).bfloat16())
    assert torch.equal(part.grad, x.grad[:21])  # an expert is the dense layer of the same path


def test_a_training_loop_of_ones_own():
    """With recomputation, bitwise; layers and steps round differently; no state is kept."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            fp8.LayerNormLinear(40, 48, params_dtype=torch.bfloat16),
            nn.GELU(),
            fp8.Linear(48, 40, params_dtype=torch.bfloat16),
        )
        x = normal(21, 40, seed=1).bfloat16()
        for _ in range(2):
            model.zero_grad()
            with fp8.autocast(recipe=NVFP4BlockScaling()):
                y = fp8.checkpoint(model, x) if recompute else model(x)
            y.float().square().sum().backward()
            results.append([model[i].weight.grad.clone() for i in (0, 2)])
        assert not model.state_dict()["0._extra_state"]
    assert all(same(results[0], results[2]))
    assert all(same(results[1], results[3]))
    assert not any(same(results[0], results[1]))


@pytest.mark.parametrize("cols", [48, 37])
def test_four_bits_an_element_travel(cols):
    x = normal(32, cols, seed=0).bfloat16()
    quantizer = NVFP4Quantizer(NVFP4BlockScaling(), Role.INPUT)
    row = quantizer.rowwise(x)
    sent = to_wire(row)
    assert sent.shape == (32, -(-cols // 2) + -(-cols // 16))  # two codes a byte, and scales
    assert torch.equal(from_wire(sent, row).dequantize(), row.dequantize())
    kept = quantizer.keep(x, row)
    sent = to_wire(kept)
    assert sent.shape == (2, 8 * cols + cols)
    assert torch.equal(from_wire(sent, kept).dequantize(), kept.dequantize())


# -- layouts --------------------------------------------------------------------------------------


def tensors(tokens):
    """Input, weight and output gradient whose halves have equal magnitudes: so do those of ranks.

    A rank's own tensor has a scale of its own, as with other recipes that look at the tensor.
    """
    x, w, d_y = normal(tokens, 1, 32, seed=1), normal(32, 32, seed=2), normal(tokens, 1, 32, seed=3)
    return torch.cat([x, x], -1), torch.cat([torch.cat([w, w])] * 2, -1), torch.cat([d_y, d_y], -1)


def run_layer(rank, world_size, kind, recipe, tokens, sequence_parallel, frozen):
    """One forward and backward; output, input gradient and weight gradient of the whole layer."""
    config = small_config(
        world_size=world_size, tensor_model_parallel_size=world_size, fp4_format="e2m1",
        fp8_emulation="exact", sequence_parallel=sequence_parallel,
    )  # fmt: skip
    mesh = ParallelState.build(config, rank, world_size)
    build = Build.root(config, mesh, NativeBackend(), torch.device("cpu"), "layer")
    state = Fp8State(Fp8Policy(recipe=recipe), emulation="exact", params_dtype=torch.float32)
    state.rng = build.rng
    build = replace(build, fp8=state)
    made = getattr(build.backend, f"{kind}_parallel_linear")(
        64, 64, build=build, init_method=nn.init.zeros_, bias=False
    )
    return run_whole(
        made, mesh.tp, tensors(tokens), by_row=kind == "row",
        sequence_parallel=sequence_parallel, frozen=frozen,
    )  # fmt: skip


@functools.cache
def alone(*args):
    return run_layer(0, 1, *args)


def assert_close(got, want):
    for ours, theirs in zip(got, want, strict=True):
        # Sums in another order; another code anywhere would be off by a hundredth or more.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("tokens", [64, 36], ids=["tokens in blocks", "odd tokens"])
def test_ranks_round_as_one_process_does(kind, tokens):
    """To nearest in every layer, at random where ranks hold the same output gradient."""
    recipe = NEAREST if kind == "column" else NVFP4BlockScaling()
    for frozen in (False, True):
        want = alone(kind, recipe, tokens, False, frozen)
        for sequence_parallel in (False, True):
            args = (kind, recipe, tokens, sequence_parallel, frozen)
            for got in run_ranks(run_layer, 2, *args):
                assert_close(got, want)


def test_a_split_sequence_changes_nothing():
    args = ("column", NVFP4BlockScaling(), 64)
    plain, shards = (run_ranks(run_layer, 2, *args, sp, False) for sp in (False, True))
    assert_close(shards[0], plain[0])
    # Different columns of an output gradient are rounded with different random numbers.
    weight_grad = plain[0][2]
    assert not torch.equal(*weight_grad.chunk(2))
    assert torch.equal(*run_ranks(run_layer, 2, "column", NEAREST, 64, False, False)[0][2].chunk(2))
