"""Norm modules: values, gradients, parameters and their attributes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer.norms import Norm


def build(normalization, *, dtype=torch.float32, one_p=False, sequence_parallel=False):
    config = SimpleNamespace(
        normalization=normalization,
        norm_epsilon=1e-5,
        apply_layernorm_1p=one_p,
        sequence_parallel=sequence_parallel,
    )
    return SimpleNamespace(config=config, params_dtype=dtype, device=torch.device("cpu"), path="n")


def reference(kind, x, weight, bias, eps=1e-5):
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("one_p", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_values_and_gradients_against_fp64(kind, one_p):
    torch.manual_seed(0)
    norm = Norm(24, build=build(kind, one_p=one_p))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(24) * 0.3)
    x = torch.randn(5, 3, 24, requires_grad=True)
    d_y = torch.randn(5, 3, 24)
    y = norm(x)
    found = torch.autograd.grad(y, [x, *norm.parameters()], d_y)

    x64 = x.detach().double().requires_grad_()
    params = [p.detach().double().requires_grad_() for p in norm.parameters()]
    weight = params[0] + 1 if one_p else params[0]
    y64 = reference(kind, x64, weight, params[1] if len(params) > 1 else None)
    expected = torch.autograd.grad(y64, [x64, *params], d_y.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("one_p", [False, True])
def test_it_starts_as_the_plain_norm_in_the_params_dtype(kind, one_p):
    norm = Norm(8, build=build(kind, dtype=torch.bfloat16, one_p=one_p))
    assert [name for name, _ in norm.named_parameters()] == (
        ["weight", "bias"] if kind == "LayerNorm" else ["weight"]
    )
    x = torch.randn(4, 8).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    plain = reference(kind, x.double(), 1.0, None)
    torch.testing.assert_close(y.double(), plain, rtol=2**-8, atol=2**-8)


def test_which_gradients_are_declared_partial():
    def marked(**kwargs):
        partial = kwargs.pop("partial_gradient", None)
        norm = Norm(4, build=build("LayerNorm", **kwargs), partial_gradient=partial)
        return {getattr(p, "sequence_parallel", False) for p in norm.parameters()}

    assert marked() == {False}
    assert marked(sequence_parallel=True) == {True}
    assert marked(partial_gradient=True) == {True}
    assert marked(sequence_parallel=True, partial_gradient=False) == {False}
