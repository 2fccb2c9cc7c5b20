"""Figures of FP8 casts: each against its definition, and which casts of a step they tell about."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.config import make_config
from megatron.core.errors import PrecisionError
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
    linear,
)
from megatron.core.fp8.formats import E4M3
from megatron.core.fp8.kernels import round_to_grid
from megatron.core.fp8.stats import StatsCollector, measure, role_stats
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.training.fp8_watch import collector
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.parity import BASE, SyntheticSource

RECIPES = (
    DelayedScaling(amax_history_len=4),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
)


def quantized(x, scale):
    data, _ = round_to_grid(x, torch.tensor(scale), E4M3)
    return QuantizedTensor(data, torch.tensor(1.0 / scale), E4M3)


def cast(x, recipe=RECIPES[1], role=Role.INPUT, **state):
    layer = Fp8State(Fp8Policy(recipe=recipe), **state).for_linear("a")
    return layer.quantizer(role).cast(x)[0]


def stats_of(x, made, samples=0):
    tally = measure(x, made, samples)
    return role_stats(tally.highest.tolist(), tally.sums.tolist())


def test_every_figure_by_hand():
    # scale 2: 300 becomes 448 / 2 (saturated), 2**-12 becomes 0 (smallest value 2**-9 / 2).
    x = torch.tensor([[300.0, 1.0, 2.0**-12, 0.0], [float("nan"), 3.0, float("inf"), -1.1]])
    found = stats_of(x, quantized(x, 2.0))
    assert found.amax == math.inf
    assert found.scale == 2.0
    assert found.elements == 6
    assert found.nonfinite == 2
    assert found.saturated == pytest.approx(1 / 6)
    assert found.underflow == pytest.approx(1 / 6)
    values = [300.0, 1.0, 2.0**-12, 0.0, 3.0, -1.1]
    became = [224.0, 1.0, 0.0, 0.0, 3.0, -1.125]
    noise = sum((a - b) ** 2 for a, b in zip(values, torch.tensor(became).tolist(), strict=True))
    energy = sum(v * v for v in torch.tensor(values).tolist())
    assert found.snr_db == pytest.approx(10 * math.log10(energy / noise), abs=1e-3)


def test_where_saturation_begins():
    made = replace(cast(torch.ones(1, 1)), scale_inv=torch.tensor(1.0))
    assert stats_of(torch.full((1, 1), 464.0), made).saturated == 0.0
    assert stats_of(torch.full((1, 1), 464.1), made).saturated == 1.0
    grad = replace(cast(torch.ones(1, 1), role=Role.GRAD_OUTPUT), scale_inv=torch.tensor(1.0))
    assert stats_of(torch.full((1, 1), 61440.0), grad).saturated == 0.0
    assert stats_of(torch.full((1, 1), 61441.0), grad).saturated == 1.0
    many = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert stats_of(many, cast(many, NVFP4BlockScaling())).saturated == 0.0


def test_a_tensor_at_the_limit_is_not_saturated():
    for seed in range(20):  # the scale is rounded, and so is its inverse
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        assert stats_of(x, cast(x)).saturated == 0.0


def test_zero_empty_and_exact_tensors():
    zero, empty = torch.zeros(4, 4), torch.zeros(0, 4)
    assert math.isnan(stats_of(zero, quantized(zero, 1.0)).snr_db)
    assert stats_of(empty, QuantizedTensor(empty.bfloat16(), torch.tensor(1.0), E4M3)).elements == 0
    ones = torch.ones(4, 4)
    found = stats_of(ones, quantized(ones, 1.0))
    assert (found.snr_db, found.saturated, found.underflow) == (math.inf, 0.0, 0.0)


def test_energies_of_huge_and_tiny_numbers():
    for size in (1e-37, 1e30):
        x = torch.randn(16, 16) * size
        assert 25 < stats_of(x, cast(x)).snr_db < 40


@pytest.mark.parametrize("inverse", [0.0, math.inf, math.nan])
def test_a_scale_that_is_no_number_shows(inverse):
    x = torch.ones(2, 2)
    made = replace(quantized(x, 1.0), scale_inv=torch.tensor(inverse))
    assert stats_of(x, made).scale == 0.0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("emulation", ["fast", "exact"])
def test_a_sample_says_what_the_whole_says(recipe, emulation):
    x = torch.randn(512, 192, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 8  # a column of outliers, and 192 divides the naive stride
    for role in Role:
        made = cast(x, recipe, role, emulation=emulation)
        whole, some = stats_of(x, made), stats_of(x, made, 4096)
        assert 3900 < some.elements < 4200
        assert (some.amax, some.scale) == (whole.amax, whole.scale)
        assert some.snr_db == pytest.approx(whole.snr_db, abs=1.5)
        for name in ("saturated", "underflow"):
            # A share p of n elements has a standard deviation of sqrt(p (1 - p) / n).
            p = getattr(whole, name)
            spread = math.sqrt(p * (1 - p) / some.elements)
            assert getattr(some, name) == pytest.approx(p, abs=4 * spread + 1e-9)


def test_the_bytes_of_fp8_hardware_say_the_same():
    x = torch.randn(64, 96)
    for recipe in RECIPES:
        made = cast(x, recipe)
        assert stats_of(x, made.to_fp8(), 512) == stats_of(x, made, 512)


def test_fp4_blocks_that_became_zero_have_no_bad_scale():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    x[:, 16:32] = 0.0
    x[:, 32:48] *= 1e-9
    made = cast(x, NVFP4BlockScaling())
    found = stats_of(x, made)
    assert found.underflow == pytest.approx(1 / 4, abs=0.15)  # E2M1 itself loses a tenth
    assert found.scale == pytest.approx(6 / float(x.abs().max()), rel=1 / 15)
    assert 15 < found.snr_db < 25


def run_layer(state, layer, weight, microbatches):
    for x in microbatches:
        linear(x.requires_grad_(), weight, None, layer).square().sum().backward()
    state.stats.end_step(state.layers)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_microbatches_add_up(recipe):
    state = Fp8State(Fp8Policy(recipe=recipe))
    layer = state.for_linear("decoder.layers.0.mlp.linear_fc1")
    state.stats = StatsCollector(interval=10, samples=0)
    weight = torch.nn.Parameter(torch.randn(32, 64).bfloat16())
    state.stats.begin_step(1)
    inputs = [torch.randn(16, 64).bfloat16() * size for size in (1.0, 8.0)]
    run_layer(state, layer, weight, inputs)
    found = state.stats.latest(layer.path)
    assert found.keys() == set(Role)
    assert found[Role.INPUT].elements == 2 * 16 * 64
    assert found[Role.GRAD_OUTPUT].elements == 2 * 16 * 32
    assert found[Role.WEIGHT].elements == 32 * 64  # the same for both
    assert found[Role.INPUT].amax == max(float(x.detach().abs().max()) for x in inputs)
    if not isinstance(recipe, DelayedScaling):
        largest = recipe.format_of(Role.INPUT).max
        # NVFP4 rounds the scale of a block to E4M3, which may enlarge it by 1 / 16.
        slack = 1 / 15 if isinstance(recipe, NVFP4BlockScaling) else 1e-6
        assert found[Role.INPUT].scale <= largest / found[Role.INPUT].amax * (1 + slack)
    assert state.stats.latest("nothing") == {}


def test_only_steps_that_are_due_are_measured():
    state = Fp8State(Fp8Policy(recipe=RECIPES[1]))
    layer = state.for_linear("a")
    stats = state.stats = StatsCollector(interval=4, samples=0)
    weight = torch.nn.Parameter(torch.randn(4, 4).bfloat16())
    measured = []
    for iteration in range(1, 11):
        stats.begin_step(iteration)
        run_layer(state, layer, weight, [torch.randn(4, 4).bfloat16()])
        measured.append(stats.latest_iteration)
        if iteration == 5:
            stats.request()
    assert measured == [1, 1, 1, 4, 4, 6, 6, 8, 8, 8]


def test_a_layer_that_nobody_knew_of_is_named():
    stats = StatsCollector(interval=1, samples=0)
    x = torch.ones(2, 2)
    stats.begin_step(1)
    stats.note("late", Role.INPUT, x, quantized(x, 1.0))
    with pytest.raises(PrecisionError, match="FP8 statistics: got late"):
        stats.end_step({"early": Fp8State(Fp8Policy()).for_linear("early")})


# -- in a training step ---------------------------------------------------------------------------


def trained(**fields):
    cfg = make_config(**{**BASE, "bf16": True, "fp8_format": "hybrid", "train_iters": 4, **fields})
    runtime = start(cfg, Launch())
    parts = setup_model(cfg, runtime)
    parts.fp8.stats = collector(runtime)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, 1))
    losses = [step.run(i + 1, i * cfg.global_batch_size).loss for i in range(2)]
    return losses, parts.fp8.stats


def test_measuring_changes_nothing_and_recomputation_counts_nothing_twice():
    losses, stats = trained(fp8_stats_interval=1)
    assert stats.latest_iteration == 2
    assert len(stats.figures) == 8  # four linear layers a transformer layer
    off, none = trained(fp8_stats_interval=0)
    assert none is None
    assert off == losses
    again, recomputed = trained(
        fp8_stats_interval=1, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1,
    )  # fmt: skip
    assert again == losses
    assert recomputed.figures == stats.figures


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_tensors_inside_attention_have_figures_of_their_own(recipe):
    fields = {"fp8_recipe": recipe, "fp8_dot_product_attention": True, "fp8_stats_interval": 1}
    _, stats = trained(**fields)
    assert stats.uncast == ()
    path = "decoder.layers.0.self_attention.core_attention"
    qkv, do = stats.latest(f"{path}.qkv")[Role.INPUT], stats.latest(f"{path}.do")
    assert qkv.casts % 3 == 0
    assert 20 < qkv.snr_db < 40
    assert do[Role.GRAD_OUTPUT].elements > 0
    # Probabilities exist in pieces only: magnitude and scale are known.
    softmax = stats.latest(f"{path}.s")[Role.INPUT]
    assert (softmax.elements, softmax.casts) == (0, 0)
    assert 0 < softmax.amax <= 1
    assert (f"{path}.o" in stats.figures) == (recipe == "delayed")


def test_products_that_a_policy_keeps_in_high_precision_cast_less():
    policy = "rules:\n  - {module: '*linear_fc1', fprop: bf16, dgrad: bf16}\n"
    found = {}
    for recipe in ("tensorwise", "blockwise"):
        fields = {"fp8_recipe": recipe, "fp8_format": "e4m3", "fp8_policy": policy}
        _, stats = trained(**fields, fp8_stats_interval=1)
        assert stats.uncast == ()
        found[recipe] = set(stats.latest("decoder.layers.0.mlp.linear_fc1"))
    assert list(found.values()) == [{Role.INPUT, Role.GRAD_OUTPUT}] * 2


def test_fp4_runs_are_measured():
    fields = {"fp8_format": None, "fp4_format": "e2m1", "fp8_stats_interval": 1}
    _, stats = trained(**fields)
    assert len(stats.figures) == 8
    assert all(10 < roles[Role.INPUT].snr_db < 30 for roles in stats.figures.values())


def test_without_fp8_there_is_nothing_to_measure():
    assert trained(fp8_format=None)[1] is None
