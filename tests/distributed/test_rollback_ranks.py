"""All ranks go back together, each with its own part, and nothing of the spike is left anywhere."""

from __future__ import annotations

import pytest

from megatron.observe.events import Rollback
from megatron.training.initialize import Launch
from megatron.training.parity.ranks import compile_kernels
from tests.distpool import run_ranks
from tests.spikes import BATCH, Samples, different, run, state

DELAYED = {"bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 4}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True,
           "overlap_param_gather": True, "ddp_num_buckets": 3}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01, "moe_ffn_hidden_size": 32, "add_bias_linear": False,
}  # fmt: skip
LAYOUTS = {
    "tp2sp": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "micro_batch_size": 4,
        **DELAYED,
    },  # fmt: skip
    "dp2 all in fp8": {
        **SHARDED,
        **DELAYED,
        "grad_reduce_dtype": "fp8",
        "fp8_param_gather": True,
        "fp8_dot_product_attention": True,
    },
    "dp2 gradients in fp8": {**DELAYED, "grad_reduce_dtype": "fp8"},
    "pp2 sharded moments": {
        "pipeline_model_parallel_size": 2,
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp16",
    },  # fmt: skip
    "ep2 biases sharded fp32": {**EXPERTS, **SHARDED},
}
SPOILT = range(14 * BATCH, 15 * BATCH)


def both(rank, world_size, fields):
    """Train with spoilt samples and without them; return events and what differs."""
    launch = Launch(rank, world_size, rank, world_size)
    settings = {"num_layers": 2, "micro_batch_size": 2, "fp8_spike_rollback_interval": 2,
                "exit_interval": 18, **fields}  # fmt: skip
    spoilt, seen = run(Samples(SPOILT), launch, **settings)
    clean, quiet = run(Samples(without=[(SPOILT[0], SPOILT[-1] + 1)]), launch, **settings)
    return seen.kinds(Rollback), quiet.kinds(Rollback), different(state(spoilt), state(clean))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spoilt_batch_leaves_no_trace(layout):
    compile_kernels()
    found = run_ranks(both, 2, LAYOUTS[layout])
    for events, quiet, differences in found:
        assert [(one.iteration, one.back_to) for one in events] == [(15, 14)]
        assert quiet == []
        assert differences == []
    assert found[0][0] == found[1][0]
