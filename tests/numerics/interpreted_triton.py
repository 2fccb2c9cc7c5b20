"""Triton's kernels in its interpreter, bit for bit against plain torch.

Not collected by itself: Triton decides when it is imported whether it interprets, so
`test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import torch.nn.functional as F

from megatron.core.backends.native import NativeBackend
from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.kernels import device, plain, plain_blocks
from megatron.core.fp8.scales import ScaleRule
from megatron.core.transformer.mlp import swiglu
from tests.gpu import cases

# Arithmetic on infinities and NaN is what is tested; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
CONTENTS = ("random", "bits", "subnormal", "huge", "zero", "nan", "inf")
RULES = {
    "blockwise": (128, ScaleRule.POWER_OF_TWO),
    "blockwise-f32": (128, ScaleRule.FP32),
    "mxfp8": (32, ScaleRule.E8M0),
}


@pytest.fixture(autouse=True)
def _with_triton():
    previous = kernels.use("triton")
    yield
    kernels.use(previous)


def matrix(kind, shape, dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator)
    if kind == "bits":
        bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64)
        x = bits.to(torch.int32).view(torch.float32)
        return x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x = x * {"subnormal": smallest / 4, "huge": largest / 8, "zero": 0.0}.get(kind, 1.0)
    if kind in ("nan", "inf"):
        x.view(-1)[:: 37 if kind == "nan" else 1009] = float(kind)
        x.view(-1)[5::61] *= -float(kind)
    return x.to(dtype)


def assert_bits(got, want):
    """Equal in every bit; of NaN only that it is one, unless it is a code."""
    got, want = got.contiguous(), want.contiguous()
    assert got.dtype == want.dtype
    if got.dtype.itemsize == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    else:
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan)
        got, want = (torch.where(nan, torch.zeros_like(t), t) for t in (got, want))
        assert torch.equal(got.signbit(), want.signbit())
    assert torch.equal(got, want)


@FORMATS
@DTYPES
@pytest.mark.parametrize("kind", CONTENTS)
def test_one_pass_is_the_plain_cast_magnitude_and_transpose(fmt, dtype, kind):
    x, scale = matrix(kind, (131, 77), dtype), torch.tensor(3.7)
    want, amax = plain.cast(x, scale, fmt), plain.amax(x)
    for turned in (False, True):
        made = kernels.cast_once(x, scale, fmt, want_amax=True, want_turned=turned)
        assert_bits(made.data, want)
        assert_bits(made.amax, amax)
        if turned:
            assert_bits(made.turned, want.t())
    assert_bits(kernels.turn(want), want.t())
    assert_bits(kernels.amax(x), amax)
    held, again = kernels.round_to_grid(x, scale, fmt, want_amax=True)
    assert_bits(held, plain.round_to_grid(x, scale, fmt)[0])
    assert_bits(again, amax)


@FORMATS
def test_every_rounding_boundary(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).float()
    values = codes[codes.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middle, *(torch.nextafter(middle, middle * f) for f in (2, 0))])
    x = torch.cat([x, torch.tensor([fmt.max * 1.01, -fmt.max * 2])]).view(1, -1)
    assert_bits(kernels.cast(x, torch.tensor(1.0), fmt), plain.cast(x, torch.tensor(1.0), fmt))


@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (129, 1), (257, 16)])
def test_odd_shapes_and_strides(shape):
    x, scale = matrix("random", shape[::-1], torch.bfloat16).t(), torch.tensor(2.0)
    made = kernels.cast_once(x, scale, E4M3, want_turned=True)
    assert_bits(made.data, plain.cast(x, scale, E4M3))
    assert_bits(made.turned, plain.cast(x, scale, E4M3).t())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", CONTENTS)
def test_blocks_in_both_directions(name, kind):
    length, rule = RULES[name]
    types = ((E4M3, torch.bfloat16), (E5M2, torch.float32), (E4M3, torch.float16))
    for fmt, dtype in types if kind == "subnormal" else types[: 1 + (kind == "bits")]:
        x = matrix(kind, (140, 61) if CONTENTS.index(kind) % 2 else (61, 140), dtype)
        wanted = {}
        for block in ((1, length), (length, 1), (length, length)):
            held, inverse = plain_blocks.round_blocks(x, fmt, block, rule, False)
            wanted[block] = plain.encode(held, fmt).view(fmt.torch_dtype), inverse
            made = kernels.cast_blocks(x, fmt, block, rule)
            for got, want in zip(made, wanted[block], strict=True):
                assert_bits(got, want)
        fold = rule is not ScaleRule.FP32
        held, _ = plain_blocks.round_blocks(x, fmt, block, rule, fold)
        assert_bits(kernels.round_blocks(x, fmt, block, rule, fold=fold)[0], held)
        both = kernels.cast_blocks_both(x, fmt, length, rule)
        for made, block in zip(both, ((1, length), (length, 1)), strict=True):
            assert_bits(made[0], wanted[block][0])
            assert_bits(made[1], wanted[block][1])
        assert both[1][0].t().is_contiguous()  # as a product wants it


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("zero_centered", [False, True])
@DTYPES
def test_a_norm_and_its_cast(centered, zero_centered, dtype):
    x = matrix("random", (10, 100), dtype) * 3 + 1
    weight = matrix("random", (100,), dtype)
    shift = weight.flip(0) if centered else None
    factor = weight.float() + 1.0 if zero_centered else weight.float()
    for scale in (None, torch.tensor(17.3)):
        made = kernels.norm(
            x,
            weight,
            shift,
            1e-5,
            centered=centered,
            zero_centered=zero_centered,
            scale=scale,
            fmt=E4M3,
        )
        y = plain.normalize(x, factor, shift, made.mean, made.inverse)
        rounded = y.to(dtype)
        # Delayed scaling casts the fp32 values; without a scale they are rounded first.
        assert_bits(made.data, rounded if scale is None else plain.cast(y, scale, E4M3))
        assert_bits(made.amax, plain.amax(rounded if scale is None else y))
        wide = x.double() - x.double().mean(1, keepdim=True) if centered else x.double()
        inverse = (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        # A sum of 100 fp32 numbers in some order, a division and a root: 2**-21.
        torch.testing.assert_close(made.inverse.double(), inverse, rtol=2.0**-21, atol=0)


@DTYPES
def test_swiglu_and_its_cast(dtype):
    x = matrix("random", (9, 2 * 300), dtype) * 4
    x[0, :4] = torch.tensor([0.0, -0.0, 60.0, -200.0])
    gate, up = x[:, :300].float().requires_grad_(), x[:, 300:].float().requires_grad_()
    y = F.silu(gate) * up
    # The exponential may differ in the last place of fp32, which can flip a rounding.
    unit = 2.0 ** {torch.bfloat16: -8, torch.float16: -10, torch.float32: -21}[dtype]
    close = {"rtol": unit, "atol": 1e-6}
    torch.testing.assert_close(kernels.swiglu(x), y.detach().to(dtype), **close)
    grad = matrix("random", (9, 300), dtype)
    y.backward(grad.float())
    want = torch.cat([gate.grad, up.grad], 1).to(dtype)
    torch.testing.assert_close(kernels.swiglu_grad(x, grad), want, rtol=4 * unit, atol=4e-6)
    scale = torch.tensor(9.1)
    codes, amax, values = device.module("fused").swiglu_and_cast(x, scale, E4M3, keep=True)
    assert_bits(values, kernels.swiglu(x))
    assert_bits(codes, plain.cast(values, scale, E4M3))
    assert_bits(amax, plain.amax(values))


def two_steps(recipe, normalization, implementation):
    """A layer with a norm in front, on operands in the FP8 type; what its second step gives."""
    previous = kernels.use(implementation)
    path = "decoder.layers.0.mlp.linear_fc1"
    settings = {"normalization": normalization, **cases.RECIPES[recipe]}
    build = cases.build_on(cases.CPU, NativeBackend(), path, **settings)
    build.fp8.hardware = True  # torch multiplies operands with one scale on a CPU, too
    layer = NativeBackend().layernorm_column_parallel_linear(
        64, 48, build=build, init_method=torch.nn.init.xavier_normal_, bias=True
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(6, 2, n, generator=generator).bfloat16() for n in (64, 48))
        x.requires_grad_()
        layer.zero_grad()
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        y, _ = layer(x)
        y.backward(dy)
        build.fp8.sync(build.mesh.amax)
    kernels.use(previous)
    made = {"y": y, "dx": x.grad, "dw": layer.weight.main_grad}
    made.update((n, p.grad) for n, p in layer.named_parameters() if "layer_norm" in n)
    if build.fp8.book is not None:
        made["scale"] = build.fp8.book.scale
    return {name: value.detach() for name, value in made.items()}


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("recipe", list(cases.RECIPES))
def test_a_layer_whose_norm_is_cast_at_once(recipe, normalization, monkeypatch):
    count = []
    right = kernels.norm
    monkeypatch.setattr(kernels, "norm", lambda *a, **k: count.append(1) or right(*a, **k))
    at_once = two_steps(recipe, normalization, "triton")
    assert len(count) == 2
    apart = two_steps(recipe, normalization, "plain")
    assert len(count) == 2
    assert at_once.keys() == apart.keys()
    for name, value in at_once.items():
        # Row statistics differ in the last place, so an element may take the neighbouring code.
        assert cases.relative_error(value, apart[name]) < (1e-6 if name == "scale" else 6e-3)


def test_a_gated_layer():
    x = (torch.randn(3, 2, 64) * 3).bfloat16()
    results = []
    for implementation in ("triton", "plain"):
        previous = kernels.use(implementation)
        given = x.clone().requires_grad_()
        y = swiglu(given)
        y.backward(torch.ones_like(y))
        kernels.use(previous)
        results.append((y.detach(), given.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("group", device.GROUPS)
def test_the_check_on_a_device_passes(group):
    cpu = torch.device("cpu")
    assert [name for name, right in device.checks(group, cpu, True) if not right()] == []


def test_the_check_on_a_device_notices(monkeypatch):
    casts = device.module("casts")
    monkeypatch.setattr(casts, "turn", lambda codes: codes.t().contiguous().flip(0))
    cpu = torch.device("cpu")
    wrong = [name for name, right in device.checks("casts", cpu, True) if not right()]
    assert wrong == ["e4m3 cast", "e5m2 cast"]


def test_kernels_take_what_they_can():
    x = torch.randn(4, 8)
    assert kernels.implementation() == "triton"
    assert not kernels.can_norm(torch.randn(2, 20000))
    with pytest.raises(ValueError, match="can_norm"):
        kernels.norm(
            x.double(),
            x[0],
            None,
            1e-5,
            centered=False,
            zero_centered=False,
            scale=None,
            fmt=E4M3,
        )
    assert kernels.swiglu(x.double()) is None
    assert kernels.cast(torch.empty(0, 8), torch.tensor(1.0), E4M3).shape == (0, 8)
    inverse = kernels.round_blocks(x, E4M3, (1, 3), ScaleRule.FP32)[1]  # no such tile
    assert inverse.shape == (4, 3)
