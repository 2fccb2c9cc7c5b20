"""NVFP4: bitwise against a per-element oracle, in both directions; by hand; rounding at random."""

from __future__ import annotations

import bisect
import itertools
import math

import numpy as np
import pytest
import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E2M1, E4M3, code_values
from megatron.core.fp8.kernels import fp4, plain_fp4
from megatron.core.fp8.kernels.fp4 import Draw
from megatron.core.fp8.nvfp4 import NVFP4BlockScaling, NVFP4Quantizer
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.tensor import QuantizedTensor
from tests.numerics.test_fp8_blocks import KINDS, contents

NAN, INF = float("nan"), float("inf")
LARGEST = np.float32(torch.finfo(torch.float32).max)
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
NO_NOISE = NVFP4BlockScaling(disable_stochastic_rounding=True)


@pytest.fixture(params=["plain", "compiled"])
def implementation(request):
    previous = kernels.use(request.param)
    yield request.param
    kernels.use(previous)


# -- the oracle: one element at a time, no arithmetic shared with the code under test -------------


def nearest(grid, magnitude):
    """Index of the nearest of increasing numbers, of two equally near ones the even one."""
    above = bisect.bisect_left(grid, magnitude)
    near = [i for i in (above - 1, above) if 0 <= i < len(grid)]
    return min(near, key=lambda i: (abs(grid[i] - magnitude), i % 2))


CODES = code_values(E2M1)[:8].tolist()
SCALES = [v for v in code_values(E4M3)[:128].tolist() if not math.isnan(v)]


def largest_of(values):
    return max((abs(v) for v in values if not math.isnan(v)), default=0.0)


def tensor_scale(amax):
    with np.errstate(over="ignore", divide="ignore"):
        scale = min(np.float32(448 * 6) / np.float32(amax), LARGEST)
    return np.float32(1) if amax == 0 or scale == 0 else scale


def oracle(rows, block):
    """Codes, block scales and tensor scale of a matrix of Python floats."""
    height, width = len(rows), len(rows[0]) if rows else 0
    scale = tensor_scale(largest_of(itertools.chain(*rows)))
    codes = np.zeros((height, width), dtype=np.uint8)
    inverses = np.zeros((-(-height // block[0]), -(-width // block[1])), dtype=np.float32)
    for b, k in itertools.product(*(range(n) for n in inverses.shape)):
        inside = [
            (r, c)
            for r in range(b * block[0], min((b + 1) * block[0], height))
            for c in range(k * block[1], min((k + 1) * block[1], width))
        ]
        values = [rows[r][c] for r, c in inside]
        if any(math.isnan(v) for v in values):
            inverses[b, k] = NAN
            for r, c in inside:
                codes[r, c] = 7
            continue
        with np.errstate(all="ignore"):
            wanted = np.float32(largest_of(values)) * (scale * np.float32(1 / 6))
            inverse = np.float32(SCALES[nearest(SCALES, min(float(wanted), 448.0))])
            factor = min(np.float32(1) / (inverse * (np.float32(1) / scale)), LARGEST)
            inverses[b, k] = inverse
            for r, c in inside:
                v = float(np.float32(rows[r][c]) * factor)
                code = nearest(CODES, min(abs(v), 6.0))
                codes[r, c] = code | (8 if math.copysign(1.0, v) < 0 else 0)
    return codes, inverses, scale


def mixed(x):
    """The Hadamard transform of each 16 rows, by the fast transform in single precision."""
    rows = x.float().tolist()
    rows += [[0.0] * x.shape[1] for _ in range(-len(rows) % 16)]
    columns = [[np.float32(rows[r][c]) for r in range(len(rows))] for c in range(x.shape[1])]
    with np.errstate(all="ignore"):
        for column, first in itertools.product(columns, range(0, len(rows), 16)):
            part = [column[first + i] * np.float32(SIGNS[i]) for i in range(16)]
            for half in (1, 2, 4, 8):
                for i in range(16):
                    if i & half == 0:
                        a, b = part[i], part[i + half]
                        part[i], part[i + half] = a + b, a - b
            column[first : first + 16] = [v * np.float32(0.25) for v in part]
    out = torch.tensor(np.array(columns, dtype=np.float32).T.reshape(len(rows), x.shape[1]))
    return out.to(x.dtype) if x.dtype == torch.bfloat16 else out


def assert_is(make, want):
    """What `make` gives, with either implementation of the kernels, folded or not."""
    before = kernels.implementation()
    for name in ("plain", "compiled"):
        kernels.use(name)
        made = make()
        kernels.use(before)
        codes, inverses, scale = want
        got = made.scale_inv.contiguous().numpy()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(inverses), err_msg=name)
        np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(inverses), err_msg=name)
        assert made.tensor_inv.numpy() == np.float32(1) / scale, name
        packed = made.to_fp8().data
        assert packed.dtype == torch.uint8
        np.testing.assert_array_equal(packed.contiguous().numpy(), codes, err_msg=name)


def transposed(want):
    codes, inverses, scale = want
    return codes.T, np.ascontiguousarray(inverses.T), scale


@pytest.mark.parametrize("role", list(Role), ids=lambda r: r.value)
@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_are_bitwise_the_oracle(role, kind):
    for recipe in (NO_NOISE, NVFP4BlockScaling(True, True, True)):
        quantizer = NVFP4Quantizer(recipe, role, fold=False)
        square = role is Role.WEIGHT and not recipe.disable_2d_quantization
        for dtype, shape in ((torch.bfloat16, (5, 37)), (torch.float32, (35, 6))):
            x = contents(kind, shape, dtype)
            want = oracle(x.float().tolist(), (16 if square else 1, 16))
            assert_is(lambda x=x, q=quantizer: q.rowwise(x), want)
            if square:
                assert_is(lambda x=x, q=quantizer: q.colwise(x), transposed(want))
                continue
            values = x if recipe.disable_rht or role is Role.WEIGHT else mixed(x)
            want = transposed(oracle(values.float().tolist(), (16, 1)))
            assert_is(lambda x=x, q=quantizer: q.colwise(x), want)
            assert_is(lambda x=x, q=quantizer: q.column(q.keep(x, q.rowwise(x))), want)


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (16, 1), (2, 17), (17, 5), (3, 530)])
def test_odd_and_even_shapes(shape):
    for role in (Role.INPUT, Role.WEIGHT):
        quantizer = NVFP4Quantizer(NO_NOISE, role, fold=False)
        x = contents("wide", shape, torch.bfloat16, seed=7)
        want = oracle(x.float().tolist(), (16 if quantizer.square else 1, 16))
        assert_is(lambda x=x, q=quantizer: q.rowwise(x), want)


@pytest.mark.parametrize("kind", KINDS)
def test_folding_is_exact(kind, implementation):
    """Folded data are the products of value and block scale, in exact numbers."""
    for dtype, role in itertools.product((torch.bfloat16, torch.float32), Role):
        x = contents(kind, (40, 50), dtype, seed=3)
        apart = NVFP4Quantizer(NVFP4BlockScaling(), role, fold=False).rowwise(x)
        folded = NVFP4Quantizer(NVFP4BlockScaling(), role).rowwise(x)
        exact = apart.hold().data.double() * apart.expanded_scale_inv().double()
        assert torch.equal(folded.data.double().nan_to_num(7.0), exact.nan_to_num(7.0))
        assert torch.equal(apart.fold().data.nan_to_num(7.0), folded.data.nan_to_num(7.0))
        whole = (exact.float() * folded.tensor_inv).nan_to_num(7.0)
        assert torch.equal(folded.dequantize().nan_to_num(7.0), whole)
        assert torch.equal(apart.dequantize().nan_to_num(7.0), whole)


def test_two_implementations_and_two_threads_agree_on_large_matrices():
    x = contents("bits", (1030, 517), torch.bfloat16, seed=11)  # enough for a second thread
    quantizer = NVFP4Quantizer(NVFP4BlockScaling(), Role.GRAD_OUTPUT).seeded(5)
    results, threads = [], kernels.set_threads(None)
    for name, count in (("plain", None), ("compiled", 1), ("compiled", 2)):
        before = kernels.use(name)
        kernels.set_threads(count)
        made = [quantizer.rowwise(x), quantizer.colwise(x)]
        results.append([part.contiguous() for q in made for part in q.tensors])
        kernels.use(before)
    kernels.set_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_empty_strided_and_half_precision(implementation):
    for role in Role:
        quantizer = NVFP4Quantizer(NVFP4BlockScaling(), role)
        for shape in ((0, 64), (64, 0)):
            x = torch.empty(shape, dtype=torch.bfloat16)
            assert quantizer.rowwise(x).dequantize().shape == shape
            assert quantizer.colwise(x).dequantize().shape == shape[::-1]
        base = contents("wide", (48, 45), torch.float32, seed=5)
        copied = quantizer.rowwise(base.t().contiguous())
        assert torch.equal(quantizer.rowwise(base.t()).data, copied.data)
        half = base.half()
        assert torch.equal(quantizer.rowwise(half).data, quantizer.rowwise(half.float()).data)
        assert torch.equal(quantizer.colwise(half).data, quantizer.colwise(half.float()).data)


# -- by hand --------------------------------------------------------------------------------------


def test_the_sixteen_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    values = kernels.decode(codes, E2M1)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(kernels.encode(values, E2M1), codes)
    assert kernels.encode(torch.tensor([NAN]).bfloat16(), E2M1).item() == 7
    for count in (7, 8):
        packed = fp4.pack(codes[:count].view(1, -1))
        assert packed.shape == (1, 4)
        assert torch.equal(fp4.unpack(packed, count), codes[:count].view(1, -1))


def test_a_block_by_hand(implementation):
    """Block magnitude 3, tensor magnitude 12: scales 224 and 112, so 3 is multiplied by 2."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 12.0, 3.0, -0.6
    made = NVFP4Quantizer(NO_NOISE, Role.INPUT, fold=False).rowwise(x)
    assert fp4.global_scale(torch.tensor(12.0)) == 224
    assert made.tensor_inv == np.float32(1) / np.float32(224)
    assert made.scale_inv.tolist() == [[448.0, 112.0]]
    assert made.data[0, [0, 16, 17]].tolist() == [6.0, 6.0, -1.0]
    assert made.dequantize()[0, [0, 16, 17]].tolist() == pytest.approx([12.0, 3.0, -0.5])


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (12.0, 224.0),
        (0.0, 1.0),
        (INF, 1.0),
        (1e-38, float(LARGEST)),
        (3e38, 2688 / 3e38),
    ],
)
def test_tensor_scales_by_hand(amax, scale):
    got = fp4.global_scale(torch.tensor(amax)).item()
    assert got == np.float32(scale) or math.isclose(got, scale, rel_tol=1e-7)


def test_infinity_saturates_and_nan_takes_its_block_along(implementation):
    x = torch.ones(2, 32)
    x[0, 0] = INF
    x[1, 20] = NAN
    made = NVFP4Quantizer(NO_NOISE, Role.INPUT).rowwise(x)
    values = made.dequantize()
    assert values[0, 0] == 448 * 6
    assert torch.isnan(values[1, 16:]).all()
    assert not torch.isnan(values[1, :16]).any()
    assert not torch.isnan(values[0]).any()


def test_ties_go_to_even_codes(implementation):
    x = torch.zeros(1, 16)
    x[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    got = NVFP4Quantizer(NO_NOISE, Role.INPUT).rowwise(x).dequantize()[0, :8]
    torch.testing.assert_close(got, torch.tensor([6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]))


def test_the_transform_is_a_hadamard_matrix_and_a_product_does_not_see_it(implementation):
    h = torch.ones(1, 1)
    while h.shape[0] < 16:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    want = h @ torch.diag(torch.tensor(SIGNS).float()) / 4
    matrix = fp4.hadamard(torch.eye(16))
    assert torch.equal(matrix, want)
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    a, b = (contents("normal", (21, n), torch.float32, seed=n) for n in (3, 5))
    assert fp4.hadamard(a).shape == (32, 3)  # rows of zeros take part
    product = fp4.hadamard(a).t() @ fp4.hadamard(b)
    torch.testing.assert_close(product, a.t() @ b)


def test_only_inputs_and_gradients_are_mixed_and_only_along_tokens():
    x = contents("normal", (32, 32), torch.float32)
    for role, recipe in itertools.product(Role, (NO_NOISE, NVFP4BlockScaling(True, True))):
        quantizer = NVFP4Quantizer(recipe, role)
        plain = (quantizer.rowwise(x).dequantize() - x).norm() < 0.2 * x.norm()
        column = (quantizer.colwise(x).dequantize().t() - x).norm() < 0.2 * x.norm()
        assert plain
        assert column == (role is Role.WEIGHT or recipe.disable_rht)


def test_square_blocks_give_both_products_the_same_weight():
    x = contents("wide", (32, 48), torch.float32)
    for recipe, same in ((NVFP4BlockScaling(), True), (NVFP4BlockScaling(False, False, True), 0)):
        quantizer = NVFP4Quantizer(recipe, Role.WEIGHT)
        row, column = quantizer.rowwise(x), quantizer.colwise(x)
        assert torch.equal(row.dequantize(), column.dequantize().t()) == bool(same)


def test_rows_of_blocks_have_no_transpose():
    quantizer = NVFP4Quantizer(NVFP4BlockScaling(), Role.INPUT)
    with pytest.raises(ValueError, match="Use keep and column"):
        quantizer.transposed(quantizer.rowwise(torch.ones(16, 16)))


# -- rounding at random ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_philox_gives_its_published_numbers(counter, key, words):
    got = plain_fp4.philox(tuple(torch.tensor(c) for c in counter), key)
    assert tuple(int(w) for w in got) == words


def test_a_number_depends_on_its_place_only():
    whole = plain_fp4.random_bits(40, 30, Draw(9), torch.device("cpu"))
    assert torch.equal(plain_fp4.random_bits(12, 19, Draw(9, 0, 7), whole.device), whole[7:19, :19])
    for other in (Draw(10), Draw(9, 1), Draw(9 + 2**40)):
        assert (plain_fp4.random_bits(40, 30, other, whole.device) != whole).float().mean() > 0.99
    assert 0 <= whole.min() < 600 < 65000 < whole.max() < 65536


def gradient(value, seed, shape=(64, 64)):
    """A matrix of one value, below a largest of 6, read back after rounding at random."""
    x = torch.full(shape, value)
    x[:, ::16] = 6.0  # each block has scale 448, and the tensor's undoes it
    quantizer = NVFP4Quantizer(NVFP4BlockScaling(disable_rht=True), Role.GRAD_OUTPUT)
    made = quantizer.seeded(seed).rowwise(x).dequantize()
    return made[:, [c for c in range(shape[1]) if c % 16]]


@pytest.mark.parametrize("value", [0.1, -0.3, 0.9, 1.1, 2.7, -3.2, 5.5])
def test_rounding_at_random_is_fair_and_takes_neighbours_only(value, implementation):
    low = max(v for v in CODES if v <= abs(value))
    high = min(v for v in CODES if v > abs(value))
    draws = torch.stack([gradient(value, seed) for seed in range(5)]).abs()
    # Scales 448 and 1 / 448 in fp32 move a grid value by a unit in the last place.
    is_high = (draws - high).abs() < 1e-5
    assert (is_high | ((draws - low).abs() < 1e-5)).all()
    share = (abs(value) - low) / (high - low)
    # The mean of n independent draws is off by one standard deviation sqrt(p(1-p)/n); four of them
    # happen once in 16,000 times, and numbers of 16 bits add at most 2^-17.
    bound = 4 * math.sqrt(share * (1 - share) / draws.numel()) + 2.0**-17
    assert abs(is_high.double().mean().item() - share) < bound


def test_grid_values_and_zeros_stay_and_large_values_saturate(implementation):
    for value in (0.0, 0.5, 1.5, 2.0, 3.0, -4.0, 6.0):
        torch.testing.assert_close(
            gradient(value, 1), torch.full((64, 60), value), rtol=1e-6, atol=0
        )


def test_means_over_many_draws_approach_the_matrix():
    """In both directions, of any values that no block scale clips."""
    x = contents("normal", (48, 32), torch.float32, seed=4)
    quantizer = NVFP4Quantizer(NVFP4BlockScaling(), Role.GRAD_OUTPUT)
    count = 200
    for direction, want in (("rowwise", x), ("colwise", fp4.hadamard(x).t())):
        draws = [getattr(quantizer.seeded(s), direction)(x) for s in range(count)]
        values = torch.stack([d.dequantize() for d in draws]).double()
        step = (values.amax(0) - values.amin(0)).clamp(min=1e-9)
        clipped = values.amax(0) == values.amin(0)  # saturated, or on the grid
        off = (values.mean(0) - want.double()).abs()
        # Of 1,536 elements the worst may be 5 standard deviations (at most half a step) off.
        assert (off < 5 * step / 2 / math.sqrt(count))[~clipped].all()
        assert clipped.float().mean() < 0.2


def test_the_seed_decides_and_only_gradients_round_at_random():
    x = contents("normal", (40, 40), torch.bfloat16)
    for role, recipe in itertools.product(Role, (NVFP4BlockScaling(), NO_NOISE)):
        quantizer = NVFP4Quantizer(recipe, role)
        one, same, other = (quantizer.seeded(s).rowwise(x).data for s in (1, 1, 2))
        assert torch.equal(one, same)
        random = role is Role.GRAD_OUTPUT and recipe.is_random
        assert torch.equal(one, other) != random


# -- bytes and the recipe -------------------------------------------------------------------------


def test_bytes_and_back():
    x = contents("wide", (64, 96), torch.bfloat16)
    for role in Role:
        folded = NVFP4Quantizer(NVFP4BlockScaling(), role).rowwise(x)
        wire = folded.to_fp8()
        assert wire.data.element_size() == 1
        assert torch.equal(wire.dequantize(), folded.dequantize())
        assert torch.equal(wire.t().dequantize(), folded.t().dequantize())
        again = QuantizedTensor.of(folded.tensors, folded.form)
        assert torch.equal(again.dequantize(), folded.dequantize())
        assert torch.equal(folded.uniform().dequantize(), folded.dequantize())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NVFP4BlockScaling(disable_rth=True), "Did you mean disable_rht"),
        (lambda: NVFP4BlockScaling(fp4_format="e4m3"), "fp4_format.*E2M1"),
        (lambda: NVFP4BlockScaling(fp8_format="hybrid"), "fp8_format.*E4M3"),
    ],
)
def test_fields_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_recipe_is_a_value():
    assert NVFP4BlockScaling(fp4_format="e2m1") == NVFP4BlockScaling()
    assert NVFP4BlockScaling(disable_rht=True) != NVFP4BlockScaling()
    assert {NVFP4BlockScaling().format_of(role) for role in Role} == {E2M1}
