from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.config import ConfigError, make_config
from megatron.core.errors import CheckpointError
from megatron.training.checkpoint_config import (
    adopt,
    check_same_model,
    differences,
    saved_settings,
)
from megatron.training.checkpointing import with_checkpoint_args
from tests.small_models import GQA, LLAMA, small_config

TRAINING = {"micro_batch_size": 2, "train_iters": 3, "mock_data": True, "lr": 1e-3}


def saved(**settings):
    return small_config(**settings).to_dict()


def bare(**settings):
    """A run that says nothing about its model but takes it from a checkpoint."""
    return make_config(**{**TRAINING, "load": "x", "use_checkpoint_args": True, **settings})


MOE = {
    **LLAMA, "num_experts": 4, "moe_layer_freq": "[0,1]", "moe_ffn_hidden_size": 32,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    "model", [{}, LLAMA, {**LLAMA, **GQA}, {**GQA, "num_query_groups": 4}, MOE]
)
def test_a_model_is_taken_over_whole(model):
    settings = saved(**model)
    cfg = adopt(bare(), settings)
    assert differences(settings, cfg) == {}
    for name in ("num_layers", "hidden_size", "num_query_groups", "ffn_hidden_size", "swiglu"):
        assert getattr(cfg, name) == settings[name], name
    assert cfg.train_iters == 3


def test_agreeing_flags_are_fine_and_contradictions_are_listed():
    settings = saved(**LLAMA)
    assert adopt(bare(num_layers=2), settings).num_layers == 2
    with pytest.raises(CheckpointError) as failure:
        adopt(bare(num_layers=3, ffn_hidden_size=64), settings)
    assert "--num-layers is 2 in the checkpoint and 3 on the command line" in str(failure.value)
    assert "--ffn-hidden-size is 48 in the checkpoint and 64" in str(failure.value)


def test_other_flags_are_not_taken_from_the_checkpoint():
    settings = {**saved(**LLAMA), "seed": 77, "lr": 9.0, "micro_batch_size": 9}
    cfg = adopt(bare(seed=5), settings)
    assert (cfg.seed, cfg.lr, cfg.micro_batch_size) == (5, 1e-3, 2)


def test_every_difference_of_the_model_is_refused_at_once():
    cfg = small_config(**{**LLAMA, "num_layers": 3, "normalization": "LayerNorm"}, load="x")
    with pytest.raises(CheckpointError) as failure:
        check_same_model(saved(**LLAMA), cfg)
    assert "--num-layers is 2 in the checkpoint and 3 in this run" in str(failure.value)
    assert "--normalization is RMSNorm in the checkpoint and LayerNorm" in str(failure.value)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({**LLAMA, "max_position_embeddings": 24}, {**LLAMA, "max_position_embeddings": 48}),
        ({"add_qkv_bias": False}, {"add_qkv_bias": True}),  # all linear layers have biases
        (LLAMA, {**LLAMA, "lr": 5.0, "seed": 3, "tensor_model_parallel_size": 1}),
    ],
)
def test_differences_without_effect_on_the_weights_are_fine(was, now):
    assert check_same_model(saved(**was), small_config(**now)) == []


def test_patterns_of_layers_are_compared_by_what_they_say():
    settings = {**saved(**MOE), "moe_layer_freq": "[0, 1]"}
    assert check_same_model(settings, small_config(**MOE)) == []
    others = small_config(**{**MOE, "moe_layer_freq": "1", "moe_router_topk": 3}, load="x")
    with pytest.raises(CheckpointError) as failure:
        check_same_model(settings, others)
    assert "--moe-layer-freq is [0, 1] in the checkpoint and 1" in str(failure.value)
    assert "--moe-router-topk is 2 in the checkpoint and 3" in str(failure.value)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({"moe_router_topk_scaling_factor": 2.5}, {}, "scaling-factor is 2.5 in the checkpoint"),
        (
            {},
            {"moe_router_topk_scaling_factor": 2.5},
            "scaling-factor is not set in the checkpoint",
        ),
        (
            {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
            {},
            "--moe-router-num-groups is 2 in the checkpoint and not set",
        ),
        ({"num_experts": None}, {}, "--num-experts is not set in the checkpoint and 4"),
        ({}, {"num_experts": None}, "--num-experts is 4 in the checkpoint and not set"),
    ],
)
def test_a_router_that_lost_a_setting_is_another_one(was, now, said):
    """No tensor tells, so the settings have to."""

    def settings(change):
        with_experts = change.get("num_experts", 4) is not None
        base = MOE if with_experts else LLAMA
        return {k: v for k, v in {**base, **change}.items() if v is not None}

    stored = saved_settings({"args": Namespace(**small_config(**settings(was)).to_dict())})
    with pytest.raises(CheckpointError, match=said):
        check_same_model(stored, small_config(**settings(now), load="x"))
    assert check_same_model(stored, small_config(**settings(was), load="x")) == []


def test_equal_routers_written_differently_are_one():
    stored = saved_settings({"args": Namespace(**small_config(**MOE).to_dict())})
    now = small_config(**MOE, moe_router_topk_scaling_factor=1.0)
    assert check_same_model(stored, now) == []
    assert adopt(bare(moe_layer_freq="([0]*1+[1]*1)"), stored).num_experts == 4


@pytest.mark.parametrize("entry", [{"num_experts": None}, {}])
def test_a_model_with_experts_is_another_one_than_a_dense_one(entry):
    dense = {n: v for n, v in saved(**LLAMA).items() if n != "num_experts"} | entry
    with pytest.raises(CheckpointError) as failure:
        check_same_model(dense, small_config(**{**MOE, "moe_router_topk": 3}, load="x"))
    assert "--num-experts is not set in the checkpoint and 4 in this run" in str(failure.value)
    assert "--moe" not in str(failure.value)
    with pytest.raises(CheckpointError, match="--num-experts is 4 in the checkpoint and not set"):
        check_same_model(saved(**MOE), small_config(**LLAMA, load="x"))


def test_a_longer_context_needs_finetune():
    settings = saved(**LLAMA)
    longer = small_config(**{**LLAMA, "rotary_base": 500000}, load="x")
    with pytest.raises(CheckpointError, match="--rotary-base is 10000 in the checkpoint"):
        check_same_model(settings, longer)
    (note,) = check_same_model(settings, longer.replace(finetune=True))
    assert "--rotary-base" in note
    wider = small_config(**{**LLAMA, "hidden_size": 64}, load="x", finetune=True)
    with pytest.raises(CheckpointError, match="--hidden-size"):
        check_same_model(settings, wider)


def test_experts_may_come_from_the_checkpoint():
    cfg = bare(expert_model_parallel_size=2, world_size=2)
    assert cfg.num_experts is None
    settings = saved(**LLAMA, num_experts=4, moe_ffn_hidden_size=16)
    cfg = adopt(cfg, settings)
    assert (cfg.num_experts, cfg.expert_model_parallel_size) == (4, 2)
    assert cfg.replace(use_checkpoint_args=False).num_experts == 4


def test_settings_of_experts_are_refused_if_the_checkpoint_has_none(tmp_path):
    cfg = bare(load=str(tmp_path), moe_token_dispatcher_type="alltoall", num_layers=2)
    with pytest.raises(ConfigError, match="moe-token-dispatcher-type: got no --num-experts"):
        with_checkpoint_args(cfg)
