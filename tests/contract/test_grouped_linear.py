"""The linear layers of experts: every recipe, split over expert-TP ranks or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from megatron.core.shards import gather_full, shard_axis
from megatron.core.tensor_parallel.mappings import all_gather, all_reduce, split
from tests.distpool import run_ranks
from tests.small_models import small_config

RECIPES = {
    "plain": {},
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_emulation": "exact"},
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_emulation": "exact"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_emulation": "exact"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_emulation": "fast"},
    "nvfp4": {"fp4_format": "e2m1", "fp8_emulation": "exact"},
}
EXPERTS, IN, OUT = 3, 32, 48
COUNTS = [5, 0, 6]
PATH = "decoder.layers.0.mlp.experts.linear_fc1"


def run_grouped(rank, world_size, kind, settings, stride):
    """Two steps; whole output, input gradient, weights and weight gradients, and the scales."""
    config = small_config(world_size=world_size, tensor_model_parallel_size=world_size, **settings)
    mesh = ParallelState.build(config, rank, world_size)
    build = Build.root(config, mesh, NativeBackend(), torch.device("cpu"), PATH)
    make = getattr(build.backend, f"{kind}_parallel_grouped_linear")
    options = {"partition_stride": stride} if stride > 1 else {}
    layer = make(EXPERTS, IN, OUT, build=build, init_method=nn.init.normal_, **options)
    etp = mesh.etp
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), IN, generator=generator)
    d_y = torch.randn(sum(COUNTS), OUT, generator=generator)
    for _ in range(2):
        layer.zero_grad()
        if kind == "row":
            local_x, local_d = split(x, etp, dim=-1).clone().requires_grad_(), d_y
        else:
            local_x = x.clone().requires_grad_()
            local_d = torch.cat([split(p, etp, dim=-1) for p in d_y.chunk(stride, dim=-1)], dim=-1)
        y = layer(local_x, COUNTS)
        y.backward(local_d)
        build.fp8.sync(mesh.amax, mesh.expert_amax)
    delivered = {row.delivered for p in layer.precisions for row in p.rows()}
    assert all(("fp8" in name or "fp4" in name) == bool(settings) for name in delivered)
    if kind == "row":
        y, d_x = all_reduce(y.detach(), etp), all_gather(local_x.grad, etp, dim=-1)
    else:
        d_x = all_reduce(local_x.grad, etp)
        whole = all_gather(y.detach().unsqueeze(0), etp)
        y = torch.cat([p for i in range(stride) for p in whole.chunk(stride, dim=-1)[i]], dim=-1)
    assert all(shard_axis(w, mesh) is etp for w in layer.weights)
    weights = [gather_full(w.detach(), w, etp) for w in layer.weights]
    gradients = [gather_full(w.grad, w, etp) for w in layer.weights]
    book = build.fp8.expert_book
    return y, d_x, weights, gradients, None if book is None else book.scale.clone()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("kind", "stride"), [("column", 1), ("column", 2), ("row", 1)])
def test_the_layout_changes_nothing(recipe, kind, stride):
    settings = RECIPES[recipe]
    (alone,) = run_ranks(run_grouped, 1, kind, settings, stride)
    two = run_ranks(run_grouped, 2, kind, settings, stride)
    assert [tuple(w.shape) for w in alone[2]] == [(OUT, IN)] * EXPERTS
    for result in two:
        for one, other in zip(alone[2], result[2], strict=True):
            assert torch.equal(one, other)
        if recipe not in ("plain", "delayed"):
            # Each rank scales its own part of a weight, as in the dense layers: other roundings.
            # One code of E4M3 is 2^-4 wide, one of E5M2 2^-3; a product averages over many.
            # One of E2M1 is up to half its value wide, and gradients round at random.
            wide = 0.35 if recipe == "nvfp4" else 0.1
            near = {"rtol": wide, "atol": wide * float(alone[0].abs().max())}
        else:
            near = {"rtol": 1e-5, "atol": 1e-5 * IN}  # fp32 sums in another order
        torch.testing.assert_close(result[0], alone[0], **near)
        torch.testing.assert_close(result[1], alone[1], **near)
        for one, other in zip(alone[3], result[3], strict=True):
            torch.testing.assert_close(other, one, **near)
        if alone[4] is not None:
            assert torch.equal(result[4], alone[4])


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_those_of_the_dense_layer_of_the_same_path(recipe):
    (grouped,) = run_ranks(run_grouped, 1, "column", RECIPES[recipe], 1)
    config = small_config()
    for number, weight in enumerate(grouped[2]):
        build = Build.root(
            config, ParallelState.single(), NativeBackend(), torch.device("cpu"), f"{PATH}.{number}"
        )
        dense = build.backend.column_parallel_linear(
            IN, OUT, build=build, init_method=nn.init.normal_, bias=False
        )
        assert torch.equal(dense.weight, weight)
