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
