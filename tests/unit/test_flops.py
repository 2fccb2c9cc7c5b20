"""FLOPs of an iteration: published figures, and a count of the GEMMs that really run."""

from __future__ import annotations

import pytest

from megatron.config import make_config
from megatron.observe.lines import precision_table
from megatron.training.flops import Shape, flops_per_sequence, terms_per_token
from megatron.training.precision import flop_shares, summarize
from tests.small_models import LLAMA, build_model, small_config

LLAMA3_8B = Shape(8192, 32, 4096, 4096, 1024, 128256, 14336, gated=True)
GPT3_175B = Shape(2048, 96, 12288, 12288, 12288, 51200, 4 * 12288)
MIXTRAL = Shape(
    4096, 32, 4096, 4096, 1024, 32000, 14336, gated=True, num_moe_layers=32,
    moe_ffn_hidden_size=14336, moe_topk=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        (LLAMA3_8B, 128, 5.397062776101274e16),
        (GPT3_175B, 1536, 3.3405978001601987e18),
        (MIXTRAL, 256, 8.357827687376486e16),
    ],
)
def test_known_models(shape, batch, expected):
    assert batch * flops_per_sequence(shape) == pytest.approx(expected, rel=1e-12)


def test_terms_of_a_model_small_enough_to_do_by_hand():
    terms = terms_per_token(Shape(8, 2, 4, 4, 2, 16, 6, gated=True))
    assert terms["mlp"] == 3 * 2 * (2 * 3 * 4 * 6)
    assert terms["attention_projections"] == 3 * 2 * (2 * (4 * 8 + 4 * 4))
    # Full square would be 2 GEMMs x 2 FLOPs x 8 keys x 4 channels; a causal mask halves it.
    assert terms["attention_core"] == 3 * 2 * (2 * 2 * 8 * 4) / 2
    assert terms["logits"] == 3 * 2 * 4 * 16


def test_a_token_passes_its_experts_and_the_shared_one():
    fields = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
        "vocab_size": 128, "swiglu": True, "add_bias_linear": False, "num_experts": 16,
        "moe_layer_freq": "[0]+[1]*3", "moe_ffn_hidden_size": 24, "moe_router_topk": 5,
        "moe_shared_expert_intermediate_size": 40, "ffn_hidden_size": 96,
    }  # fmt: skip
    terms = terms_per_token(Shape.of(make_config(**fields)))
    assert terms["mlp"] == 6 * 3 * 64 * 96
    assert terms["experts"] == 6 * 3 * 64 * 3 * (5 * 24 + 40)


MOE = {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_ffn_hidden_size": 48,
       "moe_layer_freq": "2", "moe_shared_expert_intermediate_size": 40}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "attention"),
    [({}, 0.0), ({"fp8_dot_product_attention": True}, 2 / 4),
     ({"fp8_dot_product_attention": True, "fp8_dpa_bwd": False}, 2 / 4 / 3), (MOE, 0.0)],
    ids=["dense", "attention", "attention forward", "experts"],
)  # fmt: skip
def test_shares_in_fp8_are_those_of_the_layers_that_run_in_it(fields, attention):
    """Two of four layers; every matrix of the model is in the table once, at its size."""
    cfg = small_config(
        **{**LLAMA, **fields, "num_layers": 4}, bf16=True, fp8_format="hybrid",
        first_last_layers_bf16=True,
    )  # fmt: skip
    rows = build_model(cfg)[0].named_precision_rows()
    terms = terms_per_token(Shape.of(cfg))
    dense = terms["mlp"] * (1 / 2 if "num_experts" in fields else 2 / 4)
    linear = dense + (terms["attention_projections"] + terms["experts"]) * 2 / 4
    core = terms["attention_core"]
    every = sum(terms.values())
    shares = ((linear / (every - core)), (linear + core * attention) / every)
    assert flop_shares(rows, cfg) == pytest.approx(shares, rel=1e-12)
    no_attention = [row for row in rows if not row.path.endswith("core_attention")]
    assert flop_shares(no_attention, cfg) == pytest.approx(shares[:1], rel=1e-12)
    table = summarize(rows, cfg=cfg)
    words = f"  FLOPs of a step in FP8: {shares[0]:.1%} of the linear layers', {shares[1]:.1%} with"
    assert precision_table(table.lines, shares=table.shares).splitlines()[1].startswith(words)
    assert "FLOPs" not in precision_table(table.lines)
