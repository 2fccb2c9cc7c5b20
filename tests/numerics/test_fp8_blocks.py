"""Block scales: bitwise against a per-element oracle, in both directions, and by hand."""

from __future__ import annotations

import bisect
import itertools
import math

import numpy as np
import pytest
import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2, code_values
from megatron.core.fp8.quantizers import BlockQuantizer
from megatron.core.fp8.recipe import Float8BlockScaling, MXFP8BlockScaling, Role
from megatron.core.fp8.scales import ScaleRule, e8m0_scale, from_e8m0, to_e8m0

NAN, INF = float("nan"), float("inf")
RECIPES = {
    "blockwise": Float8BlockScaling(),
    "blockwise-hybrid": Float8BlockScaling(fp8_format="hybrid"),
    "blockwise-f32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8-hybrid": MXFP8BlockScaling(fp8_format="hybrid"),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@pytest.fixture(params=["plain", "compiled"])
def implementation(request):
    previous = kernels.use(request.param)
    yield request.param
    kernels.use(previous)


# -- the oracle: one element at a time, no arithmetic shared with the code under test -------------


def oracle_scale(amax, fmt, rule, largest):
    """Scale of a block (a power of two as a Fraction, or an fp32 number) and its inverse."""
    if rule is ScaleRule.E8M0:
        exponent = 127  # of an infinite magnitude
        if amax == 0:
            exponent = -127
        elif amax != INF:
            quotient = float(np.float32(amax) * np.float32(1 / fmt.max))
            exponent = next((e for e in range(-127, 127) if 2.0**e >= quotient), 127)
        return np.float32(2.0**-exponent), np.float32(2.0**exponent)
    if amax in (0.0, INF):
        return np.float32(1), np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(fmt.max) / np.float32(amax)
    if np.isinf(scale):
        scale = np.float32(largest)
    if rule is ScaleRule.POWER_OF_TWO:
        scale = np.float32(2.0 ** (math.frexp(float(scale))[1] - 1))
    return scale, np.float32(1) / scale


class Oracle:
    def __init__(self, fmt):
        self.fmt = fmt
        self.grid = [v for v in code_values(fmt)[:128].tolist() if v < INF]

    def code(self, value, scale):
        """Nearest code of value times scale, of two equally near ones the even one."""
        if math.isnan(value):
            return self.fmt.nan_code
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            v = float(np.float32(value) * scale)
        magnitude = min(abs(v), self.fmt.max)
        above = bisect.bisect_left(self.grid, magnitude)
        near = [code for code in (above - 1, above) if 0 <= code < len(self.grid)]
        # Exact in fp64: an fp32 number between two neighbours of a coarse grid.
        best = min(near, key=lambda c: (abs(self.grid[c] - magnitude), c % 2))
        return best | (0x80 if math.copysign(1.0, v) < 0 else 0)

    def matrix(self, x, block, rule):
        """Codes and inverse scales of a matrix, block by block."""
        rows, cols = x.shape
        values, largest = x.float().tolist(), torch.finfo(x.dtype).max
        codes = np.zeros((rows, cols), dtype=np.uint8)
        inverses = np.zeros((-(-rows // block[0]), -(-cols // block[1])), dtype=np.float32)
        for b, k in itertools.product(*(range(n) for n in inverses.shape)):
            inside = [
                (r, c)
                for r in range(b * block[0], min((b + 1) * block[0], rows))
                for c in range(k * block[1], min((k + 1) * block[1], cols))
            ]
            magnitudes = [abs(values[r][c]) for r, c in inside if not math.isnan(values[r][c])]
            amax = max(magnitudes, default=0.0)
            scale, inverses[b, k] = oracle_scale(amax, self.fmt, rule, largest)
            for r, c in inside:
                codes[r, c] = self.code(values[r][c], scale)
        return codes, inverses


def contents(kind, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "wide":  # magnitudes over twenty binades within a block
        x = x * torch.exp2(torch.randint(-18, 3, shape, generator=generator).float())
    elif kind == "subnormal":
        x = x * 2.0**-130
    elif kind == "huge":
        x = (x * 2.0**126).clamp(-3.3e38, 3.3e38)
    elif kind == "zero":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0)
    elif kind == "special":  # NaN and infinity in some blocks, nothing but NaN in the first
        x = torch.where(torch.rand(shape, generator=generator) < 0.01, NAN, x)
        x = torch.where(torch.rand(shape, generator=generator) < 0.003, -INF, x)
        x[:1, :] = NAN
        x[:, :1] = NAN
    elif kind == "bits":  # any bit pattern
        raw = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
        x = raw.to(torch.int32).view(torch.float32)
    return x.to(dtype)


def assert_is(make, want_codes, want_inverse):
    """What `make` gives, with either implementation of the kernels."""
    before = kernels.implementation()
    for name in ("plain", "compiled"):
        kernels.use(name)
        made = make()
        codes = made.to_fp8().data.view(torch.uint8).contiguous().numpy()
        kernels.use(before)
        assert made.scale_inv.dtype == torch.float32
        inverse = made.scale_inv.contiguous().numpy().view(np.uint32)
        np.testing.assert_array_equal(inverse, want_inverse.view(np.uint32), err_msg=name)
        np.testing.assert_array_equal(codes, want_codes, err_msg=name)


KINDS = ["normal", "wide", "subnormal", "huge", "zero", "special", "bits"]


@EVERY_RECIPE
@pytest.mark.parametrize("role", list(Role), ids=lambda r: r.value)
@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_are_bitwise_the_oracle(recipe, role, kind):
    quantizer = BlockQuantizer(recipe, role, fold=False)
    blocks, oracle = recipe.blocks_of(role), Oracle(quantizer.fmt)
    row, column = (blocks.length if blocks.square else 1, blocks.length), (blocks.length, 1)
    column = row if blocks.square else column
    for dtype, shape in ((torch.bfloat16, (5, 131)), (torch.float32, (130, 3))):
        x = contents(kind, shape, dtype)
        assert_is(lambda x=x: quantizer.rowwise(x), *oracle.matrix(x, row, blocks.rule))
        codes, inverse = oracle.matrix(x, column, blocks.rule)
        want = codes.T, np.ascontiguousarray(inverse.T)
        assert_is(lambda x=x: quantizer.colwise(x), *want)
        assert_is(lambda x=x: quantizer.column(quantizer.keep(x, quantizer.rowwise(x))), *want)


@EVERY_RECIPE
@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (128, 1), (2, 129), (129, 17), (2, 512)])
def test_odd_and_even_shapes(recipe, shape):
    for role in (Role.INPUT, Role.WEIGHT):
        quantizer = BlockQuantizer(recipe, role, fold=False)
        blocks, oracle = recipe.blocks_of(role), Oracle(quantizer.fmt)
        x = contents("wide", shape, torch.bfloat16, seed=7)
        want = oracle.matrix(x, blocks.row, blocks.rule)
        assert_is(lambda x=x, quantizer=quantizer: quantizer.rowwise(x), *want)


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (1, 128), (128, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.POWER_OF_TWO, ScaleRule.E8M0], ids=lambda r: r.name)
def test_folding_loses_nothing_but_what_bf16_cannot_hold(block, rule, implementation):
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float32):
            x = contents(kind, (150, 140), dtype, seed=3)
            held, inverse = kernels.round_blocks(x, E4M3, block, rule)
            folded, again = kernels.round_blocks(x, E4M3, block, rule, fold=True)
            assert torch.equal(inverse.view(torch.int32), again.view(torch.int32))
            later = kernels.fold_blocks(held, inverse, block)
            same = (later.view(torch.int16) == folded.view(torch.int16)) | torch.isnan(folded)
            assert same.all()
            whole = inverse.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            exact = held.double() * whole[:150, :140].double()
            normal = (exact.abs() >= 2.0**-126) & (exact.abs() < 2.0**128)
            assert torch.equal(folded.double()[normal], exact[normal])
            assert (folded.abs().double() <= exact.abs())[exact.abs() < 2.0**-126].all()
            assert torch.equal(torch.isnan(folded), torch.isnan(x))


@EVERY_RECIPE
def test_two_implementations_and_two_threads_agree_on_large_matrices(recipe):
    quantizer = BlockQuantizer(recipe, Role.INPUT, fold=True)
    x = contents("bits", (1030, 517), torch.bfloat16, seed=11)  # enough for a second thread
    results, threads = [], kernels.set_threads(None)
    for name, count in (("plain", None), ("compiled", 1), ("compiled", 2)):
        before = kernels.use(name)
        kernels.set_threads(count)
        made = [quantizer.rowwise(x), quantizer.colwise(x)]
        results.append([part.contiguous() for q in made for part in (q.data, q.scale_inv)])
        kernels.use(before)
    kernels.set_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("fold", [False, True])
@EVERY_RECIPE
def test_an_empty_matrix(recipe, fold, implementation):
    quantizer = BlockQuantizer(recipe, Role.GRAD_OUTPUT, fold=fold)
    for shape in ((0, 64), (64, 0)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        assert quantizer.rowwise(x).dequantize().shape == shape
        assert quantizer.colwise(x).dequantize().shape == shape[::-1]


@EVERY_RECIPE
def test_strided_input_and_fp16(recipe, implementation):
    base = contents("wide", (70, 45), torch.float32, seed=5)
    quantizer = BlockQuantizer(recipe, Role.INPUT, fold=True)
    strided, copied = quantizer.rowwise(base.t()), quantizer.rowwise(base.t().contiguous())
    assert torch.equal(strided.data, copied.data)
    half = base.half()
    assert torch.equal(quantizer.rowwise(half).data, quantizer.rowwise(half.float()).data)


# -- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amax", "inverse", "largest"),
    [
        (448.0, 2.0**0, 448),
        (449.0, 2.0**1, 224),
        (1.0, 2.0**-8, 256),
        (3.0, 2.0**-7, 384),
        (1.9375, 2.0**-7, 256),  # 248 is a tie; OCP's own rule would take 2**-8 and clip 496
        (0.0, 2.0**-127, 0),
        (INF, 2.0**127, 448),
        (1e-45, 2.0**-127, 0),
    ],
)
def test_mx_scales_by_hand(amax, inverse, largest, implementation):
    held, inv = kernels.round_blocks(torch.tensor([[amax]]), E4M3, (1, 32), ScaleRule.E8M0)
    assert (inv.item(), held.item()) == (inverse, largest)


def test_mx_exponent_of_every_positive_bf16_magnitude():
    """The smallest power of two that leaves the magnitude within the format, in exact numbers."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    scale, inverse = e8m0_scale(amax, E4M3.max)
    assert (amax.double() * scale.double() <= 448).all()
    half = inverse.double() / 2
    assert ((amax.double() / half > 448) | (inverse == 2.0**-127)).all()
    assert torch.equal(scale.double() * inverse.double(), torch.ones_like(amax).double())


def test_e8m0_codes_are_the_powers_of_two():
    codes = torch.arange(255, dtype=torch.uint8)
    values = from_e8m0(codes)
    assert values.double().tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert torch.equal(to_e8m0(values), codes)
    native = codes.view(torch.float8_e8m0fnu).float()
    assert torch.equal(native.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 1.0),
        (3.0, 128.0),
        (448.0, 1.0),
        (449.0, 0.5),
        (INF, 1.0),
        (NAN, 1.0),
        (1e-38, 2.0**127),
        (1e-45, 2.0**127),
    ],
)
def test_block_scales_by_hand(amax, scale, implementation):
    x = torch.tensor([[amax]])
    _, inv = kernels.round_blocks(x, E4M3, (1, 128), ScaleRule.POWER_OF_TWO)
    assert inv.item() == 1 / scale


def test_an_overflowing_scale_is_the_largest_number_of_the_tensor_type(implementation):
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.tensor([[1e-38]], dtype=dtype)
        _, inv = kernels.round_blocks(x, E4M3, (1, 128), ScaleRule.FP32)
        assert inv.item() == np.float32(1) / np.float32(torch.finfo(dtype).max)


def test_number_of_scales():
    x = torch.randn(200, 300)
    recipe = Float8BlockScaling()
    made = BlockQuantizer(recipe, Role.INPUT, fold=True)
    assert made.rowwise(x).scale_inv.shape == (200, 3)
    assert made.colwise(x).scale_inv.shape == (300, 2)
    weight = BlockQuantizer(recipe, Role.WEIGHT, fold=True)
    assert weight.rowwise(x).scale_inv.shape == (2, 3)
    assert weight.colwise(x).scale_inv.shape == (3, 2)
    assert weight.colwise(x).block == (128, 128)


def test_a_zero_in_an_edge_block_is_not_counted():
    """The magnitude of a ragged block is that of the elements that exist."""
    x = torch.full((1, 130), 3.0)
    x[0, 128:] = 2.0**-10
    made = BlockQuantizer(Float8BlockScaling(), Role.INPUT, fold=False).rowwise(x)
    assert made.scale_inv.tolist() == [[2.0**-7, 2.0**-18]]


@EVERY_RECIPE
def test_the_two_directions_of_an_input_are_different_roundings(recipe):
    x = contents("wide", (256, 256), torch.float32)
    quantizer = BlockQuantizer(recipe, Role.INPUT, fold=True)
    row, column = quantizer.rowwise(x).dequantize(), quantizer.colwise(x).dequantize().t()
    assert not torch.equal(row, column)
    weight = BlockQuantizer(recipe, Role.WEIGHT, fold=True)
    same = torch.equal(weight.rowwise(x).dequantize(), weight.colwise(x).dequantize().t())
    assert same == recipe.blocks_of(Role.WEIGHT).square


def test_gradients_are_e5m2_with_the_hybrid_format_only():
    for kind in (Float8BlockScaling, MXFP8BlockScaling):
        roles = [BlockQuantizer(kind(), r, fold=True).fmt for r in Role]
        assert roles == [E4M3, E4M3, E4M3]
        hybrid = kind(fp8_format="hybrid")
        assert BlockQuantizer(hybrid, Role.GRAD_OUTPUT, fold=True).fmt == E5M2


@EVERY_RECIPE
def test_bytes_and_back(recipe):
    """What travels between ranks is what a rank would have made."""
    x = contents("wide", (64, 96), torch.bfloat16)
    for role in Role:
        folded = BlockQuantizer(recipe, role, fold=True).rowwise(x)
        plain = BlockQuantizer(recipe, role, fold=False).rowwise(x)
        wire = folded.to_fp8()
        assert wire.data.element_size() == 1
        assert torch.equal(wire.data.view(torch.uint8), plain.to_fp8().data.view(torch.uint8))
        assert torch.equal(wire.dequantize(), folded.dequantize())
        assert torch.equal(wire.t().dequantize(), folded.t().dequantize())
        if folded.folded:
            assert torch.equal(wire.fold().data, folded.data)


def test_only_powers_of_two_are_folded():
    made = BlockQuantizer(RECIPES["blockwise-f32"], Role.INPUT, fold=True).rowwise(torch.ones(2, 2))
    assert not made.folded
    with pytest.raises(ValueError, match="power-of-two"):
        made.fold()


def test_a_row_of_blocks_has_no_transpose():
    quantizer = BlockQuantizer(RECIPES["mxfp8"], Role.INPUT, fold=True)
    with pytest.raises(ValueError, match="keep and column"):
        quantizer.transposed(quantizer.rowwise(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim"),
        (lambda: Float8BlockScaling(grad_block_scaling_dim=2), "grad_block_scaling_dim"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), "1 or 2"),
        (lambda: MXFP8BlockScaling(margin=1), "margin"),
        (lambda: MXFP8BlockScaling(fp8_format="e5m2"), "fp8_format"),
        (lambda: Float8BlockScaling(margin=0), "No such field"),
    ],
)
def test_fields_out_of_range(make, field):
    with pytest.raises(ValueError, match=field):
        make()
