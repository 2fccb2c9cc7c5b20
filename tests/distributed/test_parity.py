"""Every layout trains the same model: losses, global gradients, gradient norm, FP8 scales."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import Outcome, different, mean_error, run_layout, worst
from small_models import GQA, LLAMA

SP = {"sequence_parallel": True}
TP2 = {"tensor_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}

ONE_P = {"apply_layernorm_1p": True, "untie_embeddings_and_output_weights": True}
MODELS = {"gpt": {}, "llama": LLAMA | GQA, "1p": ONE_P}

# name -> (fields, ranks)
LAYOUTS = {
    "tp2": (TP2, 2),
    "tp2-sp": (TP2 | SP, 2),
    "tp4": (TP4, 4),
    "tp4-sp": (TP4 | SP, 4),
    "dp2": ({}, 2),
    "dp4": ({"micro_batch_size": 1}, 4),
    "dp2-one-microbatch": ({"micro_batch_size": 4}, 2),
    "microbatch-of-8": ({"micro_batch_size": 8}, 1),
    "tp2-sp-dp2": (TP2 | SP, 4),
}


@functools.cache
def alone(model: str, steps: int, **fields: object) -> Outcome:
    return run_layout(MODELS[model] | fields, 1, steps)[0]


def assert_replicas_agree(outcomes: list[Outcome]) -> None:
    """Bitwise: a replicated parameter that drifts apart has lost a reduction."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.losses == first.losses
        for name, value in first.final.items():
            assert torch.equal(other.final[name], value), name
        for path, state in first.final_fp8.items():
            for key, value in state.items():
                assert torch.equal(other.final_fp8[path][key], value), (path, key)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt", name) for name in LAYOUTS]
    + [("llama", name) for name in ("tp2", "tp2-sp", "tp2-sp-dp2")]
    + [("1p", "tp2-sp")],
)
def test_fp32(model, layout):
    fields, ranks = LAYOUTS[layout]
    steps = 3
    expected = alone(model, steps)
    outcomes = run_layout(MODELS[model] | fields, ranks, steps)
    assert_replicas_agree(outcomes)
    outcome = outcomes[0]
    assert worst(outcome.initial, expected.initial)[0] == 0
    # Only the order of fp32 additions differs between layouts.
    assert worst(outcome.grads, expected.grads)[0] < 1e-5
    assert worst(outcome.final, expected.final)[0] < 1e-5
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def test_the_harness_sees_uneven_masks_and_padding():
    """Guards the harness: a mean of means, or another padding, would have to show."""
    outcome = alone("gpt", 3)
    padded = outcome.grads["embedding.word_embeddings.weight"].shape[0]
    tp4 = run_layout(TP4, 4, 1)[0].grads["embedding.word_embeddings.weight"].shape[0]
    assert (padded, tp4) == (62, 64)
    assert all(value.abs().max() > 1e-4 for value in outcome.grads.values())
    assert outcome.losses[0] != outcome.losses[1]


DELAYED = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "max",
}
FP8_LAYOUTS = ("tp2", "tp2-sp", "dp2", "microbatch-of-8")


def assert_same_where_tensors_are(outcome: Outcome, expected: Outcome, layout: str) -> None:
    """Weights and the first input exist before any sum over ranks: bitwise the same anywhere.

    Data parallelism changes no tensor of the first step at all.
    """
    moved = different(outcome, expected)
    weights = {(path, key) for path, key, column in moved if key.endswith("fwd") and column == 1}
    assert weights == set()
    for key in ("scale_fwd", "amax_history_fwd"):
        assert ("decoder.layers.0.self_attention.linear_qkv", key, 0) not in moved
    assert layout != "dp2" or moved == set()


@pytest.mark.parametrize("layout", FP8_LAYOUTS)
def test_delayed_scaling_does_not_depend_on_the_layout(layout):
    """Parameters in fp32, so that nothing but the FP8 grid rounds coarsely.

    Sums in another order move an amax by a bit at most. That may push a value over a boundary of
    the grid, a step of 6 %: losses then differ a little, without a trend.
    """
    fields, ranks = LAYOUTS[layout]
    steps, settings = 20, DELAYED | {"fp8_emulation": "exact"}
    expected = alone("gpt", steps, **settings)
    outcomes = run_layout(settings | fields, ranks, steps)
    assert_replicas_agree(outcomes)
    assert len(expected.fp8) == 8
    assert all((state["scale_fwd"][:2] != 1).all() for state in expected.fp8.values())
    assert_same_where_tensors_are(outcomes[0], expected, layout)
    assert different(outcomes[0], expected, rtol=1e-6) == set()
    assert mean_error(outcomes[0], expected) < 1e-3
    assert expected.losses[-1] < 0.85 * expected.losses[0]


@pytest.mark.parametrize("layout", FP8_LAYOUTS)
def test_delayed_scaling_in_bf16(layout):
    fields, ranks = LAYOUTS[layout]
    settings = DELAYED | {"bf16": True}
    expected = alone("gpt", 6, **settings)
    outcomes = run_layout(settings | fields, ranks, 6)
    assert_replicas_agree(outcomes)
    assert_same_where_tensors_are(outcomes[0], expected, layout)
    # bf16 rounds partial sums and, in each microbatch, gradients; steps amplify that.
    assert mean_error(outcomes[0], expected) < 5e-3


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "dp2"])
def test_current_scaling(layout):
    fields, ranks = LAYOUTS[layout]
    settings = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_emulation": "exact"}
    expected = alone("gpt", 5, **settings)
    outcomes = run_layout(settings | fields, ranks, 5)
    assert_replicas_agree(outcomes)
    # A row-parallel input has a scale of its own on every rank, so its rounding differs.
    assert mean_error(outcomes[0], expected) < 5e-3
    if layout == "dp2":
        assert outcomes[0].losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
        assert worst(outcomes[0].grads, expected.grads)[0] < 1e-5
        assert mean_error(outcomes[0], expected) < 1e-3


BLOCKS = {"fp8_format": "e4m3", "fp8_emulation": "exact"}
# At TP 2 every shard of a weight and of an activation is whole blocks of 32.
IN_BLOCKS = {"hidden_size": 64, "ffn_hidden_size": 128}


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "dp2"])
def test_block_scales_of_whole_blocks_do_not_depend_on_the_layout(layout):
    """The operands of the first products are the same; sums in another order move later ones."""
    fields, ranks = LAYOUTS[layout]
    settings = BLOCKS | IN_BLOCKS | {"fp8_recipe": "mxfp8"}
    expected = alone("gpt", 5, **settings)
    outcomes = run_layout(settings | fields, ranks, 5)
    assert_replicas_agree(outcomes)
    assert outcomes[0].losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert mean_error(outcomes[0], expected) < 1e-4
    # A value pushed over a boundary of the grid steps by 6 %; few are.
    assert worst(outcomes[0].grads, expected.grads)[0] < 2e-2


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "dp2"])
def test_block_scales_in_any_size(recipe, layout):
    """Shards of 16, 24 and 48 columns and 9 tokens a rank cut blocks, whose scales then differ."""
    fields, ranks = LAYOUTS[layout]
    settings = BLOCKS | {"fp8_recipe": recipe, "micro_batch_size": 1, "seq_length": 18}
    settings |= {"max_position_embeddings": 18, "ffn_hidden_size": 48, "bf16": True}
    expected = alone("gpt", 5, **settings)
    outcomes = run_layout(settings | fields, ranks, 5)
    assert_replicas_agree(outcomes)
    assert mean_error(outcomes[0], expected) < 5e-3
