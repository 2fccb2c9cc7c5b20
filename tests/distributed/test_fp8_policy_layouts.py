"""Several recipes and products in one model: the layout changes neither results nor scales.

Also layers of a pipeline stage are found by their number in the whole model, at the edges too.
"""

from __future__ import annotations

import functools

import pytest
from distpool import run_ranks
from parity import BASE, different, mean_error, run_layout, worst

from megatron.config import make_config
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model

# Whole blocks of 32 at TP 2, fp32 parameters: nothing but the grid rounds coarsely.
FIELDS = {
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "fp8_format": "hybrid",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "max",
    "fp8_emulation": "exact",
}
PRODUCTS = """rules:
  - {module: "*.0.self_attention.linear_qkv", fprop: bf16}
  - {module: "*.0.self_attention.linear_proj", dgrad: bf16}
  - {module: "*.0.mlp.linear_fc1", dgrad: bf16}
  - {module: "*.0.mlp.linear_fc2", fprop: bf16, wgrad: bf16}
  - {module: "*.1.self_attention.linear_qkv", dgrad: bf16, wgrad: bf16}
  - {module: "*.1.self_attention.linear_proj", fprop: bf16, dgrad: bf16}
"""
RECIPES = """rules:
  - {module: "*.0.mlp.linear_fc1", recipe: mxfp8, format: e4m3, dgrad: bf16}
  - {module: "*.0.mlp.linear_fc2", recipe: mxfp8, format: e4m3, dgrad: bf16}
  - {module: "*.1.mlp.linear_fc1", recipe: mxfp8, fprop: bf16}
  - {module: "*.1.mlp.linear_fc2", recipe: bf16}
  - {layers: 1, format: e4m3}
"""
LAYOUTS = {
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2-overlap": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "tp_comm_overlap": True,
    },
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2-zb": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
}


@functools.cache
def alone(policy):
    return run_layout(FIELDS | {"fp8_policy": policy}, 1, 5)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [PRODUCTS, RECIPES], ids=["products", "recipes"])
def test_the_layout_changes_nothing(policy, layout):
    expected = alone(policy)
    outcome = run_layout(FIELDS | LAYOUTS[layout] | {"fp8_policy": policy}, 2, 5)[0]
    assert len(expected.fp8) == (8 if policy is PRODUCTS else 4)
    # Sums in another order move a magnitude by a bit at most, which may push a value over a
    # boundary of the grid, a step of 6 %.
    assert different(outcome, expected, rtol=1e-6) == set()
    assert outcome.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert mean_error(outcome, expected) < 1e-3
    assert worst(outcome.grads, expected.grads)[0] < 2e-2


def summaries(rank, world, fields):
    cfg = make_config(world_size=world, **{**BASE, "train_iters": 1, **fields})
    parts = setup_model(cfg, start(cfg, Launch(rank, world, rank, world)))
    return {path: layer.decision.summary for path, layer in parts.fp8.layers.items()}


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_edges_and_rules_go_by_the_number_in_the_whole_model(recipe):
    fields = {
        "num_layers": 4, "fp8_format": "e4m3", "fp8_recipe": recipe, "num_experts": 2,
        "add_bias_linear": False, "moe_layer_freq": "[0,1,0,1]", "first_last_layers_bf16": True,
        "num_layers_at_end_in_bf16": 2, "fp8_policy": "rules:\n- {layers: 1, wgrad: bf16}\n",
    }  # fmt: skip
    whole = summaries(0, 1, fields)
    assert set(whole.values()) == {"bf16", f"{recipe} e4m3 without wgrad"}
    in_fp8 = {path for path, summary in whole.items() if summary != "bf16"}
    assert {path.split(".")[2] for path in in_fp8} == {"1"}
    stages = run_ranks(summaries, 4, fields | {"pipeline_model_parallel_size": 2,
                       "expert_model_parallel_size": 2})  # fmt: skip
    merged = {path: summary for stage in stages for path, summary in stage.items()}
    assert merged == whole
