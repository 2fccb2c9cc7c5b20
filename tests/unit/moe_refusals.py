"""Settings of mixture-of-experts layers that cannot work: (ranks, settings, first flag, words)."""

from __future__ import annotations

MOE = {"num_experts": 4, "add_bias_linear": False}
SIGMOID = {"moe_router_score_function": "sigmoid"}
SINKHORN = {"moe_router_load_balancing_type": ["sinkhorn"]}

TE_FP8 = {"fp8_format": "hybrid", "transformer_impl": "transformer_engine"}
MOE_REFUSED = [
    (1, {"moe_z_loss_coeff": 0.1}, "--moe-z-loss-coeff", ["no --num-experts", "remove it"]),
    (2, {"expert_model_parallel_size": 2}, "--expert-model-parallel-size", ["Add --num-experts"]),
    (
        2,
        {"expert_tensor_parallel_size": 2},
        "--expert-tensor-parallel-size",
        ["Add --num-experts"],
    ),
    (1, {**MOE, "num_experts": 0}, "--num-experts", ["at least 1"]),
    (1, {**MOE, "moe_router_topk": 0}, "--moe-router-topk", ["at least 1"]),
    (1, {**MOE, "moe_z_loss_coeff": -1.0}, "--moe-z-loss-coeff", ["at least 0"]),
    (1, {**MOE, "moe_aux_loss_coeff": [-1.0]}, "--moe-aux-loss-coeff", ["apart"]),
    (1, {**MOE, "moe_router_topk_scaling_factor": 0.0}, "--moe-router-topk-scaling-factor", []),
    (1, {**MOE, "moe_expert_capacity_factor": 0.0}, "--moe-expert-capacity-factor", ["no token"]),
    (1, {**MOE, "moe_input_jitter_eps": 1.0}, "--moe-input-jitter-eps", ["below 1"]),
    (1, {**MOE, "moe_layer_freq": "([0]*1+[1]*2)"}, "--moe-layer-freq", ["3 layers", "has 2"]),
    (1, {**MOE, "moe_layer_freq": "[1]*99999999999"}, "--moe-layer-freq", ["99999999999 layers"]),
    (1, {**MOE, "moe_layer_freq": "0"}, "--moe-layer-freq", ["at least 1"]),
    (1, {**MOE, "moe_layer_freq": "[1]*x"}, "--moe-layer-freq", ["neither"]),
    (1, {**MOE, "moe_layer_freq": "[0]*2"}, "--moe-layer-freq", ["No layer"]),
    (1, {**MOE, "moe_router_topk": 5}, "--moe-router-topk", ["5 and 4"]),
    (1, {**MOE, "moe_router_num_groups": 2}, "--moe-router-num-groups", ["Give both"]),
    (
        1,
        {**MOE, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
        "--moe-router-num-groups",
        ["divides the experts"],
    ),
    (
        1,
        {**MOE, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
        "--moe-router-num-groups",
        ["must hold 2"],
    ),
    (1, {**MOE, "moe_router_topk": 1}, "--moe-router-topk", ["Add --moe-router-pre-softmax"]),
    (
        1,
        {**MOE, **SIGMOID, "moe_router_pre_softmax": True},
        "--moe-router-pre-softmax",
        ["Remove"],
    ),
    (
        1,
        {**MOE, "moe_router_enable_expert_bias": True},
        "--moe-router-enable-expert-bias",
        ["sigmoid or sqrtsoftplus"],
    ),
    (
        1,
        {**MOE, "moe_router_bias_update_rate": 0.1},
        "--moe-router-bias-update-rate",
        ["no bias"],
    ),
    (
        1,
        {**MOE, "moe_router_load_balancing_type": ["aux_loss", "none"]},
        "--moe-router-load-balancing-type",
        ["aux_loss none"],
    ),
    (
        1,
        {**MOE, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        "--moe-router-load-balancing-type",
        ["Give 2 weights"],
    ),
    (
        1,
        {**MOE, **SINKHORN, "moe_aux_loss_coeff": [0.1]},
        "--moe-router-load-balancing-type",
        ["no loss"],
    ),
    (
        1,
        {**MOE, "moe_router_load_balancing_type": ["quantile_balancing"]},
        "--moe-router-load-balancing-type",
        ["aux_loss"],
    ),
    (
        1,
        {**MOE, **SINKHORN, **SIGMOID},
        "--moe-router-load-balancing-type",
        ["--moe-router-score-function"],
    ),
    (1, {**MOE, "moe_token_drop_policy": "position"}, "--moe-token-drop-policy", ["capacity"]),
    (
        1,
        {**MOE, "moe_pad_expert_input_to_capacity": True},
        "--moe-pad-expert-input-to-capacity",
        ["capacity"],
    ),
    (1, {"num_experts": 4}, "--num-experts", ["Add --disable-bias-linear"]),
    (1, {**MOE, "moe_shared_expert_gate": True}, "--moe-shared-expert-gate", ["Add --moe-shared"]),
    (
        3,
        {**MOE, "expert_model_parallel_size": 3, "global_batch_size": 3},
        "--num-experts",
        ["4 and 3", "Set --num-experts 6"],
    ),
    (
        2,
        {**MOE, "moe_ffn_hidden_size": 3, "expert_tensor_parallel_size": 2},
        "--moe-ffn-hidden-size",
        ["3 and 2"],
    ),
    (
        2,
        {**MOE, "moe_shared_expert_intermediate_size": 3, "tensor_model_parallel_size": 2},
        "--moe-shared-expert-intermediate-size",
        ["3 and 2"],
    ),
    (
        2,
        {**MOE, "expert_model_parallel_size": 4},
        "--expert-tensor-parallel-size",
        ["1, 4 and 1 on 2 processes", "multiple of 4"],
    ),
    (
        2,
        {**MOE, "tensor_model_parallel_size": 2, "seq_length": 31},
        "--seq-length",
        ["31 and 2", "Set --seq-length 32"],
    ),
    (1, {**MOE, "moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type", ["alltoall"]),
    (
        1,
        {**MOE, **TE_FP8, "moe_ffn_hidden_size": 40},
        "--moe-ffn-hidden-size",
        ["got 40", "32 or 48"],
    ),
]
