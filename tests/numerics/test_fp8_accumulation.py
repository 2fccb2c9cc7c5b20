"""Hopper's sums: bitwise against an oracle of whole numbers, and what they cost."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron.core.errors import PrecisionError
from megatron.core.fp8 import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    gemm,
)
from megatron.core.fp8.accumulation import multiply, refuse_hardware
from megatron.core.fp8.formats import E4M3, E5M2, code_value
from megatron.core.fp8.gemm import gemm_nt, gemm_nt_accumulate
from megatron.core.fp8.quantizers import BlockQuantizer, CurrentQuantizer
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.tensor import QuantizedTensor
from tests.small_models import LLAMA, batch, small_model

STEP, PROMOTION, BITS = 32, 128, 13


# -- the oracle: one element at a time, whole numbers and fractions ------------------------------


def exponent_of(value):
    """Exponent of the leading one of a fraction that is not 0."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length() + 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    return exponent


def cut(value, unit):
    """Towards zero, to a multiple of a unit."""
    whole = abs(value) // unit * unit
    return whole if value >= 0 else -whole


def factor_exponent(value, fmt):
    """As the format stores it: subnormal numbers have that of the smallest normal one."""
    return max(exponent_of(value), 1 - fmt.bias)


def instruction(a, b, fmt_a, fmt_b, total):
    products = [(x * y, factor_exponent(x, fmt_a) + factor_exponent(y, fmt_b))
                for x, y in zip(a, b, strict=True) if x and y]  # fmt: skip
    if total:
        products.append((total, exponent_of(total)))
    if not products:
        return Fraction(0)
    unit = Fraction(2) ** (max(e for _, e in products) - BITS)
    added = sum(cut(value, unit) for value, _ in products)
    return cut(added, Fraction(2) ** (exponent_of(added) - BITS)) if added else Fraction(0)


def sums(a, b, fmt_a, fmt_b, interval):
    """Sums of `interval` products each."""
    for start in range(0, len(a), interval):
        total = Fraction(0)
        for first in range(start, min(start + interval, len(a)), STEP):
            span = slice(first, min(first + STEP, start + interval))
            total = instruction(a[span], b[span], fmt_a, fmt_b, total)
        yield total


def oracle(a, b, fmt_a, fmt_b, split):
    """`[M, N]` fp32, without scales."""
    out = np.zeros((a.shape[0], b.shape[0]), dtype=np.float32)
    rows = [[Fraction(v) for v in row] for row in a.double().tolist()]
    others = [[Fraction(v) for v in row] for row in b.double().tolist()]
    for i, x in enumerate(rows):
        for j, y in enumerate(others):
            interval = PROMOTION if split else len(x)
            for one in sums(x, y, fmt_a, fmt_b, interval):
                out[i, j] += np.float32(float(one))  # 14 bits: exact
    return torch.from_numpy(out)


def codes(rows, cols, fmt, seed):
    """Any finite codes of a format, held."""
    generator = torch.Generator().manual_seed(seed)
    finite = [v for v in (code_value(fmt, c) for c in range(256)) if abs(v) < float("inf")]
    table = torch.tensor(finite, dtype=torch.bfloat16)
    chosen = table[torch.randint(0, len(finite), (rows, cols), generator=generator)]
    chosen[:, ::7] = 0
    return QuantizedTensor(chosen, torch.ones(()), fmt)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("fmt_b", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [1, 40, 300])
def test_bitwise(split, fmt_b, size):
    """All codes, subnormal ones and zeros among them; rows that end within an instruction."""
    a, b = codes(5, size, E4M3, 0), codes(4, size, fmt_b, 1)
    found = multiply(a, b, split=split)
    assert torch.equal(found, oracle(a.data, b.data, E4M3, fmt_b, split))


def test_more_rows_than_are_computed_at_once():
    a, b = codes(40, 64, E4M3, 0), codes(1000, 64, E4M3, 1)
    found = multiply(a, b, split=False)
    assert torch.equal(found[37:, 990:], multiply(rows(a, 37, 40), rows(b, 990, 1000), split=False))
    few = oracle(a.data[:2], b.data[:2], E4M3, E4M3, False)
    assert torch.equal(found[:2, :2], few)
    assert multiply(rows(a, 0, 0), b, split=True).shape == (0, 1000)


def rows(x, start, stop):
    return QuantizedTensor(x.data[start:stop], x.scale_inv, x.fmt)


def by_hand(values, others, split=False):
    fmt = E4M3
    operands = [QuantizedTensor(torch.tensor([v]).bfloat16(), torch.ones(()), fmt)
                for v in (values, others)]  # fmt: skip
    return multiply(*operands, split=split).item()


def test_by_hand():
    # 7.5 beside 448: the exponents are 2 and 8, so 13 bits below 2^8 are 2^-5.
    assert by_hand([448.0, 7.5], [1.0, 1.0]) == 455.5
    # 2^-6 beside 256 is below them, on both sides of zero.
    assert by_hand([256.0, 2.0**-6], [1.0, 1.0]) == 256.0
    assert by_hand([256.0, -(2.0**-6)], [1.0, 1.0]) == 256.0
    # The sum keeps 13 bits behind its leading one: 512 + 2^-4 does, and 2^-5 does not.
    assert by_hand([256.0, 256.0, 2.0**-4], [1.0] * 3) == 512 + 2.0**-4
    assert by_hand([256.0, 256.0, 2.0**-5], [1.0] * 3) == 512.0
    # In the next instruction, and 128 products later with and without fp32 in between.
    later = [256.0] + [0.0] * 127 + [2.0**-6]
    assert by_hand(later, [1.0] * 129) == 256.0
    assert by_hand(later, [1.0] * 129, split=True) == 256.0 + 2.0**-6


def test_no_number_stays_none():
    assert np.isnan(by_hand([1.0, float("nan")], [1.0, 1.0]))


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scales_of_the_whole_tensor_and_bias():
    quantizer = CurrentQuantizer(Float8CurrentScaling(), Role.INPUT)
    a, b = quantizer.rowwise(normal(3, 200, seed=0)), quantizer.rowwise(normal(4, 200, seed=1))
    bias = normal(4, seed=2).bfloat16()
    for split in (False, True):
        plain = oracle(a.data, b.data, E4M3, E4M3, split) * a.scale_inv * b.scale_inv
        options = {"emulation": "hopper", "fast_accum": not split}
        assert torch.equal(gemm_nt(a, b, out_dtype=torch.float32, **options), plain)
        found = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias, **options)
        assert torch.equal(found, (plain + bias.float()).bfloat16())
    out = torch.ones(3, 4)
    gemm_nt_accumulate(a, b, out, emulation="hopper")
    assert torch.equal(out, 1 + plain)  # weight gradients go on in fp32


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("role", [Role.INPUT, Role.WEIGHT])
def test_scales_of_blocks(fold, role):
    """Each 128 products are multiplied by their scales; there is no fast accumulation."""
    recipe = Float8BlockScaling()
    sizes = 2.0 ** (torch.arange(130) % 40 - 20).unsqueeze(1)
    a = BlockQuantizer(recipe, Role.INPUT, fold=fold).rowwise(normal(2, 300, seed=0))
    b = BlockQuantizer(recipe, role, fold=fold).rowwise(normal(130, 300, seed=1) * sizes)
    some = torch.tensor([0, 5, 127, 128, 129])
    grid_a, grid_b = a.to_fp8().hold().data, b.to_fp8().hold().data[some]
    scale_b = b.scale_inv.repeat_interleave(b.block[0], 0)[some]
    expected = torch.zeros(2, 5)
    for i in range(3):
        span = slice(128 * i, 128 * (i + 1))
        part = oracle(grid_a[:, span], grid_b[:, span], E4M3, E4M3, False)
        expected += part * a.scale_inv[:, i, None] * scale_b[None, :, i]
    for fast in (False, True):
        found = gemm_nt(a, b, out_dtype=torch.float32, emulation="hopper", fast_accum=fast)
        assert torch.equal(found[:, some], expected)


def decibels(got, want):
    error = got.double() - want
    return (10 * torch.log10(want.square().sum() / error.square().sum())).item()


@pytest.mark.parametrize(
    ("name", "fast", "split"),
    [("normal", 57.5, 77.9), ("positive", 22.5, 65.1)],
)
def test_what_it_costs(name, fast, split):
    """Signal to noise of the sums alone, 4096 products each.

    Errors of cut-off bits point towards zero. In a sum of either sign they are small beside the
    rounding of the operands (28.5 dB); in one of one sign they pile up to 7 %.
    """
    make = {"normal": torch.randn, "positive": torch.rand}[name]
    generator = torch.Generator().manual_seed(0)
    quantizer = CurrentQuantizer(Float8CurrentScaling(), Role.INPUT)
    a, b = (quantizer.rowwise(make(64, 4096, generator=generator)) for _ in range(2))
    exact = a.dequantize().double() @ b.dequantize().double().t()
    assert decibels(multiply(a, b, split=False), exact) == pytest.approx(fast, abs=0.5)
    assert decibels(multiply(a, b, split=True), exact) == pytest.approx(split, abs=0.5)


def test_what_hopper_has_no_products_for():
    a = BlockQuantizer(MXFP8BlockScaling(), Role.INPUT, fold=False).rowwise(normal(2, 64, seed=0))
    with pytest.raises(PrecisionError, match="--fp8-emulate-accumulation: got hopper"):
        multiply(a, a, split=True)


def test_hardware_is_not_emulated():
    refuse_hardware("exact", torch.device("cuda"))
    with pytest.raises(PrecisionError, match=r"got hopper on cuda\. It has FP8 hardware"):
        refuse_hardware("hopper", torch.device("cuda"))


def splits(recipe, monkeypatch):
    """Which products of a model's layers split their sums, by the rows of the precision table."""
    model, build = small_model(
        **LLAMA, fp8_format="hybrid", fp8_recipe=recipe, fp8_emulate_accumulation="hopper"
    )
    seen = []

    def note(a, b, *, split):
        seen.append(split)
        return multiply(a, b, split=split)

    monkeypatch.setattr(gemm.accumulation, "multiply", note)
    loss = model(*batch(build.config)).sum()
    forward = len(seen)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    rows = [row for row in model.named_precision_rows() if "fp8" in row.delivered]
    kernels = {row.gemm: row.kernel for row in rows}
    return set(seen[:forward]), set(seen[forward:]), forward, len(seen), kernels


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_which_products_split_their_sums(recipe, monkeypatch):
    """Forward products accumulate fast, gradients do not; with blocks none does."""
    fprop, backward, forward, everything, kernels = splits(recipe, monkeypatch)
    assert (forward, everything) == (4 * 2, 3 * 4 * 2)  # products of 4 matrices in 2 layers
    assert fprop == {False}  # what is asked for; blocks split all the same
    assert backward == {True}
    kind = "split" if recipe == "blockwise" else "fast"
    assert kernels["fprop"] == f"emulated e4m3xe4m3 GEMM, Hopper's {kind} accumulation"
    assert kernels["wgrad"] == "emulated e5m2xe4m3 GEMM, Hopper's split accumulation"
