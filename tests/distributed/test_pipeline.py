"""A pipeline of any shape trains the model that one process trains."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch
from distpool import RankError, run_ranks
from parity import BASE, Outcome, SyntheticSource, run_layout, worst

from megatron.config import make_config
from megatron.core.mesh import ParallelState
from megatron.core.pipeline_parallel.p2p import Pipes
from megatron.core.pipeline_parallel.schedule import Action, Op
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

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
ZB = {"pipeline_schedule": "zb-h1"}


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
    "pp2-cp2": (ROPE, PP2 | {"context_parallel_size": 2}, 4),
    "pp2-vpp2-cp2-gathered": (
        FOUR,
        PP2 | VPP2 | {"context_parallel_size": 2, "cp_comm_type": ["all_gather"]},
        4,
    ),
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


DELAYED = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "max",
    "fp8_emulation": "exact",
}


@pytest.mark.parametrize("name", ["pp2", "pp2-tp2-sp", "pp2-dp2", "pp2-vpp2", "pp2-recompute"])
def test_delayed_scaling(name):
    """Every stage has the scales that its layers have in one process; stages share none."""
    model, layout, ranks = CASES[name]
    steps = 10
    expected = alone(steps, **(model | DELAYED))
    outcomes = run_layout(model | layout | DELAYED, ranks, steps)
    outcome = outcomes[0]
    assert outcome.fp8.keys() == expected.fp8.keys()
    for path, entries in expected.fp8.items():
        for key, value in entries.items():
            assert torch.allclose(outcome.fp8[path][key], value, rtol=1e-6, atol=0), (path, key)
    if "tp" not in name:  # no sum was taken in another order: bitwise
        assert outcome.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
        assert worst(outcome.grads, expected.grads)[0] < 1e-5
    pairs = list(zip(outcome.losses, expected.losses, strict=True))
    # A sum in another order can push a value over a boundary of the FP8 grid.
    assert sum(abs(a - b) / b for a, b in pairs) / steps < 1e-3
    assert all(o.losses == outcome.losses for o in outcomes)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_recompute_is_bitwise_in_bf16_with_dropout(recipe):
    fields = (
        FOUR
        | PP2
        | VPP2
        | {
            "bf16": True,
            "fp8_format": "hybrid",
            "fp8_recipe": recipe,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        }
    )
    plain = run_layout(fields, 2, 2)[0]
    again = run_layout(fields | RECOMPUTE, 2, 2)[0]
    assert again.losses == plain.losses
    assert worst(again.grads, plain.grads)[0] == 0


def test_schedules_agree_bitwise():
    """Any order of the passes draws the same dropout and adds the same gradients in one order."""
    fields = FOUR | PP2 | {"bf16": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    one = run_layout(fields, 2, 3)[0]
    for other in ({"pipeline_schedule": "gpipe"}, ZB, VPP2):
        assert run_layout(fields | other, 2, 3)[0].losses == one.losses
    alone_losses = run_layout(FOUR | {k: v for k, v in fields.items() if k not in PP2}, 1, 3)
    assert alone_losses[0].losses == pytest.approx(one.losses, rel=1e-6)


ZB_CASES = {
    "tied": ({}, 2),
    "untied-one-sample": (UNTIED | ROPE | ONE, 2),
    "pp4": (FOUR | PP4 | ONE, 4),
    "tp2-sp": (TP2 | SP, 4),
    "tp2-sp-fp8": (TP2 | SP | DELAYED, 4),
    "fp8-wgrad-in-bf16": (DELAYED | {"bf16": True, "fp8_wgrad": False}, 2),
    "tensorwise": ({"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, 2),
    "recompute": (RECOMPUTE | DELAYED | {"hidden_dropout": 0.1}, 2),
    "overlap": (ONE | {"overlap_grad_reduce": True, "ddp_num_buckets": 3}, 4),
    "fewer-microbatches-than-ranks": (FOUR | PP4 | {"micro_batch_size": 4}, 4),
}


@pytest.mark.parametrize("name", ZB_CASES)
def test_weight_passes_give_the_gradients_of_one_pass(name):
    """Bitwise: the same products are added in the same order, only later."""
    fields, ranks = ZB_CASES[name]
    fields = PP2 | fields
    expected = run_layout(fields, ranks, 2)[0]
    outcome = run_layout(fields | ZB, ranks, 2)[0]
    assert outcome.losses == expected.losses
    assert worst(outcome.grads, expected.grads)[0] == 0
    assert worst(outcome.final, expected.final)[0] == 0
    for path, entries in expected.final_fp8.items():
        for key, value in entries.items():
            assert torch.equal(outcome.final_fp8[path][key], value), (path, key)


SHARDED = {"use_distributed_optimizer": True, "ddp_num_buckets": 3}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize("sharded", [SHARDED, OVERLAPPED], ids=["sharded", "overlapped"])
@pytest.mark.parametrize("layout", [PP2, PP2 | VPP2, PP2 | ZB], ids=["pp2", "pp2-vpp2", "zb"])
def test_distributed_optimizer_with_tied_embeddings(layout, sharded):
    """Each replica of both stages owns the same range of the tied table."""
    # No biases: a key bias has a gradient of zero up to rounding, which Adam makes a full step of.
    fields = FOUR | layout | ONE | ADAM | {"add_bias_linear": False}
    expected = run_layout(fields, 4, 4)[0]
    outcomes = run_layout(fields | sharded, 4, 4)
    assert outcomes[0].losses == expected.losses
    assert outcomes[0].grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
    assert worst(outcomes[0].final, expected.final)[0] < 1e-6


ADAM = {"optimizer": "adam", "clip_grad": 0.1, "weight_decay": 0.1, "lr": 0.01, "min_lr": 0.01}


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"fp16": True}], ids=str)
def test_tied_copies_stay_equal(fields):
    """With clipping, weight decay and loss scaling; the harness compares the copies bitwise."""
    steps = 8
    outcomes = run_layout(PP2 | ADAM | fields, 2, steps)
    assert outcomes[0].losses == outcomes[1].losses
    if not fields:
        expected = alone(steps, **ADAM)
        assert outcomes[0].losses[-1] < outcomes[0].losses[0]
        assert outcomes[0].losses == pytest.approx(expected.losses, rel=1e-4)
        assert outcomes[0].grad_norms == pytest.approx(expected.grad_norms, rel=1e-3)


def poisoned(rank, world_size, where):
    """Two steps, the first with a NaN in one stage: what each rank did, and its weights' change."""
    fields = PP2 | ADAM | {"fp8_format": "hybrid", "fp8_recipe": "delayed", "train_iters": 2}
    cfg = make_config(world_size=world_size, **{**BASE, **fields})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    parts = setup_model(cfg, runtime)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, runtime.mesh.dp.size))
    before = [p.detach().clone() for p in parts.model.parameters()]
    if where == "gradient" and rank == 0:
        weight = parts.model.embedding.position_embeddings.weight
        weight.register_hook(lambda grad: grad * float("nan"))
    if where == "loss" and rank == 1:
        forward = parts.model.forward
        parts.model.forward = lambda *a, **k: forward(*a, **k) * float("inf")
    outcome = step.run(1, 0)
    same = all(torch.equal(a, b) for a, b in zip(before, parts.model.parameters(), strict=True))
    scales = parts.fp8.book.scale.clone()
    return outcome.update.success, outcome.loss_is_finite, same, bool((scales == 1).all())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_one_stage_with_a_nan_makes_all_skip(where):
    """No weight moves and no scale is made of the step, on any stage."""
    for found in run_ranks(poisoned, 2, where, detail=False):
        assert found == (False, where == "gradient", True, True)


def prefetching(rank, world_size, fields):
    """By iteration: transfers in flight when a stage computes, and those left after the step."""
    cfg = make_config(world_size=world_size, **{**BASE, "train_iters": 2, **fields})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    parts = setup_model(cfg, runtime)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, runtime.mesh.dp.size))
    pipes, flying, found = step._runner._transport, [], []
    forward = parts.model.forward

    def watched(*args, **kwargs):
        flying.append(pipes._receiving)
        return forward(*args, **kwargs)

    parts.model.forward = watched
    step._runner._before_backward = lambda _: flying.append(pipes._receiving)
    for iteration in (1, 2):
        flying.clear()
        loss = step.run(iteration, 0).loss
        found.append((max(flying), pipes.pending, loss))
    return found


@pytest.mark.parametrize("layout", [PP2 | ONE, PP2 | ONE | VPP2 | FOUR, PP2 | ONE | ZB], ids=str)
def test_transfers_are_under_way_while_a_stage_computes_and_none_is_left(layout):
    ahead = run_ranks(prefetching, 2, layout, detail=False)
    late = run_ranks(prefetching, 2, layout | {"overlap_p2p_communication": False}, detail=False)
    for one, other in zip(ahead, late, strict=True):
        assert [loss for *_, loss in one] == [loss for *_, loss in other]
        assert {left for _, left, _ in one + other} == {0}
        assert {flying for flying, *_ in one} == {1}
        assert {flying for flying, *_ in other} == {0}


def leaving(rank, world_size, awaited):
    """The last stage vanishes in its first step, while the first one awaits a gradient."""
    cfg = make_config(world_size=world_size, **{**BASE, "train_iters": 2, **PP2})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    parts = setup_model(cfg, runtime)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, runtime.mesh.dp.size))
    backward = step._runner._handlers[Op.B]

    def leave(*_, **__):
        while not awaited.exists():
            time.sleep(0.01)
        os._exit(7)

    def told(action):
        awaited.touch()
        backward(action)

    if rank == 1:
        parts.model.forward = leave
    step._runner._handlers[Op.B] = told
    try:
        step.run(1, 0)
    except RuntimeError as error:
        raise RuntimeError(f"{step.current}: {error}") from None


def test_a_lost_rank_is_noticed_where_its_tensor_is_awaited(tmp_path):
    with pytest.raises(RankError, match=r"0B0: .*(closed|reset)") as caught:
        run_ranks(leaving, 2, tmp_path / "awaited", detail=False)
    assert "rank 1 died, exit code 7" in str(caught.value)


def test_a_wrong_shape_is_refused_before_it_is_sent():
    pipes = Pipes(ParallelState.single(), (4, 2, 8), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"0SEND_F1: \(4, 2, 9\)"):
        pipes.send(Action.parse("0SEND_F1"), torch.zeros(4, 2, 9))
