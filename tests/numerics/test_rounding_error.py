"""The closed form of the rounding error against sampled tensors, from underflow to saturation."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.quantizers import BlockQuantizer, CurrentQuantizer
from megatron.core.fp8.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Role,
)
from megatron.core.fp8.rounding_error import (
    decibels,
    grid_of,
    mantissa_grid,
    measure,
    normal_moments,
    normal_sqnr,
)
from megatron.core.fp8.tensor import QuantizedTensor


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The largest magnitude of a million normal values is about 4.9 deviations.
@pytest.mark.parametrize(
    ("grid", "spread", "figure"),
    [
        (grid_of(E4M3), 448 / 4.9, 31.55),
        (grid_of(E5M2), 57344 / 4.9, 25.55),
        (mantissa_grid(7), 1.0, 55.6),
        (mantissa_grid(3), 1.0, 31.52),
    ],
    ids=["e4m3", "e5m2", "bf16", "e4m3 without limits"],
)
def test_a_normal_tensor_scaled_to_its_largest_value(grid, spread, figure):
    assert normal_sqnr(grid, spread) == pytest.approx(figure, abs=0.05)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("exponent", [-18, -10, -4, 0, 6, 9, 12])
def test_sampled(fmt, exponent):
    """Everything underflows at the one end, almost everything saturates at the other."""
    spread = 2.0**exponent
    x = normal(1 << 20) * spread
    held, _ = kernels.round_to_grid(x, torch.ones(()), fmt)
    found = (held.double() - x.double()).square().mean().item()
    _, noise = normal_moments(grid_of(fmt), torch.tensor([spread]), torch.tensor([math.inf]))
    # A million samples: their noise is within a percent, or ten where few values are off at all.
    assert noise.item() == pytest.approx(found, rel=0.1 if exponent in (6, 9) else 0.01)


def test_cut_off_distributions():
    x = normal(1 << 20)
    for limit in (0.5, 2.0):
        kept = x[x.abs() <= limit].double()
        held, _ = kernels.round_to_grid(kept.float() * 16, torch.ones(()), E4M3)
        signal, noise = normal_moments(
            grid_of(E4M3), torch.tensor([16.0]), torch.tensor([16 * limit])
        )
        assert signal.item() / 256 == pytest.approx(kept.square().mean().item(), rel=0.01)
        found = (held.double() / 16 - kept).square().mean().item()
        assert noise.item() / 256 == pytest.approx(found, rel=0.01)


def test_each_block_is_its_own_distribution():
    """Blocks of very different size, the last ones smaller."""
    x = normal(300, 1000) * 2.0 ** (torch.arange(300) % 20).unsqueeze(1)
    for recipe in (Float8BlockScaling(), MXFP8BlockScaling()):
        made = BlockQuantizer(recipe, Role.INPUT, fold=False).rowwise(x)
        error = measure(x, made)
        assert error.normal_sqnr_db == pytest.approx(error.sqnr_db, abs=0.1)
        assert error.sqnr_db == pytest.approx(31.5, abs=0.3)
        assert error.saturated == 0
        assert error.scales[1] / error.scales[0] >= 2**19


def test_shares():
    x = torch.tensor([[0.0, 448.0, 449.0, 2.0**-8, 2.0**-11, float("nan"), float("inf"), -1000.0]])
    held, _ = kernels.round_to_grid(x, torch.ones(()), E4M3)
    error = measure(x, QuantizedTensor(held, torch.ones(()), E4M3))
    # Of the six finite ones.
    assert (error.saturated, error.underflow, error.subnormal) == (2 / 6, 1 / 6, 1 / 6)
    assert error.scales == (1, 1)
    signal = 448**2 + 449**2 + 2.0**-16 + 2.0**-22 + 1000**2
    noise = 1 + 2.0**-22 + 552**2
    assert error.sqnr_db == pytest.approx(decibels(signal, noise), rel=1e-12)


def test_what_has_no_noise_or_no_signal():
    exact = torch.tensor([[1.0, 2.0, 448.0]])
    made = CurrentQuantizer(Float8CurrentScaling(), Role.INPUT).rowwise(exact)
    assert measure(exact, made).sqnr_db == math.inf
    assert math.isnan(decibels(0.0, 1.0))
