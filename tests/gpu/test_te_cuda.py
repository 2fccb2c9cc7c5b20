"""Transformer Engine's layers on CUDA, against the native backend's emulation on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from tests.gpu import cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend():
    backend = TransformerEngineBackend()
    able, reason = backend.availability()
    if not able:
        pytest.skip(reason)
    return backend


@pytest.mark.parametrize("kind", cases.LAYERS)
@pytest.mark.parametrize("recipe", list(cases.RECIPES))
def test_layers_match_the_emulation(device, report, backend, kind, recipe):
    error = report(cases.layers_agree(device, backend, kind, recipe))
    # A norm computed in another order moves some of its outputs to the neighbouring code (2**-4).
    bound = 2e-2 if "norm" in kind else 6e-3
    assert max(error["y"], error["dx"], error["dw"]) < bound
    assert error["db"] < 6e-3
    # Scales come from maxima that Transformer Engine recorded in the project's book.
    assert error.get("scale", 0.0) < (1e-3 if "norm" in kind else 1e-7)


@pytest.mark.parametrize("recipe", list(cases.RECIPES))
def test_experts_match_the_emulation(device, report, backend, recipe):
    error = report(cases.experts_agree(device, backend, recipe))
    assert max(error["y"], error["dx"], error["dw"]) < 6e-3
    assert error.get("scale", 0.0) < 1e-7


@pytest.mark.parametrize("recipe", [None, *cases.RECIPES])
def test_models_match_the_emulation(device, report, backend, recipe):
    measured = report(cases.models_agree(device, backend, recipe))
    assert measured["difference"] < 0.03
    assert measured["last"] < measured["first"]


def test_two_forwards_before_one_backward_lose_no_gradient(device, backend):
    settings = cases.RECIPES["delayed"]
    build = cases.build_on(device, backend, "layer", **settings)
    layer = backend.column_parallel_linear(
        128, 96, build=build, init_method=torch.nn.init.xavier_normal_, bias=False
    )
    xs = [torch.randn(64, 1, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    (layer(xs[0])[0].float().sum() + layer(xs[1])[0].float().sum()).backward()
    both = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    for x in xs:
        layer(x)[0].float().sum().backward()
    assert cases.relative_error(both, layer.weight.main_grad) < 1e-6


def test_evaluation_leaves_no_trace(device, backend):
    settings = cases.RECIPES["delayed"]
    build = cases.build_on(device, backend, "layer", **settings)
    layer = backend.column_parallel_linear(
        128, 96, build=build, init_method=torch.nn.init.xavier_normal_, bias=False
    )
    x = torch.randn(64, 1, 128, device=device, dtype=torch.bfloat16)
    layer(x)
    build.fp8.sync(build.mesh.amax)
    before = build.fp8.book.history.clone()
    with torch.no_grad(), build.fp8.not_recording():
        layer(x * 1000)
    assert torch.equal(build.fp8.book.history, before)


def test_attention_matches_the_native_one(device, report, backend):
    build = cases.build_on(device, backend, "attention", bf16=True)
    q = torch.randn(64, 2, 4, 8, device=device, dtype=torch.bfloat16)
    theirs = backend.core_attention(build=build, layer_number=1)(q, q, q)
    native = NativeBackend().core_attention(build=build, layer_number=1)(q, q, q)
    error = cases.relative_error(theirs, native)
    report({"error": error})
    assert error < 6e-3
