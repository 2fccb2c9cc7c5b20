"""Models with experts: updates, checkpoints and resuming at every layout."""

from __future__ import annotations

import pytest
import torch

from megatron.training.parity.ranks import compile_kernels
from tests.distpool import run_ranks
from tests.trained_parts import advance, build, content, make_checkpoint, pass_on, resume, weights

EXPERTS = {
    "num_experts": 4, "moe_ffn_hidden_size": 32, "swiglu": True, "ffn_hidden_size": 64,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "micro_batch_size": 1,
    "moe_aux_loss_coeff": [0.1], "moe_router_load_balancing_type": ["seq_aux_loss"],
    "make_vocab_size_divisible_by": 32, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
# Loads move a bias, one layer in two is dense, and every token passes one more expert.
MIXED = {
    **EXPERTS, "moe_layer_freq": "([0]*1+[1]*1)", "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1,
    "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True,
}  # fmt: skip
FP8 = {
    "bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 4,
    "fp8_amax_compute_algo": "max", "seq_length": 32, "max_position_embeddings": 32,
}  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2, EP4 = ({"expert_model_parallel_size": size} for size in (2, 4))
ETP1, ETP2 = ({"expert_tensor_parallel_size": size} for size in (1, 2))
A2A = {"moe_token_dispatcher_type": "alltoall"}
ZERO = {"use_distributed_optimizer": True, "ddp_bucket_size": 2000}
OVERLAP = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}
INSTANCES = {**ZERO, "num_distributed_optimizer_instances": 2}


def train(rank, world, steps=3, **fields):
    _, mesh, parts, step = run = build(rank, world, log_num_zeros_in_grad=True, **fields)
    return advance(run[0], parts, step, 1, steps), weights(mesh, parts)


def test_clipped_updates_are_those_of_one_process():
    ((steps, expected),) = run_ranks(train, 1, **EXPERTS)
    for world, layout in (
        (4, {**EP2, **INSTANCES}),
        (4, {**EP2, **OVERLAP, **A2A}),
        (4, {**TP2, **EP4, **ETP1, **OVERLAP}),
        (4, {**PP2, **EP2, **ZERO}),
    ):
        for done, found in run_ranks(train, world, detail=False, **EXPERTS, **layout):
            for own, other in zip(done, steps, strict=True):
                assert own[:2] == pytest.approx(other[:2], rel=1e-5), layout
                assert own[3] == other[3]
            # Adam divides by the gradient's own size, and magnifies what is added up otherwise.
            assert found.keys() == expected.keys()
            assert max(abs(found[n] - expected[n]).max() for n in found) < 1e-4, layout


def test_overlap_changes_nothing():
    plain = run_ranks(train, 4, detail=False, **EXPERTS, **EP2, **ZERO)
    overlapped = run_ranks(train, 4, detail=False, **EXPERTS, **EP2, **OVERLAP)
    for (one, own), (two, other) in zip(plain, overlapped, strict=True):
        assert one == two
        assert all((own[n] == other[n]).all() for n in own)


@pytest.mark.parametrize("model", [EXPERTS, MIXED], ids=["alike", "mixed"])
def test_state_passes_through_every_layout_unchanged(tmp_path, model):
    compile_kernels()
    settings = {**model, **FP8}
    layouts = [
        (4, {**TP2, **EP2, **ETP1, **ZERO}),
        (1, {}),
        (4, {**EP4, **ZERO}),
        (4, {**TP2, **EP2}),
        (2, ETP2),
        (4, {**PP2, **EP2, **ZERO}),
        (4, {**EP2, **INSTANCES}),
    ]
    world, first = layouts[0]
    run_ranks(make_checkpoint, world, tmp_path / "0", detail=False, **settings, **first)
    expected = content(tmp_path / "0")
    named = set(expected)
    layer = "decoder.layers.1" if model is MIXED else "decoder.layers"
    weight = f"{layer}.mlp.experts.experts.linear_fc1.weight"
    shape = (4, 64, 32) if model is MIXED else (2, 4, 64, 32)
    for key in (weight, f"optimizer.state.param.{weight}", f"optimizer.state.exp_avg_sq.{weight}"):
        assert expected[key].shape == shape
    assert (f"{layer}.mlp.router.expert_bias" in named) == (model is MIXED)
    group = "fp8_state.experts.decoder.layers.1.mlp.experts.linear_fc1.scale_fwd"
    assert expected[group].shape[0] == 4
    assert all(t.any() for t in expected.values())
    for number, (ranks, fields) in enumerate(layouts[1:]):
        source, target = tmp_path / str(number), tmp_path / str(number + 1)
        run_ranks(pass_on, ranks, source, target, detail=False, **settings, **fields)
        found = content(target)
        assert found.keys() == named
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (key, ranks, fields)


@pytest.mark.parametrize(
    ("world", "fields"),
    [(2, {**MIXED, **FP8, **EP2, **OVERLAP, **A2A}), (4, {**EXPERTS, **EP2, **INSTANCES})],
    ids=["fp8-ep2", "ep2-instances"],
)
def test_resuming_is_bitwise(tmp_path, world, fields):
    if "fp8_format" in fields:
        compile_kernels()
    assert run_ranks(resume, world, tmp_path, detail=False, **fields) == [(True, True)] * world
