"""The grouped MLP: every expert on its own tokens, weighted before the narrowing matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.grouped import (
    ColumnParallelGroupedLinear,
    RowParallelGroupedLinear,
)
from megatron.core.transformer.mlp import MLPSubmodules, squared_relu
from megatron.core.transformer.moe.experts import GroupedMLP, weighted, weighted_swiglu
from megatron.core.transformer.spec_utils import ModuleSpec
from tests.small_models import small_config

PATH = "decoder.layers.0.mlp.experts"
SUBMODULES = MLPSubmodules(
    ModuleSpec(ColumnParallelGroupedLinear), ModuleSpec(RowParallelGroupedLinear)
)
EXPERTS = {"num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 24}


def make(num_local_experts=4, **settings):
    config = small_config(**{**EXPERTS, **settings})
    build = Build.root(config, ParallelState.single(), NativeBackend(), torch.device("cpu"), PATH)
    experts = GroupedMLP(build=build, submodules=SUBMODULES, num_local_experts=num_local_experts)
    return experts, build


def inputs(counts, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), 32, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).requires_grad_()
    return x, probs


def reference(experts, x, counts, probs, activation):
    parts = zip(
        x.split(counts),
        probs.split(counts),
        experts.linear_fc1.weights,
        experts.linear_fc2.weights,
        strict=True,
    )
    return torch.cat([(activation(p @ w1.t()) * q[:, None]) @ w2.t() for p, q, w1, w2 in parts])


def gated(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("settings", "activation"),
    [({"swiglu": True}, gated), ({}, F.gelu), ({"squared_relu": True}, squared_relu)],
)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0]])
def test_output_and_gradients(settings, activation, counts):
    experts, _ = make(**settings)
    x, probs = inputs(counts)
    leaves = [x, probs, *experts.parameters()]
    y = experts(x, counts, probs)
    expected = reference(experts, x, counts, probs, activation)
    assert y.shape == (sum(counts), 32)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)
    got = torch.autograd.grad(y.square().sum(), leaves)
    want = torch.autograd.grad(expected.square().sum(), leaves, materialize_grads=True)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_names_and_marks_of_parameters():
    experts, _ = make(swiglu=True)
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    assert shapes == {
        **{f"linear_fc1.weight{i}": (48, 32) for i in range(4)},
        **{f"linear_fc2.weight{i}": (32, 24) for i in range(4)},
    }
    for name, parameter in experts.named_parameters():
        assert parameter.allreduce is False
        assert parameter.expert_index == int(name[-1])
        assert parameter.partition_dim == (0 if "fc1" in name else 1)
        assert parameter.partition_stride == (2 if "fc1" in name else 1)


def test_weighted_swiglu_gradients():
    x = torch.randn(5, 12, dtype=torch.double, requires_grad=True)
    weights = torch.rand(5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(weighted_swiglu, (x, weights))


@pytest.mark.parametrize("function", [None, F.gelu])
def test_an_activation_is_weighted_in_fp32_and_rounded_once(function):
    x, weights = torch.randn(64, 32).bfloat16(), torch.rand(64)
    activation = function or gated
    exact = (activation(x.float()) * weights[:, None]).bfloat16()
    assert torch.equal(weighted(function)(x, weights), exact)
    twice = (activation(x.float()).bfloat16() * weights[:, None]).bfloat16()
    assert not torch.equal(twice, exact)


def test_fp8_state_of_every_expert():
    experts, build = make(
        swiglu=True, fp8_format="hybrid", fp8_amax_history_len=4, moe_ffn_hidden_size=32
    )
    counts = [3, 0, 5, 1]
    x, probs = inputs(counts)
    experts(x, counts, probs).sum().backward()
    build.fp8.sync(build.mesh.amax)
    meta = experts.linear_fc2.fp8_meta
    assert meta["num_gemms"] == 4
    assert meta["scaling_fwd"].amax_history.shape == (4, 12)
    assert meta["scaling_bwd"].scale.shape == (8,)
    newest = meta["scaling_fwd"].amax_history[-1].view(4, 3)
    assert [bool(amax > 0) for amax in newest[:, 0]] == [True, False, True, True]
    assert build.fp8.expert_book.paths()[:2] == [f"{PATH}.linear_fc1.0", f"{PATH}.linear_fc1.1"]
    assert build.fp8.book.paths() == []
