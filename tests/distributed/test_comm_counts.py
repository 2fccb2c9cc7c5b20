"""What a dry run says is sent in a step is what real ranks send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from distpool import run_ranks
from parity import BASE, SyntheticSource

from megatron.config import make_config
from megatron.core.comm_log import CommLog
from megatron.training.communication import savings, table
from megatron.training.dry_run import communication
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4}
CP2 = {"context_parallel_size": 2}
ZERO = {"use_distributed_optimizer": True, "optimizer": "adam"}
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False,
    "moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.1,),
}  # fmt: skip
EP2 = {**EXPERTS, "expert_model_parallel_size": 2}
A2A = {**EP2, "moe_token_dispatcher_type": "alltoall"}
SENT_IN_FP8 = {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "blockwise"}
LONG = {"seq_length": 32, "max_position_embeddings": 32}
FP8 = {"fp8_format": "hybrid", "bf16": True, **LONG}
ATTENTION = {"fp8_dot_product_attention": True}
ON_TWO = {
    "tp2 without sp": {"tensor_model_parallel_size": 2},
    "tp2 sp": TP2,
    "pp2": {**PP2, "untie_embeddings_and_output_weights": True},
    "pp2 gpipe": {**PP2, "pipeline_schedule": "gpipe"},
    "pp2 zb": {**PP2, "pipeline_schedule": "zb-h1", **FP8},
    "pp2 vpp2": {**PP2, "num_virtual_stages_per_pipeline_rank": 2},
    "cp2 p2p": CP2,
    "cp2 all_gather": {**CP2, "cp_comm_type": ("all_gather",)},
    "cp2 a2a": {**CP2, "cp_comm_type": ("a2a",)},
    "cp2 p2p bf16": {**CP2, **FP8, "fp8_format": None},
    "cp2 p2p attention": {**CP2, **FP8, **ATTENTION},
    "cp2 p2p attention in bf16": {**CP2, **FP8, **ATTENTION, "fp8_cp_exchange": False},
    "cp2 a2a bf16": {**CP2, **FP8, "fp8_format": None, "cp_comm_type": ("a2a",)},
    "cp2 a2a attention": {**CP2, **FP8, **ATTENTION, "cp_comm_type": ("a2a",)},
    "cp2 all_gather bf16": {**CP2, **FP8, "fp8_format": None, "cp_comm_type": ("all_gather",)},
    "cp2 all_gather attention": {**CP2, **FP8, **ATTENTION, "cp_comm_type": ("all_gather",)},
    "dp2": {"ddp_num_buckets": 3},
    "dp2 zero": ZERO,
    "dp2 zero overlapped": {
        **ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_num_buckets": 3,
        "bf16": True, "grad_reduce_in_bf16": True,
    },
    "dp2 fp8 gradients": {"grad_reduce_dtype": "fp8", "ddp_num_buckets": 3},
    "dp2 zero fp8": {**ZERO, **FP8, "grad_reduce_dtype": "fp8", "fp8_param_gather": True},
    "tp2 overlapped": {**TP2, **FP8, "tp_comm_overlap": True},
    "tp2 overlapped rs": {**TP2, "tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True},
    "recompute": {
        **TP2, "recompute_granularity": "full", "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "ep2 allgather": {**EP2, **FP8},
    "ep2 allgather sent in fp8": {**EP2, **FP8, **SENT_IN_FP8},
    "ep2 alltoall sent in fp8": {**A2A, **FP8, **SENT_IN_FP8},
    "ep2 alltoall": {**A2A, "moe_shared_expert_intermediate_size": 32},
    "ep2 z loss": {**A2A, **ZERO, "moe_z_loss_coeff": 0.01, "moe_router_dtype": "fp64"},
    "tp2 sp bf16": {**TP2, **FP8, "fp8_format": None},
    "tp2 sp delayed": {**TP2, **FP8},
    "tp2 sp tensorwise": {**TP2, **FP8, "fp8_recipe": "tensorwise"},
    "tp2 sp mxfp8": {**TP2, **FP8, "fp8_recipe": "mxfp8"},
    "tp2 sp nvfp4": {**TP2, **FP8, "fp8_format": None, "fp4_format": "e2m1"},
    "tp2 overlapped blockwise": {**TP2, **FP8, "fp8_recipe": "blockwise", "tp_comm_overlap": True},
}  # fmt: skip
ON_FOUR = {
    "pp4": {**PP2, "pipeline_model_parallel_size": 4},
    "tp2 pp2": {**TP2, **PP2, "log_num_zeros_in_grad": True},
    "dp2 pp2 zero": {**PP2, **ZERO, "exit_signal_handler": True},
    "ep2 etp2 dp2": {**A2A, **TP2, **ZERO, "expert_tensor_parallel_size": 2},
    "ep2 pp2": {
        **EP2,
        **PP2,
        **FP8,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "cp4 a2a+p2p": {
        "context_parallel_size": 4,
        "cp_comm_type": ("a2a+p2p",),
        "hierarchical_context_parallel_sizes": (2, 2),
    },
    "dp4 instances fp8": {
        **ZERO,
        **FP8,
        "fp8_recipe": "blockwise",
        "num_distributed_optimizer_instances": 2,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_num_buckets": 3,
        "grad_reduce_dtype": "fp8",
        "fp8_param_gather": True,
    },
    "ep2 zero fp8": {
        **A2A,
        **ZERO,
        **FP8,
        "fp8_recipe": "mxfp8",
        "grad_reduce_dtype": "fp8",
        "fp8_param_gather": True,
    },
    "dp2 cp2": {**CP2, **FP8},
    "dp2 cp2 tp-cp": {**CP2, **FP8, "fp8_amax_reduction": "tp-cp"},
}


def config(fields, world_size):
    fields = {k: v for k, v in {**BASE, "train_iters": 1, **fields}.items() if v is not None}
    return make_config(world_size, **fields)


def without_sizes(rows):
    """Rows to compare; how much an exchange of tokens moves depends on where they want to go."""
    return [
        replace(r, payload_bytes=0, sent_bytes=0, plain_bytes=0, spent_bytes=0)
        if r.axis in ("ep", "etp")
        else r
        for r in rows
    ]


def real_steps(rank, world_size, layouts):
    """Table of the transfers of a real step, for each layout."""
    found = {}
    for name, fields in layouts.items():
        cfg, log = config(fields, world_size), CommLog()
        runtime = start(cfg, Launch(rank, world_size, rank, world_size))
        runtime = replace(runtime, mesh=runtime.mesh.recording(log))
        parts = setup_model(cfg, runtime)
        step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, runtime.mesh.dp.size))
        log.clear()
        log.place = lambda step=step: step.current
        step.run(1, 0)
        found[name] = table(log.counts)
    return found


@pytest.fixture(scope="module")
def real():
    two = run_ranks(real_steps, 2, ON_TWO, detail=False)
    four = run_ranks(real_steps, 4, ON_FOUR, detail=False)
    return {
        **{n: [r[n] for r in two] for n in ON_TWO},
        **{n: [r[n] for r in four] for n in ON_FOUR},
    }


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_a_dry_run_counts_what_real_ranks_send(real, name):
    ranks = real[name]
    cfg = config({**ON_TWO, **ON_FOUR}[name], len(ranks))
    last = len(ranks) - 1
    # Without a pipeline every rank does the same; what the first one sends, other tests look at.
    every = {1: (last,), 2: (0, last)}.get(cfg.pipeline_model_parallel_size, range(len(ranks)))
    for rank in every:
        sent = ranks[rank]
        ((where, expected),) = communication(cfg, rank)
        assert where == (rank,)
        # Whether a signal has come is asked once a step, by the loop around it.
        control = [(r.kind, r.axis, r.count) for r in expected if r.part == "control"]
        assert control == ([("all_reduce", "world", 1)] if cfg.exit_signal_handler else [])
        assert without_sizes(r for r in expected if r.part != "control") == without_sizes(sent)
        assert sum(row.sent_bytes for row in sent) > 0


def amax_rows(rows):
    return [(row.kind, row.axis, row.count) for row in rows if row.part == "amax"]


def test_delayed_scaling_adds_one_reduction_a_step(real):
    for rank in range(2):
        plain, delayed = (real[f"tp2 sp {what}"][rank] for what in ("bf16", "delayed"))
        assert amax_rows(plain) == []
        assert amax_rows(delayed) == [("all_reduce", "tp-cp-dp", 1)]
        shape = [[(r.part, r.kind, r.axis, r.count) for r in x] for x in (plain, delayed)]
        assert [row for row in shape[1] if row[0] != "amax"] == shape[0]
    for name, axis in (("dp2 cp2", "tp-cp-dp"), ("dp2 cp2 tp-cp", "tp-cp")):
        for rows in real[name]:
            assert amax_rows(rows) == [("all_reduce", axis, 1)]


def test_scaling_by_the_current_tensor_adds_one_for_every_gathered_one(real):
    layers, microbatches = 2, 4
    gathered = 2 + 2  # inputs of column-parallel matrices, output gradients of row-parallel ones
    for rows in real["tp2 sp tensorwise"]:
        assert amax_rows(rows) == [("all_reduce", "tp", layers * gathered * microbatches)]


def test_a_gathered_sequence_travels_as_one_byte_an_element(real):
    bf16, fp8 = (
        sum(r.payload_bytes for r in real[f"tp2 sp {what}"][0] if r.kind == "all_gather")
        for what in ("bf16", "delayed")
    )
    assert fp8 < bf16
    cfg = config(ON_TWO["tp2 sp delayed"], 2)
    tokens, layers = cfg.seq_length * cfg.global_batch_size, 2
    gathers = 2 * 2 + 2  # inputs forward and backward, output gradients
    assert bf16 - fp8 == tokens * cfg.hidden_size * layers * gathers


def sums(rows, what):
    """Bytes by part, kind and axis."""
    found = Counter()
    for row in rows:
        found[row.part, row.kind, row.axis] += getattr(row, what)
    return +found


@pytest.mark.parametrize(
    ("fp8", "without"),
    [
        ("tp2 sp delayed", "tp2 sp bf16"),
        ("tp2 sp tensorwise", "tp2 sp bf16"),
        ("tp2 sp mxfp8", "tp2 sp bf16"),
        ("tp2 overlapped blockwise", "tp2 sp bf16"),
        ("ep2 allgather sent in fp8", "ep2 allgather"),
        ("cp2 p2p attention", "cp2 p2p bf16"),
        ("cp2 p2p attention in bf16", "cp2 p2p bf16"),
        ("cp2 a2a attention", "cp2 a2a bf16"),
        ("cp2 all_gather attention", "cp2 all_gather bf16"),
    ],
)
def test_the_log_knows_what_would_be_sent_without_fp8(real, fp8, without):
    for ours, theirs in zip(real[fp8], real[without], strict=True):
        expected = sums((r for r in theirs if r.part != "amax"), "sent_bytes")
        assert sums(ours, "plain_bytes") == expected
        assert sums(ours, "sent_bytes") != expected


def test_attention_over_a_ring_sends_its_keys_once_more(real):
    """In the forward pass: they cost half of what bytes save there."""
    for rows in real["cp2 p2p attention"]:
        (forward,) = (r for r in rows if (r.part, r.kind, r.axis) == ("forward", "send", "cp"))
        assert forward.spent_bytes * 4 == forward.plain_bytes
        assert forward.sent_bytes * 4 == 3 * forward.plain_bytes


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_tokens_in_fp8_are_half_the_bytes_and_their_scales(real, dispatcher):
    """Of rows of 32 elements: a scale each with mxfp8 and with blockwise."""
    axis, kind = ("etp-ep", "all_gather") if dispatcher == "allgather" else ("ep", "all_to_all")
    for rows in real[f"ep2 {dispatcher} sent in fp8"]:
        packed = [r for r in rows if r.axis == axis and r.kind == kind and r.spent_bytes]
        assert {r.part for r in packed} == {"forward", "backward"}
        for row in packed:
            # Beside them, router weights and results travel as they are.
            as_it_is = row.sent_bytes - 33 * row.spent_bytes
            assert row.plain_bytes == 64 * row.spent_bytes + as_it_is
            assert as_it_is >= 0
        assert sum(one.saved_bytes for one in savings(rows)) > 0


def test_what_a_tensor_parallel_layer_sends(real):
    """Two matrices a layer are gathered or reduced, forward and backward, as published."""
    rows = {(r.part, r.kind): r for r in real["tp2 without sp"][0] if r.axis == "tp"}
    cfg = config(ON_TWO["tp2 without sp"], 2)
    embedding, layers, microbatches = 1, 2 * cfg.num_layers, cfg.num_microbatches
    forward, backward = rows["forward", "all_reduce"], rows["backward", "all_reduce"]
    assert forward.count == (layers + embedding) * microbatches
    assert backward.count == (layers + 1) * microbatches  # 1: the output layer
    one = cfg.seq_length * cfg.micro_batch_size * cfg.hidden_size * 4
    assert forward.payload_bytes == forward.count * one
    assert rows["loss", "all_reduce"].count == 2 * microbatches


def test_zero_sends_each_gradient_and_each_parameter_once(real):
    plain, zero = real["dp2"][0], real["dp2 zero"][0]
    (reduced,) = (r for r in plain if r.part == "gradient sync")
    scattered, gathered = (
        next(r for r in zero if r.part == part) for part in ("gradient sync", "parameter gather")
    )
    assert (reduced.kind, reduced.count) == ("all_reduce", 3)
    assert (scattered.kind, gathered.kind) == ("reduce_scatter", "all_gather")
    # Both halves of an all-reduce; padded to multiples of 64 and 128 elements.
    padding = 4 * (64 * 26 + 128 * scattered.count)
    for row in (scattered, gathered):
        assert 0 <= 2 * row.sent_bytes - reduced.sent_bytes <= padding


def test_what_replicas_send_in_fp8(real):
    """Gradients there and sums back; with the distributed optimizer bytes both ways."""

    def of(name, part):
        rows = (r for r in real[name][0] if r.part == part)
        return [(row.kind, row.count, row.sent_bytes) for row in rows]

    ((_, _, plain),) = of("dp2", "gradient sync")
    (back, _, sums), (there, count, codes) = of("dp2 fp8 gradients", "gradient sync")
    assert (there, back, count) == ("all_to_all", "all_gather", 3)
    # Of 8 bytes an element and rank: 1 1/128 there and 2 back, padded to 128 elements.
    assert 129 / 128 / 8 <= codes / plain < 1.1 * 129 / 128 / 8
    assert 2 / 8 <= sums / plain < 1.1 * 2 / 8
    (scattered,) = of("dp2 zero fp8", "gradient sync")
    assert scattered[0] == "all_to_all"
    assert scattered[2] < 0.28 * of("dp2 zero", "gradient sync")[0][2]
    gathered, agreed = of("dp2 zero fp8", "parameter gather"), of("dp2 zero fp8", "amax")
    assert [row[0] for row in gathered] == ["all_gather"]
    # One for the weights that rest in FP8, beside the one of delayed scaling.
    assert [row[:2] for row in agreed] == [("all_reduce", 1), ("all_reduce", 1)]


def test_every_transfer_has_a_part(real):
    parts = {row.part for ranks in real.values() for rows in ranks for row in rows}
    assert parts == {
        "forward", "backward", "loss", "gradient sync", "amax", "optimizer", "parameter gather",
    }  # fmt: skip
