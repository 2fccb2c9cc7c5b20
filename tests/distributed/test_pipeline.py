"""A pipeline of any shape trains the model that one process trains."""

from __future__ import annotations

import functools

import pytest
from parity import Outcome, run_layout, worst

PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
VPP2 = {"num_virtual_stages_per_pipeline_rank": 2}
ONE = {"micro_batch_size": 1}
UNTIED = {"untie_embeddings_and_output_weights": True}
ROPE = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FOUR = {"num_layers": 4}


@functools.cache
def alone(steps: int, **fields: object) -> Outcome:
    return run_layout(fields, 1, steps)[0]


# name -> (model, layout, ranks)
CASES = {
    "pp2": ({}, PP2, 2),
    "pp2-gpipe": ({}, PP2 | {"pipeline_schedule": "gpipe"}, 2),
    "pp2-one-microbatch": ({}, PP2 | {"micro_batch_size": 8}, 2),
    "pp2-untied": (UNTIED | ROPE, PP2, 2),
    "pp4": (FOUR, PP4 | ONE, 4),
    "pp2-tp2": ({}, PP2 | TP2, 4),
    "pp2-tp2-sp": (ROPE, PP2 | TP2 | SP, 4),
    "pp2-dp2": ({}, PP2 | ONE, 4),
    "pp2-dp2-pipeline-first": (FOUR, PP2 | ONE | {"use_tp_pp_dp_mapping": True}, 4),
    "pp2-vpp2": (FOUR, PP2 | VPP2, 2),
    "pp2-vpp2-untied": (FOUR | UNTIED, PP2 | VPP2 | ONE, 2),
    "pp4-vpp2": ({"num_layers": 8}, PP4 | VPP2 | ONE, 4),
    "pp2-recompute": (FOUR, PP2 | RECOMPUTE, 2),
    "pp2-vpp2-recompute-block": (
        FOUR,
        PP2 | VPP2 | RECOMPUTE | {"recompute_method": "block"},
        2,
    ),
    "pp2-uneven": (FOUR, PP2 | {"decoder_first_pipeline_num_layers": 1}, 2),
    "pp4-ends-without-layers": (
        {},
        PP4 | {"pipeline_model_parallel_layout": "E|t|t|L"},
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_fp32(name):
    model, layout, ranks = CASES[name]
    steps = 3
    expected = alone(steps, **model)
    outcomes = run_layout(model | layout, ranks, steps)
    for other in outcomes[1:]:
        assert other.losses == outcomes[0].losses
        assert other.grad_norms == outcomes[0].grad_norms
    outcome = outcomes[0]
    assert worst(outcome.initial, expected.initial)[0] == 0
    # Microbatches and ranks change the order of fp32 additions, nothing else.
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert worst(outcome.grads, expected.grads)[0] < 1e-5
    assert worst(outcome.final, expected.final)[0] < 1e-5
