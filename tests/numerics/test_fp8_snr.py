"""How far the three products of a linear layer are from exact ones, by recipe: floors in dB.

The floors follow from the formats. Rounding to E4M3 leaves noise 31.5 dB below a normal tensor,
rounding to E5M2 25.5 dB below it, whatever the scale, as long as few values are subnormal. Noise of
two operands adds up: 28.5 dB for two of E4M3, 24.5 dB for one of each. Below that by 0.3 dB for the
finite sample.

E2M1 has steps of 0.5, 1 and 2 up to 6. Noise of step^2 / 12 in a normal tensor whose blocks of 16
reach up to 6 is 20.5 dB below it, and in squares of 256, whose largest value is farther out, 18.8
dB. Rounding at random doubles noise, 3 dB. So two operands have 16.5 dB forward (blocks and
squares), 15.1 dB for the input's gradient (at random, and squares), and 15.7 dB for the weight's
(at random, and blocks: the transform leaves normal tensors normal).
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8 import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    linear,
)

E4M3_TWICE, E4M3_AND_E5M2 = 28.2, 24.2
RECIPES = {
    "tensorwise": (Float8CurrentScaling(), E4M3_AND_E5M2),
    "tensorwise-e4m3": (Float8CurrentScaling(fp8_format="e4m3"), E4M3_TWICE),
    "blockwise": (Float8BlockScaling(), E4M3_TWICE),
    "blockwise-hybrid": (Float8BlockScaling(fp8_format="hybrid"), E4M3_AND_E5M2),
    "blockwise-f32": (Float8BlockScaling(use_f32_scales=True), E4M3_TWICE),
    "mxfp8": (MXFP8BlockScaling(), E4M3_TWICE),
    "mxfp8-hybrid": (MXFP8BlockScaling(fp8_format="hybrid"), E4M3_AND_E5M2),
}
TOKENS, IN, OUT = 200, 300, 180


def decibels(got, want):
    error = got.double() - want
    return (10 * torch.log10(want.square().sum() / error.square().sum())).item()


def measure(recipe, x, weight, dy):
    """Signal to noise of forward, input gradient and weight gradient, fp32 parameters."""
    state = Fp8State(Fp8Policy(recipe=recipe), emulation="exact", params_dtype=torch.float32)
    x, weight = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
    y = linear(x, weight, None, state.for_linear("layer"))
    y.backward(dy)
    exact_x, exact_w, exact_dy = (t.detach().double() for t in (x, weight, dy))
    return (
        decibels(y.detach(), exact_x @ exact_w.t()),
        decibels(x.grad, exact_dy @ exact_w),
        decibels(weight.grad, exact_dy.t() @ exact_x),
    )


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RECIPES)
def test_normal_tensors(name):
    recipe, backward = RECIPES[name]
    fprop, dgrad, wgrad = measure(
        recipe, normal(TOKENS, IN, seed=0), normal(OUT, IN, seed=1), normal(TOKENS, OUT, seed=2)
    )
    assert fprop > E4M3_TWICE
    assert dgrad > backward
    assert wgrad > backward
    assert max(fprop, dgrad, wgrad) < 30  # better than the format allows: nothing was rounded


@pytest.mark.parametrize(
    ("recipe", "floors"),
    [
        (NVFP4BlockScaling(), (16.2, 14.8, 15.4)),
        (NVFP4BlockScaling(disable_stochastic_rounding=True), (16.2, 16.2, 17.2)),
        (NVFP4BlockScaling(disable_2d_quantization=True), (17.2, 15.4, 15.4)),
    ],
    ids=["nvfp4", "to nearest", "weights in rows"],
)
def test_normal_tensors_in_fp4(recipe, floors):
    x, weight = normal(TOKENS, IN, seed=0), normal(OUT, IN, seed=1)
    found = measure(recipe, x, weight, normal(TOKENS, OUT, seed=2))
    for decibel, floor in zip(found, floors, strict=True):
        assert floor < decibel < floor + 0.8  # better than that: not rounded as described


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_tokens_of_very_different_size(name):
    """A scale for each row serves tokens that are a million times smaller than others.

    The forward keeps the floor on the small tokens alone; one scale for the tensor loses them.
    """
    x = normal(TOKENS, IN, seed=0)
    x[::2] *= 2.0**-20
    weight, dy = normal(OUT, IN, seed=1), normal(TOKENS, OUT, seed=2)
    small = {}
    for kind in (name, "tensorwise-e4m3"):
        state = Fp8State(Fp8Policy(recipe=RECIPES[kind][0]), emulation="exact")
        y = linear(x, torch.nn.Parameter(weight), None, state.for_linear("layer"))
        small[kind] = decibels(y.detach()[::2], (x.double() @ weight.double().t())[::2])
    assert small[name] > E4M3_TWICE
    assert small["tensorwise-e4m3"] < 1
    assert min(measure(RECIPES[name][0], x, weight, dy)) > E4M3_TWICE - 0.3


def test_one_outlier_spoils_its_own_block_only():
    x = normal(TOKENS, 256, seed=0)
    x[:, 5] = 2.0**22
    weight = normal(OUT, 256, seed=1)
    weight[:, 5] = 0.0
    quality = {}
    for kind in ("tensorwise-e4m3", "blockwise", "mxfp8"):
        state = Fp8State(Fp8Policy(recipe=RECIPES[kind][0]), emulation="exact")
        y = linear(x, torch.nn.Parameter(weight), None, state.for_linear("layer"))
        quality[kind] = decibels(y.detach(), x.double() @ weight.double().t())
    # Lost are 32 of 256 columns with MX, 128 of 256 by block, all with one scale.
    assert quality["tensorwise-e4m3"] < 1
    assert 2.5 < quality["blockwise"] < 4  # half of the signal: 3 dB
    assert 8.5 < quality["mxfp8"] < 10  # an eighth: 9 dB
