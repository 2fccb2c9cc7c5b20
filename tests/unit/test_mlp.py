"""Activations: values, gradients, and which one a configuration gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.transformer.mlp import activation, gelu_tanh, squared_relu, swiglu


def plain_swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_swiglu_gradients_by_finite_differences():
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, x)


@pytest.mark.parametrize("rows", [1, 7, 700])
def test_swiglu_equals_the_plain_form_in_one_block_or_many(rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 2, 192, requires_grad=True)
    d_y = torch.randn(rows, 2, 96)
    torch.testing.assert_close(swiglu(x), plain_swiglu(x))
    found = torch.autograd.grad(swiglu(x), x, d_y)[0]
    torch.testing.assert_close(found, torch.autograd.grad(plain_swiglu(x), x, d_y)[0])


def test_swiglu_rounds_once_in_bf16():
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * 3).bfloat16().requires_grad_()
    d_y = torch.randn(64, 128).bfloat16()
    y = swiglu(x)
    exact_x = x.detach().double().requires_grad_()
    exact = plain_swiglu(exact_x)
    assert torch.equal(y, exact.float().bfloat16())
    d_x = torch.autograd.grad(y, x, d_y)[0]
    expected = torch.autograd.grad(exact, exact_x, d_y.double())[0]
    torch.testing.assert_close(d_x.double(), expected, rtol=2**-8, atol=1e-6)


def test_swiglu_leaves_its_input_and_gradient_alone():
    x = torch.randn(4, 8, requires_grad=True)
    d_y = torch.randn(4, 4)
    before_x, before_d = x.detach().clone(), d_y.clone()
    swiglu(x).backward(d_y)
    assert torch.equal(x, before_x)
    assert torch.equal(d_y, before_d)


def test_squared_relu():
    x = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    y = squared_relu(x)
    assert y.tolist() == [0.0, 0.0, 9.0]
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 6.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"swiglu": True}, swiglu),
        ({"squared_relu": True}, squared_relu),
        ({}, gelu_tanh),
        ({"add_bias_linear": False}, F.gelu),
    ],
)
def test_choice_of_activation(settings, expected):
    config = {"swiglu": False, "squared_relu": False, "add_bias_linear": True, **settings}
    assert activation(SimpleNamespace(**config)) is expected
