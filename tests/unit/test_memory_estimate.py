"""The memory estimate follows the layout."""

from __future__ import annotations

import pytest

from megatron.config import make_config
from megatron.training.memory import matrix_parameters, theoretical_bytes

MODEL = {
    "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
    "vocab_size": 128, "micro_batch_size": 1, "global_batch_size": 16, "bf16": True,
}  # fmt: skip


def estimate(world_size=1, **fields):
    cfg = make_config(world_size, **{**MODEL, **fields})
    return cfg, theoretical_bytes(cfg)


def test_a_stage_holds_its_share_of_the_layers_and_the_embedding():
    whole, (weights, activations) = estimate()
    assert weights == 18 * sum(matrix_parameters(whole))
    cfg, (split, kept) = estimate(4, pipeline_model_parallel_size=4)
    table = cfg.padded_vocab_size * cfg.hidden_size
    assert split == 18 * ((sum(matrix_parameters(cfg)) - table) / 4 + table)
    # Four microbatches of a quarter of the layers: about what one rank keeps of all layers.
    assert kept == pytest.approx(activations, rel=0.2)


def test_schedules_keep_different_numbers_of_microbatches():
    pp4 = {"pipeline_model_parallel_size": 4}
    _, (_, one) = estimate(4, **pp4)
    _, (_, all_of_them) = estimate(4, **pp4, pipeline_schedule="gpipe")
    _, (_, interleaved) = estimate(4, **pp4, num_virtual_stages_per_pipeline_rank=2)
    assert all_of_them == 4 * one  # 16 microbatches instead of 4
    assert interleaved == pytest.approx(one * (1 + 3 / 8))


def test_what_rests_and_what_is_kept_in_fp8():
    plain, (weights, _) = estimate(4, use_distributed_optimizer=True)
    fp8 = {"use_distributed_optimizer": True, "fp8_format": "hybrid", "fp8_param_gather": True}
    table = plain.padded_vocab_size * plain.hidden_size
    matrices = sum(matrix_parameters(plain)) - table
    _, (resting, _) = estimate(4, **fp8)
    assert weights - resting == matrices
    _, (edges, _) = estimate(4, **fp8, first_last_layers_bf16=True)
    assert weights - edges == matrices * 6 / 8
    assert estimate(4, **fp8, fp8_recipe="mxfp8")[1][0] == weights
    _, (whole, _) = estimate(4)
    _, (kept, _) = estimate(4, grad_reduce_dtype="fp8")
    assert kept - whole == 4 * sum(matrix_parameters(plain))
    forgets = {"grad_reduce_dtype": "fp8", "grad_reduce_error_feedback": False}
    assert estimate(4, **forgets)[1][0] == whole
    assert estimate(1, grad_reduce_dtype="fp8")[1][0] == whole
    zero = {"use_distributed_optimizer": True, "grad_reduce_dtype": "fp8"}
    assert estimate(4, **zero)[1][0] == weights


def test_experts_are_spread_over_their_ranks():
    experts = {
        "num_experts": 8, "moe_ffn_hidden_size": 32, "swiglu": True, "add_bias_linear": False,
    }  # fmt: skip
    whole, (weights, kept) = estimate(**experts)
    of_experts = 8 * 8 * 3 * 64 * 32
    assert weights == 18 * sum(matrix_parameters(whole))
    _, (spread, _) = estimate(4, **experts, expert_model_parallel_size=4)
    assert spread == weights - 18 * of_experts * 3 / 4
    _, (both, _) = estimate(
        8, **experts, expert_model_parallel_size=4, use_distributed_optimizer=True
    )
    dense = sum(matrix_parameters(whole)) - of_experts
    assert both == (6 + 12 / 8) * dense + (6 + 12 / 2) * of_experts / 4
    _, (_, more) = estimate(**experts, moe_router_topk=4)
    assert more > kept
