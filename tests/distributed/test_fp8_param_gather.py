"""Weights that rest in FP8 change no loss and no update, at any layout, through every change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.comm_log import CommLog
from megatron.core.distributed.fp8_params import Fp8Bucket
from megatron.core.errors import PrecisionError
from megatron.training.communication import table
from megatron.training.dry_run.footprint import footprint
from megatron.training.parity.ranks import compile_kernels
from megatron.training.step import evaluate, parameters_are_finite
from tests.distpool import RankError, run_ranks
from tests.parity import SyntheticSource
from tests.trained_parts import advance, build, content, fetch, resume, store, weights

ZERO = {"use_distributed_optimizer": True, "clip_grad": 0.0}
GATHER = {"fp8_param_gather": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BUCKETS = {"ddp_bucket_size": 2000}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 64,
}  # fmt: skip
BASE = {"bf16": True, "fp8_format": "e4m3", "micro_batch_size": 1, **ZERO}
DELAYED = {"fp8_recipe": "delayed", "fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max"}
RECIPES = {
    "delayed": DELAYED,
    "tensorwise": {"fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_recipe": "mxfp8"},
}


def resting(parts):
    return [n for n, p in parts.model.named_parameters() if p in in_fp8(parts)]


def in_fp8(parts):
    return {p for p in parts.model.parameters() if parts.ddp.is_in_fp8(p) and p.fp8_weight.rests}


def train(rank, world, steps=4, change=None, **fields):
    """Outcomes, global weights, FP8 state, and which weights rest in FP8 at the end."""
    cfg, mesh, parts, step = build(rank, world, **fields)
    done = []
    for iteration in range(1, steps + 1):
        if change is not None:
            change(parts, iteration)
        done += advance(cfg, parts, step, iteration, 1)
    return done, weights(mesh, parts), scales(parts), resting(parts)


def scales(parts):
    books = [book.state_dict() for book in parts.fp8.books]
    return {f"{p}.{k}": t.tolist() for book in books for p, e in book.items() for k, t in e.items()}


def run(world, **fields):
    compile_kernels()
    return run_ranks(train, world, detail=False, **fields)


def assert_equal(ours, plain):
    """Bit by bit, but for gradient norms: ranks that own other ranges add other partial sums."""
    for one, other in zip(ours, plain, strict=True):
        assert [(s[0], s[3]) for s in one[0]] == [(s[0], s[3]) for s in other[0]]
        norms = [[s[1] for s in run[0] if s[3]] for run in (one, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert all((one[1][n] == other[1][n]).all() for n in other[1])
        assert one[2] == other[2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_replicas_are_bitwise_what_they_are_without(recipe):
    """Two addends have one order, so losses, weights and scales are the same bits."""
    fields = {**BASE, **RECIPES[recipe]}
    plain = run(2, **fields)
    for extra in ({}, {**BUCKETS, **OVERLAP}):
        ours = run(2, **fields, **extra, **GATHER)
        assert_equal(ours, plain)
        assert all(len(one[3]) == 8 for one in ours)


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (4, {**TP2, **DELAYED, "add_bias_linear": True}),
        (4, {**TP2, **RECIPES["tensorwise"], "tp_comm_overlap": True}),
        (4, {**EXPERTS, **DELAYED}),
        (4, {**EXPERTS, **RECIPES["blockwise"]}),
        (2, {"context_parallel_size": 2, **DELAYED, "fp8_amax_reduction": "tp"}),
        (4, {"pipeline_model_parallel_size": 2, **RECIPES["blockwise"]}),
        (2, {**DELAYED, "recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 1}),
        (2, {"num_distributed_optimizer_instances": 2, **RECIPES["tensorwise"]}),
        (2, {"fp16": True, "bf16": False, **DELAYED, "initial_loss_scale": 2.0**22,
             "hysteresis": 1, "steps": 8}),
    ],
    ids=["tp2-dp2", "tp2-dp2-overlap", "ep2-dp2", "ep2-dp2-blocks", "cp2", "pp2-dp2", "recompute",
         "instances", "fp16"],
)  # fmt: skip
def test_layouts(world, fields):
    fields = {**BASE, **fields}
    assert_equal(run(world, **fields, **OVERLAP, **GATHER), run(world, **fields))


def test_four_replicas_gather_codes_or_values():
    """Codes that owners make of parts are those that every rank makes of the whole.

    More than two addends are added up in an order that depends on the buckets, so both runs have
    the same buckets here.
    """
    for recipe in ("delayed", "tensorwise", "blockwise"):
        fields = {**BASE, **RECIPES[recipe], "hidden_size": 96, "steps": 3, **GATHER}
        assert_equal(run(4, **fields), run(4, **fields, change=gather_values))


def gather_values(parts, iteration):
    Fp8Bucket.as_codes = property(lambda self: self.params is None)


@pytest.fixture(autouse=True)
def _restored():
    """The pool's ranks are forked once: undo what a test did there."""
    yield
    run_ranks(_restore, 4, detail=False)


AS_CODES = Fp8Bucket.as_codes


def _restore(rank, world):
    Fp8Bucket.as_codes = AS_CODES


# -- layers that change their precision -----------------------------------------------------------


def suspend(parts, iteration):
    """One layer leaves FP8 for two steps."""
    layer = parts.fp8.layers["decoder.layers.1.mlp.linear_fc1"]
    layer.suspended = "a test" if iteration in (2, 3) else ""


def warm_up(parts, iteration):
    """High precision in the first two steps."""
    parts.fp8.enabled = iteration > 2


def evaluated(rank, world, change, **fields):
    """Loss of an evaluation right after a change, without a step in between."""
    cfg, mesh, parts, step = build(rank, world, eval_iters=1, **fields)
    advance(cfg, parts, step, 1, 1)
    change(parts, 2)
    loss = evaluate(cfg, step_runtime(step), parts, SyntheticSource(cfg, mesh.dp.size), 0)
    return loss, parameters_are_finite(parts, mesh.world), len(in_fp8(parts))


def step_runtime(step):
    return SimpleNamespace(mesh=step._mesh, device=step._device)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_layer_that_leaves_fp8_has_its_own_numbers(recipe):
    fields = {**BASE, **RECIPES[recipe], "num_layers": 3}
    for change in (suspend, warm_up):
        plain = run(2, **fields, change=change)
        ours = run(2, **fields, change=change, **BUCKETS, **OVERLAP, **GATHER)
        assert_equal(ours, plain)
    (loss, finite, resting_now), _ = run_ranks(evaluated, 2, suspend, **fields, **GATHER)
    assert finite
    assert resting_now == 11
    assert loss == run_ranks(evaluated, 2, suspend, **fields)[0][0]


def test_layers_kept_in_high_precision_stay_ordinary():
    fields = {**BASE, **DELAYED, "num_layers": 3, "first_last_layers_bf16": True}
    ours = run(2, **fields, **GATHER)
    assert_equal(ours, run(2, **fields))
    assert {name.split(".")[2] for name in ours[0][3]} == {"1"}


def unprepared(rank, world, change, **fields):
    cfg, mesh, parts, step = build(rank, world, **fields)
    parts.optimizer.refresh_model_params = lambda: None
    change(parts, 2)
    step.run(1, 0)


def new_scales(parts, iteration):
    parts.fp8.sync()


@pytest.mark.parametrize(("change", "words"), [(suspend, "high precision"), (new_scales, "scales")])
def test_a_weight_is_never_used_in_another_form(change, words):
    with pytest.raises((PrecisionError, RankError), match=words):
        run_ranks(unprepared, 2, change, **BASE, **DELAYED, **GATHER)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_resuming_is_bitwise(tmp_path, recipe):
    compile_kernels()
    fields = {**BASE, **RECIPES[recipe], **GATHER, **OVERLAP, **BUCKETS}
    assert run_ranks(resume, 2, tmp_path, detail=False, **fields) == [(True, True)] * 2


def saved(rank, world, root, **fields):
    cfg, mesh, parts, step = build(rank, world, save=str(root), **fields)
    advance(cfg, parts, step, 1, 2)
    store(cfg, mesh, parts)


def continued(rank, world, root, weights_only, **fields):
    extra = {"no_load_optim": True} if weights_only else {}
    cfg, mesh, parts, step = build(rank, world, load=str(root), **extra, **fields)
    fetch(cfg, mesh, parts)
    return advance(cfg, parts, step, 3, 2), weights(mesh, parts)


def test_a_checkpoint_is_the_same_with_and_without(tmp_path):
    """So either loads the other's, with the optimizer or the weights alone; experts included."""
    fields = {**BASE, **DELAYED, **EXPERTS}
    for world, extra in ((2, {}), (4, {**TP2, "expert_tensor_parallel_size": 1})):
        one, two = tmp_path / f"plain{len(extra)}", tmp_path / f"fp8{len(extra)}"
        run_ranks(saved, world, one, detail=False, **fields, **extra)
        run_ranks(saved, world, two, detail=False, **fields, **extra, **GATHER)
        ours, plain = content(two), content(one)
        assert ours.keys() == plain.keys()
        for key, tensor in plain.items():
            assert torch.equal(ours[key], tensor), key
        assert ours["decoder.layers.self_attention.linear_qkv.weight"].dtype == torch.bfloat16
    for weights_only in (False, True):
        runs = [
            run_ranks(continued, 2, root, weights_only, detail=False, **{**fields, **extra})
            for root, extra in ((one, GATHER), (two, {}), (one, {}))
        ]
        for other in runs[1:]:
            for rank in range(2):
                losses = [[s[0] for s in one[rank][0]] for one in (other, runs[0])]
                assert losses[0] == losses[1]
                assert all((other[rank][1][n] == w).all() for n, w in runs[0][rank][1].items())


# -- bytes ----------------------------------------------------------------------------------------


def measured(rank, world, **fields):
    """(bytes gathered and reduced for parameters in a step, bytes of weights, of gradients)."""
    cfg, mesh, parts, step = build(rank, world, **fields)
    log = CommLog()
    for buffer in parts.ddp.buffers_by_axis:
        object.__setattr__(buffer.axis, "log", log)
    step.run(1, 0)
    rows = [row for row in table(log.counts) if row.part == "parameter gather"]
    amax = sum(row.sent_bytes for row in table(log.counts) if row.part == "amax")
    numbers = sum(p.numel() for p in parts.model.parameters() if parts.ddp.is_in_fp8(p))
    return sum(row.payload_bytes for row in rows), amax, footprint(parts).weights, numbers


def test_half_the_bytes_travel_and_rest():
    shape = {**BASE, "micro_batch_size": 1, "hidden_size": 64, "ffn_hidden_size": 256}
    for recipe in ("tensorwise", "blockwise"):
        fields = {**shape, **RECIPES[recipe], "fp8_amax_reduction": "tp"}
        plain = run_ranks(measured, 2, detail=False, **fields)[0]
        gathered, amax, resting_bytes, numbers = run_ranks(
            measured, 2, detail=False, **fields, **GATHER
        )[0]
        assert numbers == 2 * (4 + 8) * 64 * 64
        # Of these weights a byte less each, up to the padding of one more buffer; scales on top.
        assert plain[0] - gathered == pytest.approx(numbers, rel=0.01)
        assert plain[2] - resting_bytes == pytest.approx(numbers, rel=0.01)
        assert amax <= 4 * 2 * (4 + 8)  # 2 (n - 1) / n of four bytes for each block of 128 x 128
