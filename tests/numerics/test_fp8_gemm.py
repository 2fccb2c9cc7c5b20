"""The matrix product: exact mode against fp64, fast mode against exact, odd shapes, edge scales."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8 import gemm
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.gemm import gemm_nt, gemm_nt_accumulate
from megatron.core.fp8.quantizers import BlockQuantizer, CurrentQuantizer
from megatron.core.fp8.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Role,
)
from megatron.core.fp8.tensor import QuantizedTensor


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16 product", "fp32 product"])
def compute(request, monkeypatch):
    """What `fast` multiplies in: depends on the CPU, so both are tried everywhere."""
    monkeypatch.setattr(
        gemm, "gemm_dtype", lambda dtype, _: request.param if dtype == torch.bfloat16 else dtype
    )
    return request.param


def quantized(rows, cols, seed, role=Role.INPUT):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return CurrentQuantizer(Float8CurrentScaling(), role).rowwise(x)


def small_integers(rows, cols, seed, scale_inv):
    """Values whose products sum without rounding in fp32."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-16, 17, (rows, cols), generator=generator).bfloat16()
    return QuantizedTensor(data, torch.tensor(scale_inv), E4M3)


def oracle(a, b, bias=None):
    """fp64 sum, the fp32 product of the inverse scales, fp32, then one rounding to bf16."""
    total = a.data.double() @ b.data.double().t()
    factor = (a.scale_inv.double() * b.scale_inv.double()).float().double()
    scaled = (total * factor).float()
    return scaled if bias is None else scaled + bias.float()


def ulp_distance(a, b):
    """Distance in units in the last place of bf16."""

    def ordered(x):
        bits = x.view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(a) - ordered(b)).abs().max().item()


@pytest.mark.parametrize("with_bias", [False, True])
def test_exact_is_bitwise_the_oracle(with_bias):
    a, b = small_integers(33, 64, 1, 0.0123), small_integers(17, 64, 2, 3.7)
    bias = torch.randn(17).bfloat16() if with_bias else None
    y = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias, emulation="exact")
    want = oracle(a, b, bias).bfloat16()
    # The product adds the bias to the unrounded fp32 value, the oracle to a rounded one.
    assert ulp_distance(y, want) <= (1 if with_bias else 0)
    assert y.dtype == torch.bfloat16
    fp32 = gemm_nt(a, b, out_dtype=torch.float32, emulation="exact")
    assert torch.equal(fp32, oracle(a, b))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("role", [Role.INPUT, Role.GRAD_OUTPUT], ids=["e4m3", "e5m2"])
def test_fast_is_within_one_bf16_unit_of_exact(compute, with_bias, role):
    a, b = quantized(64, 512, 3, role), quantized(48, 512, 4)
    exact = gemm_nt(a, b, out_dtype=torch.bfloat16, emulation="exact")
    fast = gemm_nt(a, b, out_dtype=torch.bfloat16, emulation="fast")
    if with_bias:
        bias = torch.randn(48, generator=torch.Generator().manual_seed(1)).bfloat16()
        with_exact = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias, emulation="exact")
        with_fast = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias, emulation="fast")
        # One unit of the product or of the sum, whichever is larger: they may cancel.
        largest = torch.maximum(exact.float().abs(), with_exact.float().abs())
        assert ((with_fast.float() - with_exact.float()).abs() <= largest * 2.0**-7).all()
    # Sums near zero have no leading digits to compare; elsewhere one unit is the promise.
    clear = exact.float().abs() > 1e-3 * exact.float().abs().max()
    assert ulp_distance(fast[clear], exact[clear]) <= 1


def test_fast_with_wide_output_does_not_lose_the_extra_bits(compute):
    a, b = quantized(16, 128, 5), quantized(16, 128, 6)
    exact = gemm_nt(a, b, out_dtype=torch.float32, emulation="exact")
    for dtype in (torch.float32, torch.float16):
        fast = gemm_nt(a, b, out_dtype=dtype, emulation="fast")
        assert fast.dtype == dtype
        assert torch.equal(fast, exact.to(dtype))


@pytest.mark.parametrize("emulation", ["fast", "exact"])
def test_accumulation_into_fp32(compute, emulation):
    a, b = small_integers(16, 32, 7, 0.031), small_integers(24, 32, 8, 0.17)
    out = torch.full((16, 24), 2.0)
    gemm_nt_accumulate(a, b, out, emulation=emulation)
    want = oracle(a, b) + 2.0
    unrounded = emulation == "exact" or compute == torch.float32
    tolerance = 1e-6 if unrounded else 2.0**-7
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance * 10)


BLOCKS = pytest.mark.parametrize(
    "recipe",
    [Float8BlockScaling(), MXFP8BlockScaling(), Float8BlockScaling(use_f32_scales=True)],
    ids=["blockwise", "mxfp8", "blockwise-f32"],
)


def blocks_of_integers(recipe, rows, cols, role, seed, fold):
    """A block-scaled operand whose products sum without rounding in fp32: magnitudes a power of
    two apart from block to block, and at most four significant bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-15, 16, (rows, cols), generator=generator).float()
    spread = torch.arange(cols) // 32 % 3
    return BlockQuantizer(recipe, role, fold=fold).rowwise(x * torch.exp2(-spread.float()))


@BLOCKS
@pytest.mark.parametrize("emulation", ["fast", "exact"])
@pytest.mark.parametrize("k", [8, 100, 300])
def test_block_scales_are_rounded_once_in_either_mode(compute, recipe, emulation, k):
    fold = emulation == "fast"
    a = blocks_of_integers(recipe, 33, k, Role.INPUT, 1, fold)
    b = blocks_of_integers(recipe, 17, k, Role.WEIGHT, 2, fold)
    want = a.dequantize().double() @ b.dequantize().double().t()
    y = gemm_nt(a, b, out_dtype=torch.bfloat16, emulation=emulation)
    wide = gemm_nt(a, b, out_dtype=torch.float32, emulation=emulation)
    accumulated = torch.zeros(33, 17)
    gemm_nt_accumulate(a, b, accumulated, emulation=emulation)
    if recipe.exact_in_bf16:
        assert torch.equal(y, want.bfloat16())
        assert torch.equal(wide.double(), want)
        in_bf16 = emulation == "fast" and compute == torch.bfloat16
        assert torch.equal(accumulated, want.bfloat16().float() if in_bf16 else want.float())
    else:  # scaled operands are rounded to fp32, and so are sums
        bound = 2.0**-20 * want.abs().max().item()
        torch.testing.assert_close(wide.double(), want, rtol=0, atol=bound)
        torch.testing.assert_close(accumulated.double(), want, rtol=0, atol=bound)
        assert ulp_distance(y, want.bfloat16()) <= 1


@BLOCKS
def test_block_operands_that_travelled_give_the_same_product(compute, recipe):
    a = blocks_of_integers(recipe, 33, 200, Role.INPUT, 1, fold=True)
    b = blocks_of_integers(recipe, 17, 200, Role.WEIGHT, 2, fold=True)
    y = gemm_nt(a, b, out_dtype=torch.bfloat16)
    assert torch.equal(gemm_nt(a.to_fp8(), b, out_dtype=torch.bfloat16), y)
    assert torch.equal(gemm_nt(a.to_fp8().hold(), b.to_fp8(), out_dtype=torch.bfloat16), y)


@BLOCKS
def test_bias_is_added_before_rounding(compute, recipe):
    a = blocks_of_integers(recipe, 9, 64, Role.INPUT, 1, fold=True)
    b = blocks_of_integers(recipe, 5, 64, Role.WEIGHT, 2, fold=True)
    bias = torch.tensor([1e-3, -2.0, 0.5, 100.0, 0.0]).bfloat16()
    y = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias)
    want = a.dequantize().double() @ b.dequantize().double().t() + bias.double()
    assert ulp_distance(y, want.bfloat16()) <= 1


def test_plain_operands(compute):
    a, b = torch.randn(8, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    bias = torch.randn(6).bfloat16()
    y = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias)
    want = (a.double() @ b.double().t() + bias.double()).bfloat16()
    assert ulp_distance(y, want) <= 1
    out = torch.ones(8, 6)
    gemm_nt_accumulate(a, b, out)
    torch.testing.assert_close(out, 1 + a.float() @ b.float().t(), rtol=2**-7, atol=2**-4)


def test_one_plain_and_one_quantized_operand_is_an_error():
    with pytest.raises(TypeError, match="Quantize both or none"):
        gemm_nt(torch.randn(4, 4), quantized(4, 4, 1), out_dtype=torch.float32)
    with pytest.raises(TypeError, match="Quantize both or none"):
        gemm_nt_accumulate(quantized(4, 4, 1), torch.randn(4, 4), torch.zeros(4, 4))


@pytest.mark.parametrize("emulation", ["fast", "exact"])
def test_scales_at_the_edges_of_fp32(emulation):
    tiny = torch.tensor(torch.finfo(torch.float32).max).reciprocal()
    one = QuantizedTensor(torch.tensor([[448.0, 0.0]]).bfloat16(), tiny, E4M3)
    huge = QuantizedTensor(torch.tensor([[0.0, 448.0]]).bfloat16(), torch.tensor(1e30), E5M2)
    y = gemm_nt(huge, huge, out_dtype=torch.float32, emulation=emulation)
    assert torch.isinf(y).all()
    for a, b in ((one, one), (one, huge)):
        y = gemm_nt(a, b, out_dtype=torch.float32, emulation=emulation)
        assert y.item() == 0.0  # neither 0 * inf nor a denormal surprise
    y = gemm_nt(one, QuantizedTensor(one.data, torch.tensor(1e30), E4M3), out_dtype=torch.float32)
    assert y.item() == pytest.approx(448 * 448 * 1e30 / 3.4028235e38, rel=1e-5)


def test_no_rows():
    a, b = quantized(4, 32, 1), quantized(8, 32, 2)
    empty = QuantizedTensor(a.data[:0], a.scale_inv, a.fmt)
    assert gemm_nt(empty, b, out_dtype=torch.bfloat16).shape == (0, 8)
    out = torch.ones(32, 32)
    gemm_nt_accumulate(empty.t(), QuantizedTensor(b.data[:0], b.scale_inv, b.fmt).t(), out)
    assert (out == 1).all()


def test_bytes_and_held_operands_multiply_alike():
    a, b = quantized(16, 32, 1), quantized(16, 32, 2)
    held = gemm_nt(a, b, out_dtype=torch.bfloat16)
    mixed = gemm_nt(a.to_fp8(), b, out_dtype=torch.bfloat16)
    assert torch.equal(held, mixed)
