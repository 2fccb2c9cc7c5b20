"""The native backend keeps the layer contract: every leaf, recipe and tensor-parallel size."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.backends import contract
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from megatron.core.shards import gather_full
from megatron.core.tensor_parallel.mappings import all_gather, all_reduce, split
from tests.distpool import run_ranks
from tests.small_models import small_config

LINEARS = ["column_parallel_linear", "row_parallel_linear", "layernorm_column_parallel_linear"]
RECIPES = {
    "plain": {},
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_emulation": "exact"},
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_emulation": "exact"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_emulation": "exact"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_emulation": "exact"},
    "nvfp4": {"fp4_format": "e2m1", "fp8_emulation": "exact"},
}
IN, OUT, S, B = 32, 48, 8, 2
# One code of E4M3 is 2^-4 of its value wide, one of E5M2 2^-3; a product averages over 32 of them.
# One of E2M1 is up to half of its value wide.
TOLERANCE = {
    "plain": 1e-5, "delayed": 0.1, "tensorwise": 0.1, "blockwise": 0.06, "mxfp8": 0.06,
    "nvfp4": 0.3,
}  # fmt: skip


def make_build(rank, world_size, **settings):
    config = small_config(world_size=world_size, tensor_model_parallel_size=world_size, **settings)
    mesh = ParallelState.build(config, rank, world_size)
    return Build.root(config, mesh, NativeBackend(), torch.device("cpu"), "layer")


def make_linear(name, build, **options):
    return getattr(build.backend, name)(
        IN, OUT, build=build, init_method=nn.init.normal_, bias=True, **options
    )


def run_linear(rank, world_size, name, settings, options):
    """Forward and backward; whole output, whole input gradient and whole parameter gradients."""
    build = make_build(rank, world_size, **settings)
    layer, tp = make_linear(name, build, **options), build.mesh.tp
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(S, B, IN, generator=generator)
    d_y = torch.randn(S, B, OUT, generator=generator)
    sharded = build.config.sequence_parallel and tp.size > 1
    row = name.startswith("row")
    local_x = (split(x, tp, dim=-1) if row else split(x, tp) if sharded else x).requires_grad_()
    skip = options.get("skip_bias_add", False)
    for _ in range(2):  # the first pass of delayed scaling quantizes with scale 1
        layer.zero_grad()
        local_x.grad = None
        y, bias = layer(local_x)
        assert (bias is not None) == skip
        if bias is not None:
            y = y + bias
        if not row:
            local_d = split_sections(d_y, tp, options.get("partition_stride", 1))
        else:
            local_d = split(d_y, tp) if sharded else d_y
        (y * local_d).sum().backward()
        build.fp8.sync(build.mesh.amax)
    kind = "fp4" if settings.get("fp4_format") else "fp8" if settings.get("fp8_format") else "fp32"
    assert all(row.delivered.startswith(kind) for row in layer.precision.rows())
    gradients = {}
    for key, parameter in layer.named_parameters():
        gradient = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            gradient = all_reduce(gradient, tp)
        gradients[key] = gather_full(gradient, parameter, tp)
    weights = {key: gather_full(p.detach(), p, tp) for key, p in layer.named_parameters()}
    d_x = local_x.grad
    if row:
        d_x = all_gather(d_x, tp, dim=-1)
    elif sharded:
        d_x = all_gather(d_x, tp)
    return weights, gradients, d_x


def split_sections(x, tp, stride):
    """This rank's columns of `x`, split as the output of a column-parallel layer is."""
    sections = [split(part, tp, dim=-1) for part in x.chunk(stride, dim=-1)]
    return torch.cat(sections, dim=-1)


def reference(name, weights):
    """The same layer by autograd on whole fp64 tensors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(S, B, IN, generator=generator).double().requires_grad_()
    d_y = torch.randn(S, B, OUT, generator=generator).double()
    weights = {key: value.double().requires_grad_() for key, value in weights.items()}
    normed = x
    if name.startswith("layernorm"):
        normed = F.layer_norm(
            x, (IN,), weights["layer_norm_weight"], weights["layer_norm_bias"], 1e-5
        )
    F.linear(normed, weights["weight"], weights["bias"]).backward(d_y)
    return {key: value.grad for key, value in weights.items()}, x.grad


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", LINEARS)
def test_linear_layers_in_every_recipe_and_layout(name, tp, recipe):
    first_weights = None
    for sequence_parallel in (False, True)[:tp]:
        settings = {**RECIPES[recipe], "sequence_parallel": sequence_parallel}
        for options in ({}, {"skip_bias_add": True}):
            args = (name, settings, options)
            results = [run_linear(0, 1, *args)] if tp == 1 else run_ranks(run_linear, tp, *args)
            for weights, gradients, d_x in results:
                check(name, recipe, weights, gradients, d_x)
                first_weights = first_weights or weights
                assert all(torch.equal(weights[k], first_weights[k]) for k in weights)
    expected = run_linear(0, 1, name, {}, {})[0]
    assert all(torch.equal(first_weights[k], expected[k]) for k in expected)


def check(name, recipe, weights, gradients, d_x):
    expected, expected_d_x = reference(name, weights)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        relative = (gradient - expected[key]).norm() / expected[key].norm()
        assert relative < TOLERANCE[recipe], (key, relative)
    assert (d_x - expected_d_x).norm() / expected_d_x.norm() < TOLERANCE[recipe]


def test_a_stacked_output_is_split_section_by_section():
    options = {"partition_stride": 2}
    whole = run_linear(0, 1, "layernorm_column_parallel_linear", {}, options)
    for weights, gradients, d_x in run_ranks(
        run_linear, 2, "layernorm_column_parallel_linear", {}, options
    ):
        assert torch.equal(weights["weight"], whole[0]["weight"])
        torch.testing.assert_close(gradients["weight"], whole[1]["weight"])
        torch.testing.assert_close(d_x, whole[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LINEARS)
def test_weight_gradients_accumulate_into_main_grad(name, recipe):
    build = make_build(0, 1, **RECIPES[recipe])
    layer = make_linear(name, build)
    x = torch.randn(S, B, IN)
    layer(x)[0].square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    layer.weight.main_grad = torch.full_like(layer.weight, 2.0)
    layer.weight.grad_added_to_main_grad = False
    layer(x)[0].square().sum().backward()
    assert layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad
    torch.testing.assert_close(layer.weight.main_grad - 2.0, expected, rtol=1e-4, atol=1e-3)


def test_constructors_take_what_the_contract_names():
    backend = NativeBackend()
    pairs = [
        (contract.ColumnLinear, backend.column_parallel_linear),
        (contract.ColumnLinear, backend.layernorm_column_parallel_linear),
        (contract.RowLinear, backend.row_parallel_linear),
        (contract.NormFactory, backend.norm),
        (contract.CoreAttention, backend.core_attention),
    ]
    for protocol, leaf in pairs:
        wanted = dict(inspect.signature(protocol.__call__).parameters)
        wanted.pop("self")
        offered = inspect.signature(leaf).parameters
        for key, parameter in wanted.items():
            assert key in offered, (leaf, key)
            assert offered[key].kind == parameter.kind, (leaf, key)
            assert offered[key].default == parameter.default, (leaf, key)
        extra = [p for key, p in offered.items() if key not in wanted]
        assert all(p.default is not inspect.Parameter.empty for p in extra), leaf


def test_core_attention_takes_and_returns_the_contract_shapes():
    build = make_build(0, 1, group_query_attention=True, num_query_groups=2)
    attention = build.backend.core_attention(build=build, layer_number=1)
    d = build.config.kv_channels
    query, key = torch.randn(S, B, 4, d), torch.randn(S, B, 2, d)
    assert attention(query, key, key).shape == (S, B, 4 * d)
    assert not list(attention.parameters())
