"""A weight that rests in FP8 is, bit by bit, what its layer makes of the 16-bit weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.errors import PrecisionError
from megatron.core.fp8 import Fp8State
from megatron.core.fp8.hardware import Verdict
from megatron.core.fp8.linear import linear
from megatron.core.fp8.policy import Fp8Policy
from megatron.core.fp8.primary import Fp8Weight
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Role,
)
from megatron.core.fp8.stats import StatsCollector

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "blockwise fp32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
}
PARTS = ("delayed", "tensorwise", "blockwise", "blockwise fp32")


def special_numbers(x):
    flat = x.view(-1)
    flat[5], flat[777], flat[-1] = torch.nan, torch.inf, -torch.inf
    return x


SPECIAL = {
    "random": lambda x: x,
    "zero": lambda x: x.zero_(),
    "tiny": lambda x: x.mul_(2.0**-130),
    "huge": lambda x: x.mul_(2.0**120),
    "nan and inf": special_numbers,
}


def layer(recipe, emulation="fast"):
    state = Fp8State(Fp8Policy(recipe), emulation=emulation)
    precision = state.for_linear("layer")
    if precision.slots is not None:
        state.book.scale.uniform_(0.5, 300.0, generator=torch.Generator().manual_seed(1))
    return state, precision


def values(kind, shape=(200, 300)):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = (drawn * torch.logspace(-3, 1, shape[1])).bfloat16()
    return SPECIAL[kind](x)


def bits(operand):
    codes = operand.to_fp8().data.contiguous().view(torch.uint8)
    return codes, operand.scale_inv.contiguous().view(torch.int32), operand.shape


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        for own, reference in zip(bits(one), bits(other), strict=True):
            assert torch.equal(own, reference) if torch.is_tensor(own) else own == reference
        assert one.form[:3] == other.form[:3]


def rest(weight, precision, whole, cuts):
    """Make codes of parts, as ranks do that share the weight."""
    primary = Fp8Weight(weight, precision)
    flat, ends = whole.reshape(-1), [*cuts, whole.numel()]
    parts = [(flat[a:b], a) for a, b in zip([0, *cuts], ends, strict=True)]
    found = torch.stack([primary.magnitudes(part, start) for part, start in parts]).amax(0)
    primary.agree(found)
    codes = torch.cat([primary.encode(part, start) for part, start in parts if part.numel()])
    primary.take_codes(codes.view(whole.shape))
    return primary


@pytest.mark.parametrize("emulation", ["fast", "exact"])
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", PARTS)
def test_made_of_parts(name, kind, emulation):
    """Cut in the middle of blocks and rows, with a part that is empty."""
    whole = values(kind)
    _, plain = layer(RECIPES[name], emulation)
    expected = plain.quantize_weight(nn.Parameter(whole.clone()))
    _, precision = layer(RECIPES[name], emulation)
    weight = nn.Parameter(whole.clone())
    rest(weight, precision, whole, [7, 7, 128 * 300 + 11, 45_000])
    assert weight.isnan().all()
    assert weight.shape == whole.shape
    assert weight.untyped_storage().nbytes() == 2
    assert_same(precision.quantize_weight(weight), expected)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", RECIPES)
def test_made_of_the_whole(name, kind):
    whole = values(kind)
    _, plain = layer(RECIPES[name])
    expected = plain.quantize_weight(nn.Parameter(whole.clone()))
    _, precision = layer(RECIPES[name])
    weight = nn.Parameter(whole.clone())
    primary = Fp8Weight(weight, precision)
    primary.take_values(whole, torch.empty(whole.shape, dtype=torch.uint8))
    assert_same(precision.quantize_weight(weight), expected)
    assert all(t.itemsize == 1 or t.numel() < whole.numel() / 16 for t in primary.tensors)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_operands_for_fp8_hardware(name, monkeypatch):
    """In the FP8 type and contiguous both; a CPU can make them, too."""
    there = Verdict(True, "a test", ("a kernel",) * 3)
    monkeypatch.setattr(Fp8State, "products", lambda self, recipe: there)
    whole = values("random", (256, 384))
    _, plain = layer(RECIPES[name])
    expected = plain.quantize_weight(nn.Parameter(whole.clone()))
    _, precision = layer(RECIPES[name])
    weight = nn.Parameter(whole.clone())
    if name in PARTS:
        rest(weight, precision, whole, [1000])
    else:
        codes = torch.empty(whole.shape, dtype=torch.uint8)
        Fp8Weight(weight, precision).take_values(whole, codes)
    for _ in range(2):  # the transposed copy is made once
        found = precision.quantize_weight(weight)
        assert_same(found, expected)
        assert all(one.data.is_contiguous() and not one.is_held for one in (*found, *expected))
    assert found[1].data.data_ptr() == precision.quantize_weight(weight)[1].data.data_ptr()


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_computes_the_same_bits(name):
    """Forward and both gradients; the order in memory is the same, too."""
    whole, x = values("random"), torch.randn(24, 300).bfloat16()

    def run(make):
        _, precision = layer(RECIPES[name])
        weight = nn.Parameter(whole.clone())
        weight.main_grad = torch.zeros(whole.shape)
        make(weight, precision)
        inputs = x.clone().requires_grad_()
        y = linear(inputs, weight, None, precision)
        y.backward(torch.ones_like(y))
        return y, inputs.grad, weight.main_grad

    def kept(weight, precision):
        codes = torch.empty(whole.shape, dtype=torch.uint8)
        Fp8Weight(weight, precision).take_values(whole, codes)

    for one, other in zip(run(kept), run(lambda *_: None), strict=True):
        assert torch.equal(one, other)


def test_magnitudes_are_recorded_once_a_step():
    state, precision = layer(RECIPES["delayed"])
    whole, weight = values("random"), nn.Parameter(values("random"))
    staged = precision.slots.forward
    rest(weight, precision, whole, [1000])
    with state.not_recording():
        precision.quantize_weight(weight)
    assert staged.amax_history[0, 1] == 0
    precision.quantize_weight(weight)
    assert staged.amax_history[0, 1] == whole.abs().max()
    state.discard()
    assert staged.amax_history[0, 1] == 0
    precision.quantize_weight(weight)
    assert staged.amax_history[0, 1] == whole.abs().max()


@pytest.mark.parametrize("name", RECIPES)
def test_statistics_know_magnitude_and_scale(name):
    """And nothing else: a rank has only a part of the 16-bit weight."""
    state, precision = layer(RECIPES[name])
    state.stats = StatsCollector(1, 0)
    state.stats.begin_step(1)
    whole = values("random")
    plain = nn.Parameter(whole.clone())
    precision.quantize_weight(plain)
    state.stats.end_step(state.layers)
    expected = state.stats.latest("layer")[Role.WEIGHT]
    weight = nn.Parameter(whole.clone())
    Fp8Weight(weight, precision).take_values(whole, torch.empty(whole.shape, dtype=torch.uint8))
    state.stats.begin_step(2)
    precision.quantize_weight(weight)
    state.stats.end_step(state.layers)
    found = state.stats.latest("layer")[Role.WEIGHT]
    assert (found.amax, found.scale, found.elements) == (expected.amax, expected.scale, 0)
    assert state.stats.uncast == ()


def test_it_has_numbers_while_its_layer_is_in_high_precision():
    _, precision = layer(RECIPES["tensorwise"])
    whole, weight = values("random"), nn.Parameter(values("random"))
    primary = rest(weight, precision, whole, [1000])
    before = weight._version
    precision.suspended = "a test"
    assert not primary.is_current
    with pytest.raises(PrecisionError, match="exists in FP8 only"):
        linear(torch.zeros(2, 300).bfloat16(), weight, None, precision)
    primary.take_values(whole, torch.empty(whole.shape, dtype=torch.uint8))
    assert primary.is_current
    assert torch.equal(weight, whole)
    assert weight._version > before
    precision.suspended = ""
    assert not primary.is_current


def test_scales_that_changed_are_noticed():
    state, precision = layer(RECIPES["delayed"])
    weight = nn.Parameter(values("random"))
    rest(weight, precision, weight.detach().clone(), [])
    precision.quantize_weight(weight)
    state.sync()
    with pytest.raises(PrecisionError, match="made with the ones before"):
        precision.quantize_weight(weight)
