"""Each product of a layer in FP8 or not: it is bit for bit that product of a layer all in one."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.config.fp8_policy import GEMMS, PolicyRule
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    linear,
)
from megatron.core.fp8.grouped import grouped_linear
from megatron.core.fp8.policy import LayerRule
from megatron.core.fp8.weight_grads import WeightGradQueue

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
COMBINATIONS = list(itertools.product((False, True), repeat=3))
PATH = "decoder.layers.0.fc"


def make(recipe, in_fp8, hardware=False):
    gemms = tuple(zip(GEMMS, in_fp8, strict=True))
    rule = LayerRule(PolicyRule(1, gemms=gemms), recipe)
    state = Fp8State(Fp8Policy(recipe=recipe, rules=(rule,)), params_dtype=torch.bfloat16)
    state.hardware = hardware
    return state


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(recipe, in_fp8, run, **options):
    """Output, input gradient and weight gradient of a second step, whose scales are not 1."""
    state = make(recipe, in_fp8, **options)
    weight = torch.nn.Parameter(draw(0, 40, 24))
    weight.main_grad = torch.zeros(40, 24)
    for step in (1, 2):
        weight.main_grad.zero_()
        x, dy = draw(step, 12, 24).requires_grad_(), draw(2 + step, 12, 40)
        y = run(state, x, weight, dy)
        state.sync()
    return y.detach(), x.grad, weight.main_grad


def dense(state, x, weight, dy):
    layer = state.layers.get(PATH) or state.for_linear(PATH)
    y = linear(x, weight, None, layer)
    y.backward(dy)
    return y


def put_off(state, x, weight, dy):
    layer, queue = state.layers.get(PATH) or state.for_linear(PATH), WeightGradQueue()
    y = linear(x, weight, None, layer, later=queue)
    with queue.collect("once"):
        y.backward(dy)
    queue.run("once")
    return y


def experts(state, x, weight, dy):
    path = f"{PATH}.0"
    layer = state.layers.get(path) or state.for_linear(path, is_expert=True)
    y = grouped_linear(x, [weight], [layer], [x.shape[0]])
    y.backward(dy)
    return y


@EVERY_RECIPE
@pytest.mark.parametrize("in_fp8", COMBINATIONS, ids=lambda c: "".join("BF"[one] for one in c))
@pytest.mark.parametrize("run", [dense, experts, put_off])
def test_every_combination(recipe, in_fp8, run):
    everything = results(recipe, (True, True, True), dense)
    nothing = results(recipe, (False, False, False), dense)
    assert not any(torch.equal(a, b) for a, b in zip(everything, nothing, strict=True))
    found = results(recipe, in_fp8, run)
    for gemm, one, ours, fp8, plain in zip(GEMMS, in_fp8, found, everything, nothing, strict=True):
        assert torch.equal(ours, fp8 if one else plain), gemm


@pytest.mark.parametrize("in_fp8", COMBINATIONS[1:-1], ids=lambda c: "".join("BF"[i] for i in c))
def test_in_the_fp8_type(in_fp8):
    """As on FP8 hardware; torch has its product on a CPU too."""
    recipe = RECIPES["tensorwise"]
    everything = results(recipe, (True, True, True), dense, hardware=True)
    nothing = results(recipe, (False, False, False), dense)
    for run in (dense, experts):
        found = results(recipe, in_fp8, run, hardware=True)
        for one, ours, fp8, plain in zip(in_fp8, found, everything, nothing, strict=True):
            assert torch.equal(ours, fp8 if one else plain)


@pytest.mark.parametrize("in_fp8", COMBINATIONS[1:], ids=lambda c: "".join("BF"[i] for i in c))
def test_only_what_is_quantized_is_recorded(in_fp8):
    state = make(RECIPES["delayed"], in_fp8)
    weight = torch.nn.Parameter(draw(0, 40, 24))
    dense(state, draw(1, 12, 24).requires_grad_(), weight, draw(2, 12, 40))
    fprop, dgrad, wgrad = in_fp8
    x, w, _, dy, _ = (state.book.history[0] > 0).tolist()
    assert (x, w, dy) == (fprop or wgrad, fprop or dgrad, dgrad or wgrad)
