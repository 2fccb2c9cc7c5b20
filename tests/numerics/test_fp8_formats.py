"""All 256 codes of both formats, and the two ways of holding them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2, Format, code_values
from megatron.core.fp8.recipe import DelayedScaling, Role
from megatron.core.fp8.tensor import QuantizedTensor

ML = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


@pytest.fixture(params=["plain", "compiled"])
def implementation(request):
    previous = kernels.use(request.param)
    yield request.param
    kernels.use(previous)


@FORMATS
def test_every_code_has_the_value_of_two_independent_implementations(fmt):
    ours = code_values(fmt).numpy()
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ML[fmt.name]).astype(np.float32)
    native = torch.from_numpy(codes).view(fmt.torch_dtype).float().numpy()
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, native)
    assert np.signbit(ours[0x80])


def test_limits_of_the_formats():
    finite = code_values(E4M3)[torch.isfinite(code_values(E4M3))]
    assert finite.numel() == 254
    assert finite.unique().numel() == 253  # two zeros
    assert finite.max() == 448
    assert E4M3.min_subnormal == 2.0**-9
    assert E4M3.min_normal == 2.0**-6
    assert code_values(E4M3)[0x78] == 256  # all-ones exponent, zero mantissa: an ordinary number
    assert math.isnan(code_values(E4M3)[0x7F])
    assert math.isinf(code_values(E5M2)[0x7C])
    assert (E5M2.max, E5M2.min_subnormal) == (57344, 2.0**-16)


@FORMATS
def test_bytes_to_held_and_back(fmt, implementation):
    codes = torch.arange(256, dtype=torch.uint8)
    held = kernels.decode(codes, fmt)
    values = code_values(fmt)
    torch.testing.assert_close(held.float(), values, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(held[0x80])
    back = kernels.encode(held, fmt)
    is_nan = torch.isnan(values)
    assert torch.equal(back[~is_nan], codes[~is_nan])
    assert (back[is_nan] == fmt.nan_code).all()  # without sign, as the hardware writes it


@FORMATS
def test_held_tensor_is_the_same_numbers_as_its_bytes(fmt, implementation):
    held, _ = kernels.round_to_grid(torch.randn(33, 7), torch.tensor(50.0), fmt)
    tensor = QuantizedTensor(held, torch.tensor(1 / 50), fmt)
    as_bytes = tensor.to_fp8()
    assert as_bytes.data.dtype == fmt.torch_dtype
    assert not as_bytes.is_held
    assert torch.equal(as_bytes.data.float(), held.float())
    assert torch.equal(as_bytes.hold().data.view(torch.int16), held.view(torch.int16))
    assert torch.equal(as_bytes.dequantize(), tensor.dequantize())
    assert torch.equal(tensor.t().dequantize(), tensor.dequantize().t())


def test_format_pairs():
    assert Format.HYBRID.value == (448, 57344)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3)
    assert [hybrid.format_of(role).name for role in Role] == ["e4m3", "e4m3", "e5m2"]
    assert [e4m3.format_of(role).name for role in Role] == ["e4m3"] * 3
