"""Mixture-of-experts families: settings and tables, in both directions."""

from __future__ import annotations

import pytest
import torch

from megatron.config.moe import layer_pattern
from megatron.core.dist_checkpointing.schema import Stacking
from megatron.core.errors import CheckpointError
from megatron.core.mesh import ParallelState
from megatron.training import hf_map
from megatron.training.hf_config import fields_from_hf, hf_from_fields
from megatron.training.hf_convert import MegatronSource
from megatron.training.hf_rows import Place, every_tensor
from megatron.training.progress import Progress
from tests.saving import save_checkpoint
from tests.small_models import LLAMA as LLAMA_LIKE
from tests.small_models import build_model, small_config
from tests.unit.test_hf_map import LLAMA

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}


def family(kind, name, **change):
    return {**LLAMA, "model_type": kind, "architectures": [f"{name}ForCausalLM"], **change}


MIXTRAL = family("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2)
QWEN2 = family("qwen2_moe", "Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=8)
QWEN3 = family("qwen3_moe", "Qwen3Moe", **EXPERTS, head_dim=8)
GLM4 = family(
    "glm4_moe", "Glm4Moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
    n_shared_experts=2, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
    routed_scaling_factor=2.5,
)  # fmt: skip
EIGHT = {"n_routed_experts": 8, "num_experts_per_tok": 4}
VARIANTS = {
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2 without biases": {**QWEN2, "qkv_bias": False},
    "qwen3": QWEN3,
    "qwen3 normalised": {**QWEN3, "norm_topk_prob": True},
    "qwen3 with a dense layer": {**QWEN3, "mlp_only_layers": [1]},
    "qwen3 every second layer": {**QWEN3, "decoder_sparse_step": 2},
    "glm4": GLM4,
    "glm4 without dense layers": {**GLM4, "first_k_dense_replace": 0, "attention_bias": False},
    "glm4 groups": {**GLM4, **EIGHT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.0},
}
EVERY_VARIANT = pytest.mark.parametrize("name", VARIANTS)


def table(config):
    return hf_map.rows_for(fields_from_hf(config), config["model_type"])


@EVERY_VARIANT
def test_configurations_survive_a_round_trip(name):
    fields = fields_from_hf(VARIANTS[name])
    config = hf_from_fields(fields, "float32")
    assert config["model_type"] == VARIANTS[name]["model_type"]
    assert fields_from_hf(config) == fields


@EVERY_VARIANT
def test_every_row_is_a_bijection_with_the_declared_shapes(name):
    for row in table(VARIANTS[name]):
        parts = [torch.randn(shape) for shape in row.shapes]
        ours = row.join(parts)
        assert tuple(ours.shape) == row.shape
        for a, b in zip(parts, row.split(ours), strict=True):
            assert torch.equal(a, b), row.name


def test_router_settings():
    assert fields_from_hf(MIXTRAL)["moe_router_pre_softmax"] is False
    assert fields_from_hf(MIXTRAL)["moe_ffn_hidden_size"] == LLAMA["intermediate_size"]
    assert fields_from_hf(QWEN3)["moe_router_pre_softmax"] is True
    glm = fields_from_hf(GLM4)
    assert glm["moe_router_score_function"] == "sigmoid"
    assert glm["moe_router_enable_expert_bias"] is True
    assert glm["moe_router_topk_scaling_factor"] == 2.5
    assert glm["moe_shared_expert_intermediate_size"] == 12
    assert glm["rotary_percent"] == 0.5  # what its config.json means if it says nothing
    assert (glm["add_qkv_bias"], glm["add_bias_linear"]) == (True, False)
    groups = fields_from_hf(VARIANTS["glm4 groups"])
    assert (groups["moe_router_num_groups"], groups["moe_router_group_topk"]) == (4, 2)


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        (MIXTRAL, (True, True)),
        ({**QWEN3, "mlp_only_layers": [0]}, (False, True)),
        ({**QWEN3, "decoder_sparse_step": 2}, (False, True)),
        (GLM4, (False, True)),
    ],
)
def test_layers_with_experts(config, pattern):
    assert layer_pattern(fields_from_hf(config)["moe_layer_freq"], 2) == pattern
    names = {at.of(row.name) for row, at in every_tensor(table(config), 2)}
    for i, has_experts in enumerate(pattern):
        layer = f"decoder.layers.{i}."
        assert (f"{layer}mlp.router.weight" in names) == has_experts
        assert (f"{layer}pre_mlp_layernorm.weight" in names) == has_experts
        assert (f"{layer}mlp.experts.linear_fc1.weight3" in names) == has_experts
        assert (f"{layer}mlp.linear_fc1.weight" in names) != has_experts


def test_names_of_an_expert():
    for config, names in (
        (MIXTRAL, ("block_sparse_moe.experts.2.w1", "block_sparse_moe.experts.2.w3")),
        (QWEN3, ("mlp.experts.2.gate_proj", "mlp.experts.2.up_proj")),
    ):
        (row,) = (r for r in table(config) if r.name.endswith("linear_fc1.weight{e}"))
        got = tuple(Place(1, 2).of(name) for name in row.names)
        assert got == tuple(f"model.layers.1.{name}.weight" for name in names)


def test_where_an_expert_is_stored():
    (row,) = (r for r in table(QWEN3) if r.name.endswith("linear_fc2.weight{e}"))
    assert row.stored(Place(1, 2), Stacking(2, 4)) == (
        "decoder.layers.mlp.experts.experts.linear_fc2.weight", (1, 2), (2, 4)
    )  # fmt: skip
    assert row.stored(Place(1, 2), Stacking(2, 4, layers_differ=True)) == (
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight", (2,), (4,)
    )  # fmt: skip
    (bias,) = (r for r in table(GLM4) if r.name.endswith("expert_bias"))
    assert bias.dtype is torch.float32


@pytest.mark.parametrize(
    ("base", "change", "name"),
    [
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is None"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5: there are 4"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        (MIXTRAL, {"sliding_window": 64}, "sliding_window"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (QWEN3, {"mlp_only_layers": [0, 1]}, "no layer has experts"),
        (QWEN3, {"moe_intermediate_size": "six"}, "moe_intermediate_size is 'six'"),
        (GLM4, {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (GLM4, {"n_group": 2, "topk_group": 1, **EIGHT}, "topk_group is 1.*2 instead of 4"),
        (GLM4, {"n_shared_experts": 0}, "n_shared_experts is 0"),
    ],
)
def test_what_the_router_cannot_compute_is_refused_by_name(base, change, name):
    with pytest.raises(CheckpointError, match=name):
        fields_from_hf({**base, **change})


@pytest.mark.parametrize(
    ("base", "change", "name"),
    [
        (MIXTRAL, {"moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
        (MIXTRAL, {"moe_layer_freq": "2"}, "moe_layer_freq is '2'"),
        (MIXTRAL, {"add_qkv_bias": True}, "add_qkv_bias.*Mixtral"),
        (MIXTRAL, {"moe_router_topk_scaling_factor": 2.0}, "moe_router_topk_scaling_factor"),
        (
            MIXTRAL,
            {"moe_router_load_balancing_type": ["sinkhorn"]},
            "moe_router_load_balancing_type",
        ),
        (QWEN3, {"moe_router_num_groups": 2}, "moe_router_num_groups"),
        (QWEN2, {"moe_shared_expert_gate": False}, "moe_shared_expert_gate"),
        (QWEN2, {"qk_layernorm": True}, "qk_layernorm"),
        (GLM4, {"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function"),
        (GLM4, {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        (GLM4, {"moe_layer_freq": "([1]*1+[0]*1)"}, "moe_layer_freq"),
        (GLM4, {"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size"),
        (GLM4, {"moe_shared_expert_intermediate_size": None}, "moe_shared_expert_intermediate"),
        (GLM4, {"moe_shared_expert_gate": True}, "moe_shared_expert_gate"),
        (GLM4, {"moe_router_num_groups": 2, "moe_router_group_topk": 2}, "moe_router_group_topk"),
    ],
)
def test_models_without_a_huggingface_counterpart_are_refused_by_name(base, change, name):
    with pytest.raises(CheckpointError, match=name):
        hf_from_fields({**fields_from_hf(base), **change}, "float32")


@pytest.mark.parametrize("balancing", ["sinkhorn", "none"])
def test_a_checkpoint_with_sinkhorns_weights_is_refused(tmp_path, balancing):
    """Its weights are those of no exported router, though every tensor has a place."""
    config = small_config(
        **LLAMA_LIKE, num_experts=4, moe_router_load_balancing_type=[balancing],
        save=str(tmp_path), save_interval=1,
    )  # fmt: skip
    model, build = build_model(config)
    save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=None, scheduler=None, fp8=build.fp8,
        progress=Progress(iteration=1),
    )  # fmt: skip
    if balancing == "none":
        assert MegatronSource.find(tmp_path).model_type == "mixtral"
        return
    with pytest.raises(CheckpointError, match="moe_router_load_balancing_type is 'sinkhorn'"):
        MegatronSource.find(tmp_path)
