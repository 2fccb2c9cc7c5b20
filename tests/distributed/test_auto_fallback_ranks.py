"""Every rank decides alike about every layer of the model, also about those it does not hold."""

from __future__ import annotations

import pytest

from megatron.core.fp8.fallback import FALLEN, PROBATION
from megatron.observe.events import PrecisionChange
from megatron.training.initialize import Launch
from megatron.training.parity.ranks import compile_kernels
from tests.distpool import run_ranks
from tests.spikes import LOUD, Loud, Samples, alternating, run

EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2,
    "moe_ffn_hidden_size": 32, "add_bias_linear": False, "fp8_recipe": "tensorwise",
    "micro_batch_size": 2,
}  # fmt: skip
DENSE = "decoder.layers.1.mlp.linear_fc2"
PLANTED = [(19, FALLEN, "saturation"), (25, PROBATION, "probe"), (27, FALLEN, "saturation")]


def late(iteration):
    return 64 if iteration > 21 else 1


LAYOUTS = {
    "tp2sp": (DENSE, alternating, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "dp2 fp8 weights": (
        DENSE,
        alternating,
        {"use_distributed_optimizer": True, "fp8_param_gather": True, "micro_batch_size": 2},
    ),
    "pp2": (DENSE, alternating, {"pipeline_model_parallel_size": 2}),
    "ep2": ("decoder.layers.1.mlp.experts.linear_fc2", late, EXPERTS),
}


def train(rank, world_size, layout, stop):
    """Train; return decisions and who is held back on this rank at the end."""
    path, factor, fields = LAYOUTS[layout]
    settings = {**LOUD, "num_layers": 2, **fields, "exit_interval": stop}
    launch = Launch(rank, world_size, rank, world_size)
    made, seen = run(Samples(), launch, prepare=Loud(path, factor), **settings)
    return seen.kinds(PrecisionChange), made.parts.fp8.suspended()


@pytest.mark.parametrize("layout", ["tp2sp", "dp2 fp8 weights", "pp2"])
def test_a_planted_layer(layout):
    compile_kernels()
    (changes, held), (others, also_held) = run_ranks(train, 2, layout, 28)
    assert changes == others
    assert {one.layer for one in changes} == {DENSE}
    assert [(one.iteration, one.after, one.rule) for one in changes] == PLANTED
    assert {*held, *also_held} == {DENSE}  # with pipeline parallelism on its rank alone


def test_experts_of_all_ranks_are_switched_together():
    compile_kernels()
    path = LAYOUTS["ep2"][0]
    (changes, held), (others, also_held) = run_ranks(train, 2, "ep2", 27)
    assert changes == others
    assert [(one.layer, one.after) for one in changes] == [(path, FALLEN)]
    assert [*held, *also_held] == [f"{path}.{number}" for number in range(4)]
