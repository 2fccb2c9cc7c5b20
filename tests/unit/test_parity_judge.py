"""What counts as the same."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.parity.judge import (
    Difference,
    compare_exactly,
    compare_rounded,
    forward_order,
)
from megatron.training.parity.outcome import Outcome

NAMES = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "output_layer.weight",
]


def outcome(noise=0.0, seed=0):
    """An outcome, with every number off by about so much."""
    shift = torch.Generator().manual_seed(seed)
    exact = torch.Generator().manual_seed(99)

    def tensors():
        found = {}
        for name in NAMES:
            value = torch.randn(8, 4, generator=exact)
            found[name] = value + noise * torch.randn(8, 4, generator=shift)
        return found

    made = Outcome(losses=[5.0 * (1 + noise)] * 2, grad_norms=[2.0 * (1 + noise)] * 2)
    made.initial = {name: torch.ones(8, 4) for name in NAMES}
    made.grads, made.last_grads, made.final = tensors(), tensors(), tensors()
    made.fp8 = {"layer": {"scale_fwd": torch.tensor([2.0 + noise, 4.0, 1.0]),
                          "amax_history_fwd": torch.full((2, 3), noise)}}  # fmt: skip
    return made


def test_rounding_of_fp32_is_inside_and_a_tenth_of_a_percent_is_not():
    reference = outcome()
    assert compare_exactly(outcome(1e-7), reference, 8).inside
    found = compare_exactly(outcome(1e-3), reference, 8)
    assert {k for k, m in found.measures.items() if not m.inside} == {
        "loss", "grad norm", "gradients", "weights",
    }  # fmt: skip
    assert [one.name for one in found.diverging] == NAMES


def test_one_wrong_element_is_enough_and_padding_does_not_count():
    ours, reference = outcome(), outcome()
    ours.grads[NAMES[2]][7, 3] += 1e-3
    ours.grads[NAMES[0]][6] += 1.0
    ours.initial[NAMES[3]][7] = 0.0
    assert [one.name for one in compare_exactly(ours, reference, 6).diverging] == [NAMES[2]]
    full = compare_exactly(ours, reference, 8)
    assert [one.name for one in full.diverging] == [NAMES[0], NAMES[2]]
    assert not full.measures["start"].inside


def test_a_gradient_of_rounding_errors_is_measured_against_the_others():
    ours, reference = outcome(), outcome()
    reference.grads[NAMES[1]] = torch.full((8, 4), 1e-9)
    ours.grads[NAMES[1]] = torch.full((8, 4), -1e-9)
    assert compare_exactly(ours, reference, 8).inside
    ours.grads[NAMES[1]] = torch.full((8, 4), 1e-5)
    assert not compare_exactly(ours, reference, 8).inside


@pytest.mark.parametrize("where", ["losses", "grads"])
def test_a_nan_is_outside(where):
    ours = outcome()
    if where == "losses":
        ours.losses[1] = math.nan
    else:
        ours.grads[NAMES[1]][0, 0] = math.nan
    assert not compare_exactly(ours, outcome(), 8).inside


def test_the_yardstick_of_coarse_rounding_is_one_process():
    exact, reference = outcome(), outcome(0.02, seed=1)
    assert compare_rounded(outcome(0.02, seed=2), reference, exact, 8, "bf16").inside
    found = compare_rounded(outcome(0.2, seed=2), reference, exact, 8, "bf16")
    assert [one.name for one in found.diverging] == NAMES
    doubled = outcome(0.02, seed=2)
    doubled.last_grads[NAMES[2]] *= 2
    found = compare_rounded(doubled, reference, exact, 8, "bf16")
    assert [one.name for one in found.diverging] == [NAMES[2]]


def test_a_few_tokens_may_choose_other_experts():
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight0"
    exact, reference, ours = outcome(), outcome(0.02, seed=1), outcome(0.02, seed=2)
    for made in (exact, reference, ours):
        made.last_grads[name] = torch.ones(8, 4)
        made.initial[name] = torch.ones(8, 4)
    ours.last_grads[name] = torch.full((8, 4), 1.3)
    assert compare_rounded(ours, reference, exact, 8, "bf16").inside
    for wrong in (0.5, 2.0):
        ours.last_grads[name] = torch.full((8, 4), wrong)
        found = compare_rounded(ours, reference, exact, 8, "bf16")
        assert [one.name for one in found.diverging] == [name]


def test_scales_of_weights_are_the_same_bits():
    exact, reference, ours = outcome(), outcome(), outcome()
    ours.fp8["layer"]["scale_fwd"][0] = 2.1
    assert compare_rounded(ours, reference, exact, 8, "fp8").measures["scales"].inside
    ours.fp8["layer"]["scale_fwd"][1] = torch.nextafter(torch.tensor(4.0), torch.tensor(5.0))
    measure = compare_rounded(ours, reference, exact, 8, "fp8").measures["scales"]
    assert (measure.inside, measure.name) == (False, "layer scale_fwd[1]")


def test_a_band_of_zero_accepts_zero_only():
    assert Difference("x", 0.0, 0.0).inside
    assert Difference("x", 0.0, 0.0).excess == 0
    assert Difference("x", 1e-30, 0.0).excess == math.inf


def test_forward_order():
    names = [
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.10.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.experts.linear_fc2.weight0",
        "decoder.layers.2.mlp.experts.linear_fc1.weight1",
        "decoder.layers.2.mlp.router.weight",
        "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.2.self_attention.q_layernorm.weight",
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "embedding.word_embeddings.weight",
    ]
    assert sorted(names, key=forward_order) == names[:1:-1] + names[1::-1]
