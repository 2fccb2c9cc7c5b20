"""The distributed optimizer and overlap change where work is done and when, not its result."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.training.parity.ranks import compile_kernels
from tests.distpool import run_ranks
from tests.parity import BASE, run_layout
from tests.trained_parts import (
    ADAM,
    advance,
    build,
    content,
    make_checkpoint,
    pass_on,
    resume,
    weights,
)

ZERO = {"use_distributed_optimizer": True}
BUCKETS = {"ddp_bucket_size": 2000}
REDUCE = {"overlap_grad_reduce": True}
OVERLAP = {**REDUCE, "overlap_param_gather": True}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BF16 = {"bf16": True}
DELAYED = {
    **BF16,
    "fp8_format": "hybrid",
    "fp8_amax_history_len": 4,
    "fp8_amax_compute_algo": "max",
}
LLAMA = {
    "swiglu": True, "ffn_hidden_size": 48, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "num_layers": 3,
    "make_vocab_size_divisible_by": 32,
}  # fmt: skip


def train(rank, world, steps=3, **fields):
    """Return (losses, norms and zero counts of every step; global weights; master norm)."""
    cfg, mesh, parts, step = build(rank, world, log_num_zeros_in_grad=True, **fields)
    done = advance(cfg, parts, step, 1, steps)
    return done, weights(mesh, parts), parts.optimizer.params_norm()


def run(world, **fields):
    if fields.get("fp8_format"):
        compile_kernels()
    results = run_ranks(train, world, detail=False, **fields)
    for other in results[1:]:
        assert other[0] == results[0][0]
        assert distance(other, results[0]) == 0
    return results[0]


def distance(one, two):
    """Largest difference between weights."""
    assert one[1].keys() == two[1].keys()
    real = BASE["vocab_size"]  # the number of padding rows depends on the layout
    return max(
        abs(one[1][name][:real] - two[1][name][:real]).max()
        if "word_embeddings" in name or name.startswith("output_layer")
        else abs(one[1][name] - two[1][name]).max()
        for name in one[1]
    )


def assert_close(one, two, weight_error, rel=1e-6):
    for own, other in zip(one[0], two[0], strict=True):
        assert own[:2] == pytest.approx(other[:2], rel=rel)
        assert own[3] == other[3]
    assert distance(one, two) <= weight_error
    assert one[2] == pytest.approx(two[2], rel=rel)


def test_two_replicas_are_bitwise_plain_data_parallelism():
    """Two addends have one order. The norm is added up in another order, so no clipping."""
    plain = run(2, clip_grad=0.0)
    for extra in ({}, BUCKETS, {**BUCKETS, **REDUCE}, {**BUCKETS, **OVERLAP}):
        ours = run(2, clip_grad=0.0, **ZERO, **extra)
        assert distance(ours, plain) == 0
        assert [s[0] for s in ours[0]] == [s[0] for s in plain[0]]
        assert [s[2] for s in ours[0]] == [s[2] for s in plain[0]]
        assert_close(ours, plain, 0.0)


@pytest.mark.parametrize(
    ("world", "fields"),
    [(2, {}), (4, {"micro_batch_size": 1}), (4, TP2), (2, BF16), (4, {**TP2, **LLAMA})],
    ids=["dp2", "dp4", "tp2-dp2", "dp2-bf16", "tp2-dp2-llama"],
)
def test_layouts_agree_and_overlap_changes_nothing(world, fields):
    plain = run(world, **fields)
    ours = run(world, **fields, **ZERO, **BUCKETS)
    # Gradient sums and the norm are added up in another order, and bf16 weights round on top.
    assert_close(
        ours, plain, 1e-2 if "bf16" in fields else 1e-5, 1e-3 if "bf16" in fields else 1e-5
    )
    overlapped = run(world, **fields, **ZERO, **BUCKETS, **OVERLAP)
    assert overlapped[0] == ours[0]
    assert overlapped[2] == ours[2]
    assert distance(overlapped, ours) == 0


INSTANCES = {**ZERO, "num_distributed_optimizer_instances": 2, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, 1e-5),  # sums are added up in another order
        ({"context_parallel_size": 2}, 1e-5),
        # Rounded to 2^-9 once more, after the sums of the instances. Plain SGD, because Adam would
        # magnify it where a gradient is all but zero.
        ({"grad_reduce_in_bf16": True, "optimizer": "sgd", "sgd_momentum": 0.0}, 2.0**-8),
    ],
    ids=["dp4", "cp2-dp2", "bf16-wire"],
)
def test_instances_share_a_result(fields, error):
    """Two instances over two ranks each."""
    whole = run(4, **{**INSTANCES, "num_distributed_optimizer_instances": 1, **fields}, **BUCKETS)
    ours = run(4, **{**INSTANCES, **fields}, **BUCKETS)
    assert_close(ours, whole, error, error)
    overlapped = run(4, **{**INSTANCES, **fields}, **BUCKETS, **OVERLAP)
    assert overlapped[0] == ours[0]
    assert distance(overlapped, ours) == 0


def test_as_many_instances_as_replicas_are_plain_data_parallelism():
    plain = run(2, clip_grad=0.0)
    ours = run(2, clip_grad=0.0, **ZERO, num_distributed_optimizer_instances=2, **OVERLAP)
    assert distance(ours, plain) == 0
    assert [s[:1] for s in ours[0]] == [s[:1] for s in plain[0]]


def test_overlapped_reduction_without_the_distributed_optimizer():
    for world in (2, 4):
        fields = {**BUCKETS, "micro_batch_size": 1}
        plain, overlapped = run(world, **fields), run(world, **fields, **REDUCE)
        assert plain[0] == overlapped[0]
        assert distance(plain, overlapped) == 0


def test_one_process_after_five_steps():
    single = run(1, steps=5)
    for world, extra in ((2, OVERLAP), (4, {**TP2, **OVERLAP})):
        ours = run(world, steps=5, **ZERO, **BUCKETS, **extra)
        assert distance(ours, single) <= 1e-4


def test_plain_sgd_has_the_scale_of_one_process():
    """Adam hides errors of scale."""
    sgd = {"optimizer": "sgd", "lr": 0.1, "min_lr": 0.1, "clip_grad": 0.0, "weight_decay": 0.0}
    single = run(1, **sgd)
    for world, extra in ((2, {}), (4, TP2)):
        assert_close(run(world, **sgd, **ZERO, **BUCKETS, **extra), single, 2e-6, 2e-5)


@pytest.mark.parametrize(
    "precision",
    [DELAYED, {**BF16, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}],
    ids=["delayed", "tensorwise"],
)
def test_fp8_weights_are_quantized_anew_after_gathering(precision):
    """In one bucket most weights belong to one rank, and the other only receives them."""
    plain = run(2, clip_grad=0.0, steps=4, **precision)
    ours = run(2, clip_grad=0.0, steps=4, **precision, **ZERO, **OVERLAP)
    assert [s[0] for s in ours[0]] == [s[0] for s in plain[0]]
    assert distance(ours, plain) == 0


def test_recomputation_finds_the_same_weights():
    fields = {"recompute_granularity": "full", "recompute_method": "uniform",
              "recompute_num_layers": 1}  # fmt: skip
    assert (
        distance(
            run(2, **ZERO, **OVERLAP, **BUCKETS), run(2, **ZERO, **OVERLAP, **BUCKETS, **fields)
        )
        == 0
    )


def test_fp16_overflows_skip_the_same_steps():
    fields = {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1, "steps": 8}
    plain = run(2, clip_grad=0.0, **fields)
    ours = run(2, clip_grad=0.0, **fields, **ZERO, **OVERLAP)
    taken = [s[3] for s in ours[0]]
    assert taken == [s[3] for s in plain[0]]
    assert taken[-1]
    assert not taken[0]
    assert distance(ours, plain) == 0


def test_bf16_on_the_wire():
    exact = run(2, clip_grad=0.0)
    plain = run(2, clip_grad=0.0, grad_reduce_in_bf16=True)
    ours = run(2, clip_grad=0.0, grad_reduce_in_bf16=True, **ZERO, **OVERLAP, **BUCKETS)
    assert distance(ours, plain) == 0
    assert 0 < abs(ours[0][0][1] - exact[0][0][1]) < 2e-2 * exact[0][0][1]


def optimizer_bytes(rank, world, **fields):
    _, _, parts, _ = build(rank, world, **BF16, **fields)
    held = [t for _, s in parts.optimizer.named_state() for t in s.values()]
    return sum(t.numel() * t.element_size() for t in held)


def moment_bytes(rank, world, **fields):
    _, _, parts, _ = build(rank, world, **BF16, **fields)
    held = [t for s in parts.optimizer.inner.state.values() for k, t in s.items() if k != "step"]
    return sum(t.numel() * t.element_size() for t in held)


def test_a_rank_holds_its_share_of_masters_and_moments():
    (whole,) = run_ranks(optimizer_bytes, 1)
    for world in (2, 4):
        shares = run_ranks(optimizer_bytes, world, **ZERO, micro_batch_size=1)
        assert sum(shares) == whole
        # Padding is a few hundred elements of thirty thousand.
        assert max(shares) < 1.05 * whole / world
    assert sum(run_ranks(optimizer_bytes, 4, **INSTANCES)) == 2 * whole
    small = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16",
             "exp_avg_sq_dtype": "bf16"}  # fmt: skip
    assert sum(run_ranks(optimizer_bytes, 2, **ZERO, **small)) == whole * 8 // 12
    (stored,) = run_ranks(moment_bytes, 1, **BYTES)
    # A byte for each element and scale of 128, and what the last block of a parameter lacks.
    assert stored < 2 * (whole / 12) * 1.15


MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp16",
}


BYTES = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "fp8",
    "exp_avg_sq_dtype": "fp8",
}


def test_moments_of_a_byte_learn_what_others_learn():
    """And copies of a parameter stay equal, which `run` asserts."""
    shape = {"steps": 40, "train_iters": 40, "micro_batch_size": 4, "clip_grad": 1.0}
    exact = run(2, **shape)
    for fields in ({**ZERO, **OVERLAP}, {**ZERO, "num_distributed_optimizer_instances": 2}):
        ours = run(2, **shape, **BYTES, **fields)
        first, last, reference = (
            sum(s[0] for s in steps) / 5 for steps in (exact[0][:5], ours[0][-5:], exact[0][-5:])
        )
        assert reference < 0.75 * first
        assert last == pytest.approx(reference, rel=0.03)


def test_tied_copies_round_alike():
    """On two pipeline stages; the harness compares the copies bit by bit."""
    fields = {**ADAM, **BYTES, **ZERO, "num_layers": 2, "pipeline_model_parallel_size": 2}
    assert len(run_layout(fields, 2, steps=2)) == 2


@pytest.mark.parametrize(
    "extra",
    [{}, DELAYED, {**BF16, **MOMENTS}, {**BF16, **BYTES}],
    ids=["fp32", "fp8", "moments", "fp8-moments"],
)
def test_resuming_is_bitwise(tmp_path, extra):
    if extra.get("fp8_format"):
        compile_kernels()
    fields = {**ZERO, **BUCKETS, **OVERLAP, **extra}
    assert run_ranks(resume, 2, tmp_path, detail=False, **fields) == [(True, True)] * 2


def test_state_passes_through_every_layout_unchanged(tmp_path):
    layouts = [
        (4, {**TP2, **ZERO, **BUCKETS}),
        (2, {**ZERO, **OVERLAP}),
        (2, {}),
        (4, {**ZERO, **BUCKETS, "micro_batch_size": 1}),
        (2, TP2),
        (4, {**INSTANCES, **BUCKETS}),
        (2, {**TP2, **ZERO}),
        (1, {}),
    ]
    settings = {**BF16, **LLAMA}
    run_ranks(make_checkpoint, 4, tmp_path / "0", detail=False, **settings, **layouts[0][1])
    expected = content(tmp_path / "0")
    assert any(k.startswith("optimizer.state.exp_avg_sq.") for k in expected)
    assert all(t.any() for t in expected.values())
    for number, (world, fields) in enumerate(itertools.islice(layouts, 1, None)):
        source, target = tmp_path / str(number), tmp_path / str(number + 1)
        run_ranks(pass_on, world, source, target, detail=False, **settings, **fields)
        found = content(target)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (key, world, fields)
