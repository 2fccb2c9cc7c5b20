"""Gradients that travel in FP8: nothing is lost for good, no layout breaks, errors still show."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatron.core.comm_log import GRADIENT_SYNC, PARAMETER_GATHER, CommLog
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.distributed import DistributedDataParallel
from megatron.core.mesh import Axis
from megatron.training.communication import table
from megatron.training.parity.ranks import compile_kernels
from megatron.training.residual_entries import PREFIX
from tests.distpool import run_ranks
from tests.trained_parts import advance, build, fetch, store, weights

FP8 = {"grad_reduce_dtype": "fp8"}
ZERO = {"use_distributed_optimizer": True}
BUCKETS = {"ddp_bucket_size": 2000}
REDUCE = {"overlap_grad_reduce": True}
OVERLAP = {**REDUCE, "overlap_param_gather": True}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
INSTANCES = {**ZERO, "num_distributed_optimizer_instances": 2}
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 64,
}  # fmt: skip
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 2}


# -- sums over many steps -------------------------------------------------------------------------


def pair_of_axes(world, rank, groups):
    """(inner, outer) over all ranks, which the pool's default group joins."""
    whole = Axis("dp", world, rank, tuple(range(world)), torch.distributed.group.WORLD)
    alone = Axis.single("outer")
    return (whole, alone) if groups == 1 else (Axis.single("dp"), whole)


def sums(rank, world, steps, feedback, sharded, groups, scales):
    """Return (accumulated sums that arrived, that were sent, what is kept, one quantum).

    All of this rank's own elements. A rank keeps half of what E4M3 can tell apart: 2^-4 of an
    element, or 2^-10 of the power of two that takes the largest of the block to 224 .. 448. Bf16
    takes away less from the sums on their way back. The quantum is twice that, of all ranks.

    The gradient is the same in every step, so whatever is lost is lost every time: one large
    element in a block, and small ones below half of what E4M3 can tell apart beside it.
    """
    inner, outer = pair_of_axes(world, rank, groups)
    module = nn.Linear(64, 16, bias=False)
    ddp = DistributedDataParallel(
        module, inner, outer_axis=outer, reduce_dtype=torch.float8_e4m3fn,
        error_feedback=feedback, sharded=sharded,
    )  # fmt: skip
    weight, drawn = module.weight, torch.Generator().manual_seed(rank)
    gradient = torch.rand(weight.shape, generator=drawn) * 2.0**-19
    gradient[::3] += 0.01 * torch.randn(weight[::3].shape, generator=drawn)
    gradient[:, ::16] += 1.0
    own = ddp.owned_range(weight)
    arrived = torch.zeros(own.size, dtype=torch.float64)
    for step in range(steps):
        scale = scales[step % len(scales)]
        ddp.zero_grad_buffer(scale)
        weight.main_grad.add_(gradient * scale)
        ddp.finish_grad_sync()
        arrived += ddp.summed_grad(weight).double() / scale
    floor = 2.0**-9 * gradient.max() / 224
    both = torch.stack([gradient, 2.0**-3 * gradient.abs() + floor]).double().view(2, -1)
    torch.distributed.all_reduce(both)
    expected, quantum = both[:, own.start : own.stop]
    expected *= steps
    ddp.add_up_residuals()
    kept, (mine, _) = ddp.residuals().get(weight), ddp.residual_owner(weight)
    if kept is not None:
        kept = kept[mine.start : mine.stop].double() / scale  # what is kept is of scaled gradients
    here = slice(mine.start - own.start, mine.stop - own.start)
    return arrived[here], expected[here], kept, quantum[here]


@pytest.mark.parametrize(
    ("sharded", "groups"), [(True, 1), (False, 1), (True, 2)], ids=["owned", "whole", "outer"]
)
def test_what_arrives_over_many_steps_is_what_was_sent(sharded, groups):
    world, steps = 4, 60
    for scales in ((1.0,), (4.0, 1.0, 0.5)):
        results = run_ranks(sums, world, steps, True, sharded, groups, scales, detail=False)
        for arrived, expected, kept, quantum in results:
            assert ((arrived - expected).abs() <= quantum).all()
            # And what is missing is what they keep, but for the rounding of fp32 sums: magnitudes
            # are below 2 on a rank and below 8 together, so at most 4 * 2^-24 + 3 * 2^-22 a step.
            missing = expected - arrived
            assert (missing - kept).abs().max() < steps * 2.0**-20


def test_without_feedback_small_gradients_never_arrive():
    world, steps = 4, 60
    results = run_ranks(sums, world, steps, False, True, 1, (1.0,), detail=False)
    lost = []
    for arrived, expected, kept, quantum in results:
        assert kept is None
        lost.append(((arrived - expected).abs() > 5 * quantum).float().mean())
    assert min(lost) > 0.2


# -- runs -----------------------------------------------------------------------------------------


def train(rank, world, steps=3, **fields):
    cfg, mesh, parts, step = build(rank, world, **fields)
    done = advance(cfg, parts, step, 1, steps)
    local = {n: p.detach().clone() for n, p in parts.model.named_parameters()}
    split = {n for n, p in parts.model.named_parameters()
             if getattr(p, "tensor_model_parallel", False)
             or not getattr(p, "allreduce", True)}  # fmt: skip
    copies = {n: local[n].numpy() for n in local.keys() - split}
    return done, weights(mesh, parts), copies, mesh.pp.rank


def run(world, **fields):
    results = run_ranks(train, world, detail=False, **fields)
    for done, whole, copies, stage in results:
        assert done == results[0][0]
        assert all((whole[n] == results[0][1][n]).all() for n in whole)
        # Also what tensor-parallel ranks hold copies of.
        for name, value in copies.items():
            other = next(r[2] for r in results if r[3] == stage)[name]
            assert (value == other).all(), name
    return results[0]


SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1, "min_lr": 0.1, "clip_grad": 0.0,
       "weight_decay": 0.0, "micro_batch_size": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (4, {}),
        (4, {**TP2, "add_bias_linear": True}),
        (4, {"context_parallel_size": 2}),
        (4, EXPERTS),
        (4, INSTANCES),
        (4, {**PP2, **ZERO}),
        (2, {**INSTANCES}),
    ],
    ids=["dp4", "tp2-dp2", "cp2-dp2", "ep2", "instances", "pp2-dp2", "instances-of-one"],
)
def test_layouts_learn_what_exact_sums_teach(world, fields):
    """Gradients are rounded to 2^-4 each; over three SGD steps losses differ far less."""
    exact = run(world, **SGD, **fields)
    variants = [{**fields, **ZERO, **BUCKETS, **OVERLAP}]
    if "num_distributed_optimizer_instances" not in fields:
        variants.append(fields)
    if fields in ({}, INSTANCES):
        variants.append({**fields, **ZERO, **BUCKETS})
    ours = [run(world, **SGD, **FP8, **extra) for extra in variants]
    if fields in ({}, INSTANCES):
        assert ours[0][0] == ours[-1][0]  # overlap changes nothing
    for one in ours:
        for (loss, norm, *_), (other, other_norm, *_) in zip(one[0], exact[0], strict=True):
            assert loss == pytest.approx(other, rel=2e-3)
            assert norm == pytest.approx(other_norm, rel=2e-2)
        assert one[0][0][0] == exact[0][0][0]
        assert one[0][0][1] != exact[0][0][1]


def test_microbatches_and_a_single_replica():
    """One replica sends nothing, so nothing changes there."""
    single = run(1, **SGD)
    assert run(1, **SGD, **FP8, **ZERO)[0] == single[0]


# -- gradients that are no numbers ----------------------------------------------------------------


def poisoned(rank, world, bad, feedback, **fields):
    """Losses and success of steps of which the second has a bad gradient on the last rank."""
    cfg, mesh, parts, step = build(
        rank, world, **fields, **FP8, grad_reduce_error_feedback=feedback
    )
    weight = parts.model.decoder.layers[0].mlp.linear_fc1.weight
    finish, outcomes = parts.ddp.finish_grad_sync, []

    def with_poison():
        if len(outcomes) == 1 and rank == world - 1:
            weight.main_grad.view(-1)[:: weight.numel() // 7] = bad
        finish()

    parts.ddp.finish_grad_sync = with_poison
    for iteration in range(1, 5):
        outcomes += advance(cfg, parts, step, iteration, 1)
    return outcomes


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bad_gradient_skips_the_step_and_leaves_nothing_behind(bad):
    for fields in (ZERO, {}):
        outcomes, *others = run_ranks(poisoned, 2, bad, True, detail=False, **fields)
        assert others == [outcomes]
        assert [taken for *_, taken in outcomes] == [True, False, True, True]
        assert all(math.isfinite(loss) for loss, *_ in outcomes)


def test_overflows_of_a_dynamic_loss_scale():
    fields = {**FP8, **ZERO, "fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1,
              "loss_scale_window": 2, "steps": 8}  # fmt: skip
    done = run(2, **fields)[0]
    taken = [s[3] for s in done]
    assert taken[-1]
    assert not taken[0]
    plain = run(2, **{**fields, "grad_reduce_dtype": "fp32"})[0]
    assert [s[3] for s in plain] == taken
    assert done[-1][0] == pytest.approx(plain[-1][0], rel=2e-2)


# -- checkpoints ----------------------------------------------------------------------------------


def resume(rank, world, root, **fields):
    """Four steps, and the last two from a checkpoint; with sums, saving is part of the run."""
    cfg, mesh, parts, step = build(rank, world, save=str(root), load=str(root), **fields)
    first = advance(cfg, parts, step, 1, 2)
    store(cfg, mesh, parts)
    straight = advance(cfg, parts, step, 3, 2), weights(mesh, parts)
    if cfg.ckpt_grad_residual == "each":
        cfg, mesh, parts, step = build(rank, world, **fields)
        undisturbed = advance(cfg, parts, step, 1, 4), weights(mesh, parts)
        assert undisturbed[0] == first + straight[0]
        assert all((undisturbed[1][n] == w).all() for n, w in straight[1].items())
    cfg, mesh, parts, step = build(rank, world, save=str(root), load=str(root), **fields)
    fetch(cfg, mesh, parts)
    again = advance(cfg, parts, step, 3, 2), weights(mesh, parts)
    return again[0] == straight[0], all((again[1][n] == straight[1][n]).all() for n in again[1])


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (2, {**ZERO, **OVERLAP, **BUCKETS}),
        (2, {}),
        (2, {"ckpt_grad_residual": "sum"}),
        (4, {**TP2, **ZERO}),
        (4, {**TP2, **ZERO, "ckpt_grad_residual": "sum"}),
        (4, {**INSTANCES, "micro_batch_size": 1, "ckpt_grad_residual": "sum"}),
        (4, {**PP2, **ZERO, "ckpt_grad_residual": "sum"}),
        (2, {"fp16": True, "initial_loss_scale": 2.0**12, "loss_scale_window": 1, **ZERO}),
        (2, {"bf16": True, "fp8_format": "hybrid", "fp8_param_gather": True, **ZERO, **OVERLAP}),
    ],
    ids=["zero", "whole", "whole-sum", "tp2-dp2", "tp2-dp2-sum", "instances-sum", "pp2-dp2-sum",
         "fp16", "fp8-weights"],
)  # fmt: skip
def test_resuming_is_bitwise(tmp_path, world, fields):
    compile_kernels()
    found = run_ranks(resume, world, tmp_path, detail=False, **FP8, **fields)
    assert found == [(True, True)] * world


def pass_on(rank, world, source, target, first, **fields):
    """Load, or train two steps at first, and save."""
    paths = {"save": str(target)} if first else {"load": str(source), "save": str(target)}
    cfg, mesh, parts, step = build(rank, world, **paths, **FP8, **fields)
    if first:
        advance(cfg, parts, step, 1, 2)
    else:
        fetch(cfg, mesh, parts)
    store(cfg, mesh, parts)


def stored_in(root):
    """(Who keeps it, key of its parameter) -> what is kept."""
    reader = Reader(root / "iter_0000002")
    keys = [k for k in reader.tensors if k.startswith(PREFIX) and not k.endswith("loss_scale")]
    split = (key.removeprefix(PREFIX).partition(".")[::2] for key in keys)
    return {names: reader.read(key) for key, names in zip(keys, split, strict=True)}


def kept_in(root):
    """What is kept of each parameter, by its key: added up in fp64."""
    total = {}
    for (_, own), tensor in stored_in(root).items():
        total[own] = total.get(own, 0) + tensor.double()
    return total


@pytest.mark.parametrize("kept", ["each", "sum"])
def test_any_layout_goes_on_with_what_was_kept(tmp_path, kept):
    """The sum over all that keep something of an element stays the same, whoever keeps it."""
    layouts = [
        (4, {**TP2, **ZERO, **BUCKETS}),
        (2, ZERO),
        (4, {**INSTANCES, "micro_batch_size": 1}),
        (2, {}),
        (4, {**PP2, **ZERO}),
        (4, TP2),
        (1, {}),
        (2, {"tensor_model_parallel_size": 2}),
    ]
    layouts = layouts if kept == "each" else layouts[:3]
    layouts = [(n, {**fields, "ckpt_grad_residual": kept}) for n, fields in layouts]
    world, fields = layouts[0]
    run_ranks(pass_on, world, None, tmp_path / "0", True, detail=False, **fields)
    expected = kept_in(tmp_path / "0")
    assert all(tensor.any() for tensor in expected.values())
    assert any("word_embeddings" in key for key in expected)
    assert any("layernorm" in key or "norm" in key for key in expected)
    for number, (world, fields) in enumerate(layouts[1:]):
        source, target = tmp_path / str(number), tmp_path / str(number + 1)
        run_ranks(pass_on, world, source, target, False, detail=False, **fields)
        found = kept_in(target)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            real = slice(None, 61) if "embedding" in key else slice(None)
            error = (found[key][real] - tensor[real]).abs().max() / tensor.abs().max()
            # Sums of a few fp32 numbers, in other orders.
            assert error <= (2.0**-22 if number == 0 or kept == "each" else 0), (key, world, fields)


@pytest.mark.parametrize(
    ("world", "fields"),
    [(2, ZERO), (4, {"micro_batch_size": 1}), (4, {**INSTANCES, "micro_batch_size": 1}),
     (4, {**TP2, **ZERO})],
    ids=["dp2-owned", "dp4-whole", "dp4-instances", "tp2-dp2"],
)  # fmt: skip
def test_a_sum_is_the_sum_of_what_replicas_keep(tmp_path, world, fields):
    """Of the same run, saved either way; and another number of replicas starts with the same."""
    for kept in ("each", "sum"):
        fields = {**fields, "ckpt_grad_residual": kept}
        run_ranks(pass_on, world, None, tmp_path / kept, True, detail=False, **fields)
    run_ranks(pass_on, 1, tmp_path / "sum", tmp_path / "one", False, detail=False)
    each, summed, alone = (kept_in(tmp_path / name) for name in ("each", "sum", "one"))
    assert each.keys() == summed.keys() == alone.keys()
    assert {mark for mark, _ in stored_in(tmp_path / "sum")} == {"sum"}
    for key, tensor in each.items():
        # Up to eight fp32 numbers, in other orders.
        error = (summed[key] - tensor).abs().max() / tensor.abs().max()
        assert error <= 2.0**-22, key
        real = slice(None, 61) if "embedding" in key else slice(None)
        assert torch.equal(alone[key][real], summed[key][real]), key


# -- bytes ----------------------------------------------------------------------------------------


def sent(rank, world, **fields):
    """(Sent, without FP8, spent for FP8) bytes of a rank in a step, for gradients and weights."""
    cfg, mesh, parts, step = build(rank, world, **fields)
    log = CommLog()
    for buffer in parts.ddp.buffers_by_axis:
        object.__setattr__(buffer.axis, "log", log)
    step.run(1, 0)
    parts.ddp.finish_param_sync()
    rows = table(log.counts)
    found = []
    for part in (GRADIENT_SYNC, PARAMETER_GATHER):
        those = [row for row in rows if row.part == part]
        found.append(
            tuple(
                sum(getattr(row, name) for row in those)
                for name in ("sent_bytes", "plain_bytes", "spent_bytes")
            )
        )
    return tuple(found)


@pytest.mark.parametrize(("layout", "share"), [(ZERO, 0.26), ({}, 0.39)], ids=["owned", "whole"])
def test_half_the_bytes_or_fewer(layout, share):
    found = {}
    for kind in ("fp32", "bf16", "fp8"):
        fields = {"micro_batch_size": 1, "grad_reduce_dtype": kind, **layout}
        found[kind], *others = run_ranks(sent, 4, detail=False, **fields)
        assert others == [found[kind]] * 3
        gradients, weights = found[kind]
        # What does not travel in FP8 would be the same without, and nothing of it is spent.
        for total, plain, spent in (weights,) if kind == "fp8" else (gradients, weights):
            assert (total, spent) == (plain, 0)
        assert bool(weights[0]) is bool(layout)
    (plain, *_), (bf16, *_), (ours, without, spent) = (f[0] for f in found.values())
    assert bf16 == plain // 2
    # Parameters begin at multiples of 128 elements, which pads this small model a little.
    assert ours < 1.1 * share * plain
    assert plain <= without < 1.1 * plain
    # A byte for each 128 elements on their way there; sums of all ranks come back without.
    assert spent == without // (512 if layout else 1024)
