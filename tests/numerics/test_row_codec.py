"""Rows as bytes: what is lost, what is not, how many bytes there are."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.quantizers import BlockQuantizer
from megatron.core.fp8.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Role,
)
from megatron.core.fp8.row_codec import row_codec, values_of

NAN, INF = float("nan"), float("inf")
RECIPES = {"mxfp8": MXFP8BlockScaling(), "blockwise": Float8BlockScaling()}
EVERY_CODEC = pytest.mark.parametrize("name", RECIPES)


def codec_of(name, recipe=None, role=Role.INPUT, fold=True):
    return row_codec(name, recipe, role, fold=fold)


def there_and_back(codec, x):
    return values_of(codec.unpack(codec.pack(x), x.shape[1]), x.dtype)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_no_codec_for_the_models_type():
    assert codec_of("bf16") is None


@EVERY_CODEC
def test_bytes(name):
    """Half of bf16 and the scales: 3% more for 32 elements each, under 1% for 128."""
    codec, x = codec_of(name), normal(6, 300)
    packing = codec.packing(x)
    assert codec.pack(x).shape == (6, packing.sent)
    assert codec.pack(x).dtype == torch.uint8
    assert packing.scales == {"mxfp8": 10, "blockwise": 3}[name]
    assert (packing.sent, packing.plain) == (300 + packing.scales, 600)
    assert codec.packing(x.float()).plain == 1200


@EVERY_CODEC
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("role", [Role.INPUT, Role.GRAD_OUTPUT])
@pytest.mark.parametrize("fmt", ["e4m3", "hybrid"])
def test_what_comes_is_what_the_recipes_quantizer_makes(name, fold, role, fmt):
    recipe = type(RECIPES[name])(fp8_format=fmt)
    codec = codec_of(name, recipe, role, fold)
    quantizer = BlockQuantizer(recipe, role, fold=fold)
    assert codec.fits(quantizer)
    assert not codec.fits(BlockQuantizer(recipe, role, fold=not fold))
    x = normal(5, 200) * 2.0 ** torch.arange(-120, 120, 48).unsqueeze(1)
    x[0, :32], x[1, 3], x[2, 5], x[3, 150] = 0, NAN, INF, -1e-38
    made, came = quantizer.rowwise(x), codec.unpack(codec.pack(x), 200)
    assert made.form == came.form
    torch.testing.assert_close(came.data, made.data, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(came.scale_inv, made.scale_inv)


def test_which_layers_use_what_comes():
    """Only those whose blocks, scales and format are the same."""
    codec = codec_of("mxfp8")
    assert codec.fmt is E4M3
    assert codec.fits(BlockQuantizer(MXFP8BlockScaling(), Role.INPUT, fold=True))
    hybrid = MXFP8BlockScaling(fp8_format="hybrid")
    assert not codec.fits(BlockQuantizer(hybrid, Role.GRAD_OUTPUT, fold=True))
    assert codec_of("mxfp8", hybrid, Role.GRAD_OUTPUT).fmt is E5M2
    assert not codec.fits(BlockQuantizer(Float8BlockScaling(), Role.INPUT, fold=True))
    # A recipe that rounds again keeps the finer format on the way.
    other = Float8CurrentScaling(fp8_format="hybrid")
    assert codec_of("mxfp8", other, Role.GRAD_OUTPUT).fmt is E4M3


@EVERY_CODEC
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_travelling_again_loses_nothing(name, dtype):
    codec, x = codec_of(name), normal(40, 160, dtype=dtype)
    once = there_and_back(codec, x)
    assert once.dtype == dtype
    assert not torch.equal(once, x)
    assert torch.equal(there_and_back(codec, once), once)


@EVERY_CODEC
def test_a_line_of_zeros_is_a_row_of_zeros(name):
    codec = codec_of(name)
    lines = torch.zeros_like(codec.pack(normal(3, 100)))
    assert torch.equal(values_of(codec.unpack(lines, 100), torch.bfloat16), torch.zeros(3, 100))
    assert codec.unpack(codec.pack(normal(0, 100)), 100).shape == (0, 100)


@EVERY_CODEC
def test_a_row_does_not_depend_on_others(name):
    codec, x = codec_of(name), normal(9, 96)
    order = torch.tensor([8, 0, 0, 5])
    assert torch.equal(codec.pack(x)[order], codec.pack(x[order]))


def test_the_largest_fp16_number_stays_finite():
    """It is rounded up to 2^16, which fp16 does not have."""
    x = torch.full((1, 32), 65504.0, dtype=torch.float16)
    assert torch.equal(there_and_back(codec_of("mxfp8"), x), x)


def decibels(got, want):
    error = got.double() - want.double()
    return (10 * torch.log10(want.double().square().sum() / error.square().sum())).item()


@EVERY_CODEC
def test_error_figures(name):
    """31.5 dB for E4M3, 25.5 dB for E5M2, as `test_fp8_snr` derives them; tokens of any size."""
    x = normal(512, 1024, dtype=torch.float32)
    x *= 2.0 ** torch.randint(-20, 20, (512, 1), generator=torch.Generator().manual_seed(1))
    e5m2 = codec_of(name, type(RECIPES[name])(fp8_format="hybrid"), Role.GRAD_OUTPUT)
    for codec, figure in ((codec_of(name), 31.5), (e5m2, 25.5)):
        for row in (slice(None), slice(0, 1)):
            assert decibels(there_and_back(codec, x)[row], x[row]) == pytest.approx(figure, abs=0.4)
    # One channel a thousand times larger than the others costs them little: they keep 4 bits.
    x[:, 7] *= 1000
    small = torch.arange(1024) != 7
    assert decibels(there_and_back(codec_of(name), x)[:, small], x[:, small]) > 31
