"""Norm functions against fp64, over several row blocks and output types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import norm_functions
from megatron.core.tensor_parallel.norm_functions import layer_norm, rms_norm

H, EPS = 24, 1e-5


def case(dtype, rows=(5, 3)):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(*rows, H, generator=generator) * 3 + 1).to(dtype).requires_grad_()
    weight = torch.randn(H, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(H, generator=generator).to(dtype).requires_grad_()
    return x, weight, bias, torch.randn(*rows, H, generator=generator)


def exact(kind, x, weight, bias, dy, zero_centered):
    x, weight, bias = (t.detach().double().requires_grad_() for t in (x, weight, bias))
    scale = weight + 1 if zero_centered else weight
    if kind == "rms":
        y, inputs = F.rms_norm(x, (H,), scale, EPS), (x, weight)
    else:
        y, inputs = F.layer_norm(x, (H,), scale, bias, EPS), (x, weight, bias)
    return y.detach(), torch.autograd.grad(y, inputs, dy.double())


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_against_fp64(monkeypatch, kind, dtype, out_dtype, zero_centered):
    monkeypatch.setattr(norm_functions, "_BLOCK_ELEMENTS", 4 * H)  # four blocks, the last short
    x, weight, bias, dy = case(dtype)
    options = {"zero_centered": zero_centered, "out_dtype": out_dtype}
    if kind == "rms":
        y, inputs = rms_norm(x, weight, EPS, **options), (x, weight)
    else:
        y, inputs = layer_norm(x, weight, bias, EPS, **options), (x, weight, bias)
    dy = dy.to(y.dtype)
    grads = torch.autograd.grad(y, inputs, dy)
    expected_y, expected_grads = exact(kind, x, weight, bias, dy, zero_centered)

    assert y.dtype == (out_dtype or dtype)
    # One rounding at the end: half a unit in the last place, and fp32 arithmetic before it.
    ulp = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
    torch.testing.assert_close(y.double(), expected_y, rtol=ulp[y.dtype], atol=2e-6)
    for got, want, owner in zip(grads, expected_grads, inputs, strict=True):
        assert got.dtype == owner.dtype
        scale = want.abs().max().item()
        torch.testing.assert_close(
            got.double(), want, rtol=ulp[owner.dtype], atol=scale * ulp[owner.dtype]
        )


def test_fp32_output_is_not_rounded_to_bf16():
    x, weight, _, _ = case(torch.bfloat16)
    wide = rms_norm(x, weight, EPS, out_dtype=torch.float32)
    assert not torch.equal(wide, wide.bfloat16().float())
    assert torch.equal(wide.bfloat16(), rms_norm(x, weight, EPS))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_parameter_gradients_are_summed_in_fp32(kind):
    """Sums of 4096 rows in bf16 would be off by 12 %."""
    x, weight, bias, dy = case(torch.bfloat16, rows=(4096,))
    dy = (dy + 0.1).bfloat16()
    if kind == "rms":
        y, inputs = rms_norm(x, weight, EPS), (weight,)
    else:
        y, inputs = layer_norm(x, weight, bias, EPS), (weight, bias)
    grads = torch.autograd.grad(y, inputs, dy)
    _, expected = exact(kind, x, weight, bias, dy, False)
    for got, want in zip(grads, expected[1:], strict=True):
        assert (got - want).abs().max() < 2**-8 * want.abs().max()


def test_rows_of_zeros_and_no_rows():
    weight = torch.ones(H)
    assert torch.equal(rms_norm(torch.zeros(2, H), weight, EPS), torch.zeros(2, H))
    assert rms_norm(torch.zeros(0, H), weight, EPS).shape == (0, H)


def test_non_contiguous_input():
    x = torch.randn(H, 4).t()
    torch.testing.assert_close(
        rms_norm(x, torch.ones(H), EPS),
        rms_norm(x.contiguous(), torch.ones(H), EPS),
        rtol=1e-6,  # torch sums strided rows in another order
        atol=0,
    )
