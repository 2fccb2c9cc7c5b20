"""Megatron-Core's constructor spellings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.config import ConfigError, RunConfig
from megatron.config.moe import auxiliary_losses, moe_layers
from megatron.core.transformer.transformer_config import TransformerConfig


def test_the_usual_call_gives_a_run_configuration():
    config = TransformerConfig(
        num_layers=2, hidden_size=64, fp8="hybrid", params_dtype=torch.bfloat16, seq_length=32
    )
    assert isinstance(config, RunConfig)
    assert (config.fp8_format, config.params_dtype) == ("hybrid", "bfloat16")
    assert TransformerConfig(num_layers=2, hidden_size=64, fp4="e2m1").fp4_format == "e2m1"
    assert config.num_attention_heads == 1


def test_the_smallest_call():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    assert (config.kv_channels, config.params_dtype) == (3, "float32")
    assert TransformerConfig(num_layers=1, hidden_size=256).num_attention_heads == 4


def test_renamed_fields_and_functions():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
    )
    assert config.norm_epsilon == 1e-6
    assert config.apply_layernorm_1p
    assert config.swiglu
    assert config.num_query_groups == 2


def test_experts():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        add_bias_linear=False,
        num_moe_experts=4,
        moe_layer_freq=[0, 1],
        moe_aux_loss_coeff=1e-2,
        moe_router_load_balancing_type="aux_loss",
        moe_grouped_gemm=True,
    )
    assert (config.num_experts, moe_layers(config)) == (4, (False, True))
    assert auxiliary_losses(config) == {"aux_loss": 1e-2}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"activation_func": torch.tanh}, "activation_func"),
        ({"activation_func": F.gelu, "gated_linear_unit": True}, "gated_linear_unit"),
        ({"params_dtype": torch.int8}, "params_dtype"),
        ({"number_of_layers": 3}, "number_of_layers"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **fields)
