"""Casts: bitwise against ml_dtypes, against a per-element oracle, and by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2, code_values

ML = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["plain", "compiled"])
def implementation(request):
    previous = kernels.use(request.param)
    yield request.param
    kernels.use(previous)


def codes_of(x, scale, fmt):
    """Cast by the kernels, as bytes."""
    held, _ = kernels.round_to_grid(x, torch.tensor(scale, dtype=torch.float32), fmt)
    return kernels.encode(held, fmt).numpy()


def assert_same_as_ml_dtypes(x, scale, fmt):
    with np.errstate(all="ignore"):
        product = x.float().numpy() * np.float32(scale)
        want = np.clip(product, -fmt.max, fmt.max).astype(ML[fmt.name]).view(np.uint8)
    got, is_nan = codes_of(x, scale, fmt), np.isnan(product)
    assert (got[~is_nan] == want[~is_nan]).all()
    assert (got[is_nan] == fmt.nan_code).all()


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 0.3717, 2.0**-20, 3.4028235e38])
def test_all_bf16_values(fmt, scale, implementation):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_same_as_ml_dtypes(every, scale, fmt)


@FORMATS
def test_ten_million_random_fp32_bit_patterns(fmt, implementation):
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (10_000_000,), generator=generator, dtype=torch.int64)
    assert_same_as_ml_dtypes(bits.to(torch.int32).view(torch.float32), 1.0, fmt)


@FORMATS
def test_values_around_every_rounding_boundary(fmt, implementation):
    grid = code_values(fmt).double().unique()
    grid = grid[torch.isfinite(grid)]
    middles = ((grid[1:] + grid[:-1]) / 2).float()
    near = torch.cat(
        [
            middles,
            torch.nextafter(middles, torch.tensor(INF)),
            torch.nextafter(middles, torch.tensor(-INF)),
        ]
    )
    assert_same_as_ml_dtypes(near, 1.0, fmt)


@FORMATS
def test_per_element_oracle(fmt, implementation):
    """Nearest grid value, of two equally near ones the even code; written without tricks."""
    grid = [(float(v), c) for c, v in enumerate(code_values(fmt)[:128].tolist()) if v < INF]

    def oracle(value):
        magnitude = min(abs(value), fmt.max)
        best = min(grid, key=lambda g: (abs(g[0] - magnitude), g[1] % 2))
        return best[1] | (0x80 if np.signbit(value) else 0)

    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-20, 18, (1500,), generator=generator)
    x = torch.randn(1500, generator=generator) * 2.0**exponents
    assert codes_of(x, 1.0, fmt).tolist() == [oracle(v) for v in x.tolist()]


@pytest.mark.parametrize(
    ("fmt", "value", "want"),
    [
        (E4M3, 449.0, 448.0),
        (E4M3, 464.0, 448.0),
        (E4M3, INF, 448.0),
        (E4M3, -INF, -448.0),
        (E4M3, 17.0, 16.0),
        (E4M3, 19.0, 20.0),
        (E4M3, 2.0**-10, 0.0),
        (E4M3, float(np.nextafter(np.float32(2.0**-10), np.float32(1))), 2.0**-9),
        (E5M2, 61440.0, 57344.0),
        (E5M2, INF, 57344.0),
    ],
)
def test_saturation_and_ties_by_hand(fmt, value, want, implementation):
    held, _ = kernels.round_to_grid(torch.tensor([value]), torch.tensor(1.0), fmt)
    assert held.item() == want


@FORMATS
def test_nan_survives_and_the_sign_of_zero_is_kept(fmt, implementation):
    x = torch.tensor([NAN, -NAN, -0.0, 0.0, -1e-30])
    held, amax = kernels.round_to_grid(x, torch.tensor(1.0), fmt, want_amax=True)
    assert torch.isnan(held[:2]).all()
    assert held[2:].tolist() == [0.0, 0.0, 0.0]
    assert torch.signbit(held[2:]).tolist() == [True, False, True]
    assert amax == np.float32(1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_magnitude_ignores_nan_but_not_infinity(dtype, implementation):
    assert kernels.amax(torch.tensor([NAN, -3.0, 2.0], dtype=dtype)) == 3.0
    assert kernels.amax(torch.tensor([NAN, -INF], dtype=dtype)) == INF
    assert kernels.amax(torch.tensor([NAN], dtype=dtype)) == 0.0
    assert kernels.amax(torch.empty(0, 5, dtype=dtype)) == 0.0
    assert kernels.amax(torch.ones(3, dtype=dtype)).dtype == torch.float32


@FORMATS
def test_strided_input_and_odd_sizes(fmt, implementation):
    base = torch.randn(70_001, 3)  # more than one chunk, the last one ragged
    held, amax = kernels.round_to_grid(base.t(), torch.tensor(20.0), fmt, want_amax=True)
    want = (base.t() * 20).clamp(-fmt.max, fmt.max).to(fmt.torch_dtype)
    assert held.is_contiguous()
    assert torch.equal(held.float(), want.float())
    assert amax == base.abs().max()


@FORMATS
def test_cast_to_the_fp8_type_agrees_with_rounding(fmt):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 300
    held, _ = kernels.round_to_grid(x, torch.tensor(1.7), fmt)
    assert torch.equal(kernels.cast(x, torch.tensor(1.7), fmt).float(), held.float())


def test_two_threads_give_the_bits_of_one():
    x = torch.randn(1 << 19).bfloat16()
    one, amax_one = kernels.round_to_grid(x, torch.tensor(9.0), E4M3, want_amax=True)
    threads, previous = kernels.set_threads(2), kernels.implementation()
    try:
        two, amax_two = kernels.round_to_grid(x, torch.tensor(9.0), E4M3, want_amax=True)
        codes = kernels.encode(two, E4M3)
    finally:
        kernels.set_threads(threads)
    assert torch.equal(one, two)
    assert amax_one == amax_two
    assert torch.equal(kernels.decode(codes, E4M3), one)
    assert kernels.implementation() == previous


@pytest.mark.parametrize(("fmt", "floor_db"), [(E4M3, 31.5), (E5M2, 25.5)])
def test_signal_to_noise_of_a_normal_tensor(fmt, floor_db):
    # A property of the grid: a tensor of normal values scaled to its maximum gives 31.6 and 25.6.
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    scale = fmt.max / x.abs().max()
    held, _ = kernels.round_to_grid(x, scale, fmt)
    error = held.double() / scale - x.double()
    db = 10 * torch.log10(x.double().square().sum() / error.square().sum())
    assert floor_db < db < floor_db + 0.3


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="plain"):
        kernels.use("fastest")
