"""Layers with experts train the same model at every layout: weights, gradients, losses, loads."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import Outcome, run_layout, worst
from small_models import GQA, LLAMA

EXPERTS = {**LLAMA, **GQA, "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_z_loss_coeff": 0.1}
# Weights large enough that a wrong factor on any loss shows in the gradients.
MIXTRAL = {
    **EXPERTS,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3],
}
# All replicas' microbatches together are one of the reference's: its size has to fit.
GLOBAL = {
    **EXPERTS,
    "moe_router_load_balancing_type": ["global_aux_loss"],
    "moe_aux_loss_coeff": [0.4],
    "micro_batch_size": 4,
}
# Whoever cuts the batch into whichever microbatches: these two do not notice.
SEQUENCE = {
    **EXPERTS,
    "moe_router_load_balancing_type": ["seq_aux_loss"],
    "moe_aux_loss_coeff": [0.4],
}
DEEPSEEK = {
    **MIXTRAL,
    "moe_layer_freq": "([0]*1+[1]*1)",
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
}
DROPPING = {**MIXTRAL, "moe_expert_capacity_factor": 0.7}
BY_POSITION = {**DROPPING, "moe_token_drop_policy": "position"}
SINKHORN = {
    **EXPERTS,
    "moe_router_topk": 1,
    "moe_router_load_balancing_type": ["sinkhorn"],
}
MODELS = {
    "mixtral": MIXTRAL,
    "global": GLOBAL,
    "sequence": SEQUENCE,
    "deepseek": DEEPSEEK,
    "dropping": DROPPING,
    "by position": BY_POSITION,
    "sinkhorn": SINKHORN,
}

EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
ETP2 = {"expert_tensor_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
A2A = {"moe_token_dispatcher_type": "alltoall"}
FILLED = {"moe_pad_expert_input_to_capacity": True}
ZERO = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
INTERLEAVED = {**PP2, "num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}
UNEVEN = {**PP2, "num_layers": 3, "decoder_first_pipeline_num_layers": 2}

# Model, layout, number of ranks.
LAYOUTS = [
    ("mixtral", EP2, 2),
    ("mixtral", EP2 | A2A, 2),
    ("mixtral", {"expert_model_parallel_size": 4} | A2A, 4),
    ("mixtral", ETP2, 2),  # shares experts although nothing else is shared
    ("mixtral", ETP2 | A2A, 2),
    ("mixtral", TP2, 2),  # ETP 2 by default
    ("mixtral", TP2 | SP | A2A, 2),
    ("mixtral", TP2 | ETP1, 2),  # every rank has all experts
    ("mixtral", TP2 | ETP1 | EP2, 2),
    ("mixtral", TP2 | SP | ETP1 | EP2 | A2A, 2),
    ("mixtral", TP2 | EP2, 4),
    ("mixtral", TP2 | SP | EP2 | A2A, 4),
    ("mixtral", CP2 | EP2 | A2A, 2),
    ("mixtral", PP2 | EP2, 4),
    ("mixtral", PP2 | EP2 | A2A | ZERO | {"pipeline_schedule": "zb-h1"}, 4),
    ("mixtral", PP2 | EP2 | A2A | ZERO | {"use_tp_pp_dp_mapping": True}, 4),
    ("mixtral", EP2 | ZERO, 2),
    ("mixtral", EP2 | ZERO | A2A, 4),
    ("mixtral", EP2 | A2A | FULL, 2),
    ("mixtral", EP2 | PACKED, 2),
    ("global", EP2 | {"micro_batch_size": 2}, 2),
    ("global", TP2 | CP2, 4),
    ("sequence", {"micro_batch_size": 8}, 1),
    ("sequence", EP2 | {"micro_batch_size": 1}, 4),
    ("deepseek", EP2 | A2A, 2),
    ("deepseek", TP2 | SP | CP2 | EP2, 4),
    ("deepseek", TP2 | SP | {"tp_comm_overlap": True}, 2),
    ("deepseek", PP2 | FULL, 2),
    ("deepseek", UNEVEN | {"moe_layer_freq": "[0,1,1]"}, 2),
    ("deepseek", INTERLEAVED | EP2 | {"moe_layer_freq": "2"}, 4),
    ("dropping", EP2 | A2A | FILLED, 2),
    ("dropping", TP2 | CP2 | EP2, 4),
    ("dropping", TP2 | SP | FILLED | A2A, 2),
    ("by position", TP2 | CP2 | EP2 | FILLED, 4),
    ("sinkhorn", TP2 | SP, 2),
    ("sinkhorn", CP2 | EP2, 2),
]
# What changes the model itself, and so the reference.
_OF_THE_MODEL = ("num_layers", "moe_layer_freq", *PACKED)


@functools.cache
def alone(model: str, steps: int, settings: tuple[tuple[str, object], ...]) -> Outcome:
    return run_layout(MODELS[model] | dict(settings), 1, steps)[0]


def name_of(value):
    return "-".join(str(x) for x in value.values()) if isinstance(value, dict) else None


@pytest.mark.parametrize(("model", "layout", "ranks"), LAYOUTS, ids=name_of)
def test_fp32(model, layout, ranks):
    steps = 2
    changed = tuple((k, layout[k]) for k in _OF_THE_MODEL if k in layout)
    expected = alone(model, steps, changed)
    outcomes = run_layout(MODELS[model] | layout, ranks, steps)
    for other in outcomes[1:]:
        assert other.losses == outcomes[0].losses
        assert other.balance == outcomes[0].balance
        assert all(torch.equal(v, other.final[n]) for n, v in outcomes[0].final.items())
    outcome = outcomes[0]
    assert worst(outcome.initial, expected.initial)[0] == 0
    # Only the order of fp32 additions differs between layouts.
    assert worst(outcome.grads, expected.grads)[0] < 1e-5
    assert worst(outcome.final, expected.final)[0] < 1e-5
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    for ours, theirs in zip(outcome.balance, expected.balance, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_the_harness_sees_balancing_losses_and_every_expert():
    """Guards the harness: the losses move the routers, and no expert is idle."""
    outcome = alone("mixtral", 2, ())
    without = run_layout(MIXTRAL | {"moe_aux_loss_coeff": [0.0, 0.0]}, 1, 1)[0]
    name = "decoder.layers.0.mlp.router.weight"
    difference = (outcome.grads[name] - without.grads[name]).abs().max()
    assert difference > 0.01 * without.grads[name].abs().max()
    assert all(value.abs().max() > 1e-4 for value in outcome.grads.values())
    assert outcome.balance[0].keys() == {
        "load_balancing_loss", "seq_load_balancing_loss", "z_loss", "moe/load_entropy"
    }  # fmt: skip


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_adamw_stays_together(dispatcher):
    """Adam divides by the gradient's own size: rounding shows a little more than with SGD."""
    adam = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.3}
    expected = run_layout(MIXTRAL | adam, 1, 5)[0]
    layout = EP2 | {"moe_token_dispatcher_type": dispatcher}
    outcome = run_layout(MIXTRAL | adam | layout, 2, 5)[0]
    assert worst(outcome.final, expected.final)[0] < 1e-4
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)


DELAYED = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "max",
}


@pytest.mark.parametrize("dtype", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout", [EP2, EP2 | A2A, {}], ids=["allgather", "alltoall", "two replicas"]
)
def test_delayed_scales_are_those_of_one_process(layout, dtype):
    """In the first step every rank sees the tensors of one process, expert by expert."""
    expected = alone("mixtral", 1, tuple((DELAYED | dtype).items()))
    outcome = run_layout(MIXTRAL | DELAYED | dtype | layout, 2, 1)[0]
    assert outcome.fp8.keys() == expected.fp8.keys()
    assert sum(".experts." in path for path in outcome.fp8) == 2 * 4 * 2
    for path, entries in expected.fp8.items():
        for key, value in entries.items():
            assert torch.equal(outcome.fp8[path][key], value), (path, key)
    assert outcome.losses == expected.losses


SENT_IN_FP8 = {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "blockwise"}


@pytest.mark.parametrize(
    ("model", "layout", "ranks"),
    [
        ("mixtral", EP2, 2),
        ("mixtral", TP2 | SP | A2A | FULL, 2),
        ("dropping", TP2 | CP2 | EP2 | FILLED, 4),
        ("deepseek", PP2 | EP2 | A2A | ZERO | {"pipeline_schedule": "zb-h1"}, 4),
    ],
    ids=name_of,
)
def test_tokens_in_fp8(model, layout, ranks):
    """They are quantized alike wherever the experts are, also where nothing travels.

    fp32 sums in another order may round an element to the neighbouring code, a sixteenth off. One
    such element is a thousandth of a gradient; that all of them are quantized changes a gradient by
    a hundredth and more, as the last lines see to.
    """
    expected = alone(model, 2, tuple(SENT_IN_FP8.items()))
    outcome = run_layout(MODELS[model] | SENT_IN_FP8 | layout, ranks, 2)[0]
    assert worst(outcome.grads, expected.grads)[0] < 2e-3
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-4)
    assert outcome.balance[0] == pytest.approx(expected.balance[0], rel=1e-4)
    plain = alone(model, 2, ())
    assert worst(plain.grads, expected.grads)[0] > 1e-2
