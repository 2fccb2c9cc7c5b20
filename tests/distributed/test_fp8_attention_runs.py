"""Training with FP8 attention: every layout is one process, and recomputation changes nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import different, mean_error, run_layout, worst

from tests.distributed.test_parity import GQA, assert_replicas_agree

ATTENTION = {"fp8_format": "hybrid", "fp8_dot_product_attention": True}
RECIPES = {
    "delayed": {"fp8_amax_history_len": 8, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8_recipe": "tensorwise"},
}
LONG = {"seq_length": 32, "max_position_embeddings": 32}
CP2, TP2 = {"context_parallel_size": 2}, {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "tp2-sp": (TP2 | {"sequence_parallel": True}, 2),
    "cp2-p2p": (CP2, 2),
    "cp2-a2a": (CP2 | {"cp_comm_type": ("a2a",)}, 2),
    "cp2-all_gather-tp2": (CP2 | TP2 | {"cp_comm_type": ("all_gather",)}, 4),
    "microbatch-of-8": ({"micro_batch_size": 8}, 1),
}
CORE = "decoder.layers.0.self_attention.core_attention"


@functools.cache
def in_fp32(recipe, layout=""):
    fields, ranks = LAYOUTS[layout] if layout else ({}, 1)
    settings = ATTENTION | RECIPES[recipe] | GQA | LONG | {"fp8_emulation": "exact"}
    return run_layout(settings | fields, ranks, 6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_delayed_scales_and_losses_are_those_of_one_process(layout):
    """The columns of attention are agreed on as all others are; parameters in fp32.

    A value that crosses a boundary of the grid moves by 6 %; losses differ a little, without a
    trend.
    """
    expected, outcomes = in_fp32("delayed")[0], in_fp32("delayed", layout)
    assert_replicas_agree(outcomes)
    assert expected.fp8[CORE]["scale_fwd"].shape == (9,)
    assert (expected.fp8[CORE]["scale_fwd"][[2, 3, 8]] != 1).all()
    assert (expected.fp8[CORE]["scale_bwd"][[0, 3, 5]] != 1).all()
    assert different(outcomes[0], expected, rtol=1e-6) == set()
    assert mean_error(outcomes[0], expected) < 1e-3
    assert expected.losses[-1] < expected.losses[0]


@pytest.mark.parametrize("layout", ["cp2-p2p", "cp2-a2a"])
def test_tensorwise_losses_are_those_of_one_process(layout):
    """Where a layer's activations are split over ranks, current scales are each rank's own.

    Not so inside attention along a sequence, where maxima are agreed on.
    """
    expected, outcomes = in_fp32("tensorwise")[0], in_fp32("tensorwise", layout)
    assert_replicas_agree(outcomes)
    assert set(expected.fp8) == {CORE, CORE.replace("0", "1")}
    moved = different(outcomes[0], expected, rtol=0.07)  # a step of the grid
    assert moved == set()
    assert mean_error(outcomes[0], expected) < 3e-3


MODEL = {
    "bf16": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "reset_attention_mask": True,
    "reset_position_ids": True,
}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4, "first_last_layers_bf16": True}
PLACES = {"one": ({}, 1), "pp2": (PP2, 2), "cp2": (CP2 | LONG, 2)}
RECOMPUTE = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "core": {"recompute_granularity": "selective"},
}
STEPS = 3


@functools.cache
def trained(recipe, place, recompute="", **fields):
    layout, ranks = PLACES[place]
    settings = MODEL | ATTENTION | RECIPES[recipe] | layout | fields
    return run_layout(settings | RECOMPUTE.get(recompute, {}), ranks, STEPS)[0]


CASES = [("delayed", place, recompute) for place in PLACES for recompute in RECOMPUTE]
CASES += [("tensorwise", "one", "core"), ("tensorwise", "cp2", "full")]


@pytest.mark.parametrize(("recipe", "place", "recompute"), CASES)
def test_recompute_is_bitwise(recipe, place, recompute):
    """With dropout, documents, four microbatches, and layers at the ends in BF16."""
    plain, again = trained(recipe, place), trained(recipe, place, recompute)
    assert all(torch.tensor(plain.losses).isfinite())
    assert again.losses == plain.losses
    assert worst(again.final, plain.final)[0] == 0
    assert again.final_fp8.keys() == plain.final_fp8.keys()
    for path, entries in plain.final_fp8.items():
        for key, value in entries.items():
            assert torch.equal(again.final_fp8[path][key], value), (path, key)
    cores = [path for path in plain.final_fp8 if path.endswith("core_attention")]
    assert len(cores) == 2


@pytest.mark.parametrize("place", ["one", "pp2"])
def test_histories_advance_once_a_step(place):
    """Not once a microbatch, and the columns that nothing belongs to not at all."""
    used = {"amax_history_fwd": [2, 3, 8], "amax_history_bwd": [0, 3, 5]}
    for path, entries in trained("delayed", place, "core").final_fp8.items():
        if path.endswith("core_attention"):
            for key, columns in used.items():
                rows = (entries[key] > 0).sum(0).tolist()
                assert [rows.pop(i) for i in reversed(columns)] == [STEPS] * len(columns)
                assert set(rows) == {0}


def test_a_plain_backward_is_another_run_with_the_same_first_loss():
    fp8, plain = trained("delayed", "one"), trained("delayed", "one", fp8_dpa_bwd=False)
    assert plain.losses[0] == fp8.losses[0]
    assert plain.losses[1:] != fp8.losses[1:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_without(recipe):
    """Everything in BF16, and everything in FP8: 30 steps on the same tokens.

    The losses of a run with FP8 layers and attention in BF16 differ from those in BF16 by 0.2 %.
    """
    settings = {"bf16": True, "lr": 0.05, "min_lr": 0.05} | LONG
    inside = run_layout(ATTENTION | settings | RECIPES[recipe], 1, 30)[0]
    outside = plain_bf16(**settings)
    assert outside.losses[-1] < 0.75 * outside.losses[0]
    assert mean_error(inside, outside) < 0.005


@functools.cache
def plain_bf16(**settings):
    return run_layout(settings, 1, 30)[0]
