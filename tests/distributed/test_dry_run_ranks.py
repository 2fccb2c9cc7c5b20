"""A dry run's bytes are those of real ranks: exactly what they keep, about what a step needs."""

from __future__ import annotations

import pytest
from distpool import run_ranks
from parity import BASE, SyntheticSource
from saved_activations import SavedActivations

from megatron.config import make_config
from megatron.training.dry_run.footprint import Footprint, footprint, optimizer_bytes
from megatron.training.dry_run.ranks import World
from megatron.training.dry_run.trace import build_rank
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4}
ADAM, BF16 = {"optimizer": "adam"}, {"bf16": True, "optimizer": "adam"}
ZERO = {**BF16, "use_distributed_optimizer": True}
COMPACT = {
    **ZERO, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp16",
}  # fmt: skip
LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "ffn_hidden_size": 48,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_layer_freq": "[0,1]",
    "expert_model_parallel_size": 2,
}  # fmt: skip
LAYOUTS = {
    "dp2 fp32": (2, ADAM),
    "dp2 zero": (2, ZERO),
    "dp2 zero fp32": (2, {**ADAM, "use_distributed_optimizer": True, "ddp_num_buckets": 4}),
    "dp2 compact": (2, {**COMPACT, **LLAMA}),
    "cp2 sgd": (2, {"context_parallel_size": 2, "sgd_momentum": 0.9}),
    "tp2 fp8": (2, {**TP2, **BF16, "fp8_format": "hybrid", "seq_length": 32,
                    "max_position_embeddings": 32}),
    "pp2 tied": (2, {**PP2, **BF16}),
    "pp2 vpp2 untied": (2, {**PP2, **ZERO, **LLAMA, "num_virtual_stages_per_pipeline_rank": 2}),
    "tp2 pp2": (4, {**TP2, **PP2, **BF16}),
    "dp4 zero": (4, {**ZERO, **LLAMA, "ddp_bucket_size": 5000}),
    "dp2 pp2 zero tied": (4, {**PP2, **COMPACT}),
    "dp2 fp8 moments": (2, {**COMPACT, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8",
                            "ddp_bucket_size": 3000}),
    "ep2 dp2 zero": (4, {**ZERO, **EXPERTS, "swiglu": True}),
    "ep2 etp2": (4, {**TP2, **BF16, **EXPERTS, "expert_tensor_parallel_size": 2}),
    "dp2 fp8 weights": (2, {**ZERO, "fp8_format": "hybrid", "fp8_param_gather": True,
                            "fp8_recipe": "blockwise"}),
    "ep2 fp8 weights": (4, {**ZERO, **EXPERTS, "fp8_format": "hybrid", "fp8_param_gather": True,
                            "fp8_recipe": "mxfp8", "grad_reduce_dtype": "fp8"}),
    "dp2 fp8 gradients": (2, {**BF16, "grad_reduce_dtype": "fp8"}),
    "two instances": (4, {**ZERO, "num_distributed_optimizer_instances": 2}),
}  # fmt: skip


def config(name):
    world_size, fields = LAYOUTS[name]
    return make_config(world_size, **{**BASE, "train_iters": 1, **fields})


def real_footprints(rank, world_size, names):
    """What a real rank keeps, for each layout; and where it is among those that share it."""
    found = {}
    for name in names:
        cfg = config(name)
        runtime = start(cfg, Launch(rank, world_size, rank, world_size))
        parts = setup_model(cfg, runtime)
        places = [buffer.axis.rank for buffer in parts.ddp.buffers_by_axis]
        found[name] = (footprint(parts), places, runtime.mesh.pp.rank)
    return found


@pytest.fixture(scope="module")
def real():
    found = {}
    for size in (2, 4):
        names = [name for name, (world_size, _) in LAYOUTS.items() if world_size == size]
        ranks = run_ranks(real_footprints, size, names, detail=False)
        found.update({name: [rank[name] for rank in ranks] for name in names})
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_rank_keeps_to_the_byte(real, name):
    cfg = config(name)
    world = World(cfg)
    for rank, (kept, places, stage) in enumerate(real[name]):
        assert footprint(build_rank(cfg, rank).parts) == kept
        # The same from one rank of each stage, for whatever this rank owns of the optimizer.
        owned = optimizer_bytes(world.stages[stage].parts, cfg)
        shared = cfg.use_distributed_optimizer
        total = sum(own[place if shared else 0] for own, place in zip(owned, places, strict=True))
        assert total == kept.optimizer


@pytest.mark.parametrize("name", ["dp4 zero", "dp2 pp2 zero tied", "ep2 dp2 zero"])
def test_classes_name_the_largest_and_the_smallest(real, name):
    for one in World(config(name)).classes():
        kept = [k for k, _, stage in real[name] if stage in one.pipeline_ranks]
        assert one.kept.optimizer == max(k.optimizer for k in kept)
        assert one.least_optimizer == min(k.optimizer for k in kept)
        assert {k.weights for k in kept} == {one.kept.weights}


def test_figures_that_can_be_worked_out_by_hand(real):
    kept = [k for k, _, _ in real["dp2 fp32"]]
    count = sum(p.numel() for p in World(config("dp2 fp32")).stages[0].parts.model.parameters())
    steps = 4 * len(list(World(config("dp2 fp32")).stages[0].parts.model.parameters()))
    assert kept == [Footprint(4 * count, 4 * count, 8 * count + steps, 0)] * 2


PIPELINE = {
    "num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128,
    "max_position_embeddings": 128, "micro_batch_size": 2, "global_batch_size": 16,
}  # fmt: skip
SCHEDULES = {
    "1f1b": {"pipeline_model_parallel_size": 2},
    "interleaved": {
        "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
    },
    "zero bubble": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
}  # fmt: skip


def pipeline_config(name):
    fields = {**BASE, **PIPELINE, **BF16, **SCHEDULES[name], "train_iters": 1}
    return make_config(2, **fields)


def real_activations(rank, world_size):
    found = {}
    for name in SCHEDULES:
        cfg = pipeline_config(name)
        runtime = start(cfg, Launch(rank, world_size, rank, world_size))
        parts = setup_model(cfg, runtime)
        step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, runtime.mesh.dp.size))
        saved = SavedActivations(parts.model.parameters())
        with saved.measured():
            step.run(1, 0)
        found[name] = saved.peak_bytes
    return found


def test_activations_of_passes_that_are_kept_at_the_same_time():
    ranks = run_ranks(real_activations, 2, detail=False)
    for name in SCHEDULES:
        world = World(pipeline_config(name))
        for rank, found in enumerate(ranks):
            stage = rank % len(world.stages)
            peak = world.trace(stage).peak(world.schedule[stage])
            if name == "zero bubble":
                # What weight gradients that are put off multiply is kept, but not by autograd.
                assert peak.activations >= found[name]
                continue
            # On paper a tensor on its way to or from another stage counts too, and the batch, and
            # attention's one number a row and head.
            assert 0.995 < peak.activations / found[name] < 1.04, (name, rank)
