"""Scales of experts across ranks: one expert has one scale everywhere, two experts never share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.mappings import split
from tests.distpool import run_ranks
from tests.small_models import small_config

GROUP = "decoder.layers.0.mlp.experts.linear_fc1"
EXPERTS, IN, OUT = 4, 32, 48
COUNTS = [4, 6, 0, 2]
FP8 = {"fp8_format": "hybrid", "fp8_amax_history_len": 4, "fp8_emulation": "exact"}


def train(rank, world_size, **settings):
    """Two steps in which every rank sees its share of the tokens of its experts."""
    settings = {"num_experts": EXPERTS, "add_bias_linear": False, **FP8, **settings}
    config = small_config(world_size=world_size, global_batch_size=2 * world_size, **settings)
    mesh = ParallelState.build(config, rank, world_size)
    build = Build.root(config, mesh, NativeBackend(), torch.device("cpu"), GROUP)
    here = EXPERTS // mesh.ep.size
    layer = build.backend.column_parallel_grouped_linear(
        here, IN, OUT, build=build, init_method=nn.init.normal_
    )
    numbers = [weight.expert_index for weight in layer.weights]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(sum(COUNTS), n, generator=generator) for n in (IN, OUT))
        for index, (part, grad) in enumerate(
            zip(x.split(COUNTS), dy.split(COUNTS), strict=True), start=1
        ):
            part *= index  # experts see different magnitudes
            grad *= index

        def own(rows):
            parts = [p for n, p in enumerate(rows.split(COUNTS)) if n in numbers]
            return [p.chunk(mesh.edp.size)[mesh.edp.rank] if len(p) else p for p in parts]

        counts = [len(part) for part in own(x)]
        layer(torch.cat(own(x)), counts).backward(split(torch.cat(own(dy)), mesh.etp, dim=-1))
        build.fp8.sync(mesh.amax, mesh.expert_amax)
    return build.fp8.state_dict()["experts"][GROUP]


def by_expert(results):
    """Scales and histories of each expert, as each rank that holds it has them."""
    found = {n: [] for n in range(EXPERTS)}
    for state in results:
        for row, number in enumerate(state["numbers"]):
            found[number].append({k: v[row] for k, v in state.items() if k != "numbers"})
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {"expert_model_parallel_size": 2}),
        (2, {}),
        (4, {"expert_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    ],
    ids=["ep2", "edp2", "ep2-edp2", "etp2"],
)
def test_scales_do_not_depend_on_the_layout(world_size, settings):
    alone = by_expert(run_ranks(train, 1))
    results = run_ranks(train, world_size, **settings)
    holders = world_size // settings.get("expert_model_parallel_size", 1)
    for number, states in by_expert(results).items():
        assert len(states) == holders
        for state in states:
            for name, value in state.items():
                assert torch.equal(value, alone[number][0][name]), (number, name)
    scales = {float(states[0]["scale_fwd"][0]) for states in alone.values()}
    assert len(scales) == EXPERTS


def test_replicas_of_an_expert_keep_their_own_scales_if_asked_to():
    first, second = run_ranks(train, 2, fp8_amax_reduction="tp")
    assert not torch.equal(first["scale_fwd"][0], second["scale_fwd"][0])
