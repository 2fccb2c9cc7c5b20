"""How much rounding loses: measured on a tensor, and expected of a normal one.

The signal-to-noise ratio of a rounded tensor (SQNR) is the mean square of its values over that of
its rounding errors, in decibels.

*Closed form.* Rounding takes everything between two midpoints of the grid to the value between
them, and everything beyond the last midpoint to the largest value. For a normal variable the
expected squared error of each such interval is a sum of its first three partial moments, which the
density and the distribution function give; the noise is their sum over the grid. So nothing is
assumed about small intervals, and underflow and saturation are part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron.core.fp8.formats import Fp8Format, code_values
from megatron.core.fp8.tensor import QuantizedTensor

_ROWS = 4096  # distributions that are summed up at once


def grid_of(fmt: Fp8Format) -> torch.Tensor:
    """The values of a format from 0 to its largest, fp64, ascending."""
    return code_values(fmt)[: fmt.max_code + 1].double()


def mantissa_grid(mantissa_bits: int, lowest: int = -30, highest: int = 8) -> torch.Tensor:
    """A grid without limits that matter for values around 1: 0 and all of some binades, fp64."""
    steps = 1 + torch.arange(1 << mantissa_bits).double() / (1 << mantissa_bits)
    binades = 2.0 ** torch.arange(lowest, highest).double()
    return torch.cat([torch.zeros(1).double(), (binades[:, None] * steps).flatten()])


def normal_moments(
    grid: torch.Tensor, spread: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squares of normal variables of mean 0 and of their rounding errors.

    Args:
        grid: Values that are not negative, fp64, ascending from 0.
        spread: Standard deviations in units of the grid, `[n]`, above 0.
        limit: What no magnitude exceeds, in the same units, `[n]`: the distributions are cut off
            there. May be infinite.

    Returns:
        Of the variables and of the errors, fp64 `[n]` each.
    """
    middles = (grid[1:] + grid[:-1]) / 2
    lower = torch.cat([torch.zeros_like(grid[:1]), middles])
    upper = torch.cat([middles, torch.full_like(grid[:1], math.inf)])
    signal, noise = [grid[:0]], [grid[:0]]
    for start in range(0, spread.numel(), _ROWS):
        part = slice(start, start + _ROWS)
        deviation, end = spread[part, None].double(), limit[part, None].double()
        # Parts of the distribution, in units of its deviation, and their partial moments.
        low, high = (torch.minimum(side, end) / deviation for side in (lower, upper))
        mass = (torch.erfc(low / math.sqrt(2)) - torch.erfc(high / math.sqrt(2))) / 2
        first = deviation * (_density(low) - _density(high))
        second = deviation**2 * (mass + _weighted(low) - _weighted(high))
        error = (second - 2 * grid * first + grid**2 * mass).clamp(min=0)
        whole = mass.sum(1)
        signal.append(second.sum(1) / whole)
        noise.append(error.sum(1) / whole)
    return torch.cat(signal), torch.cat(noise)


def _weighted(x: torch.Tensor) -> torch.Tensor:
    """`x` times the density; 0 at infinity."""
    return torch.where(x.isinf(), 0.0, x) * _density(x)


def _density(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def decibels(signal: float, noise: float) -> float:
    """Ratio of two mean squares; infinite where there is no noise, NaN where there is no signal."""
    if not signal:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf


def normal_sqnr(grid: torch.Tensor, spread: float) -> float:
    """SQNR in dB of a normal variable whose standard deviation is `spread` units of the grid."""
    signal, noise = normal_moments(grid, torch.tensor([spread]), torch.tensor([math.inf]))
    return decibels(signal.item(), noise.item())


@dataclass(frozen=True)
class RoundingError:
    """What quantizing did to the finite values of a tensor.

    Attributes:
        sqnr_db: Measured.
        normal_sqnr_db: Expected, with rounding to nearest, if the values under each scale were
            normal, with the same deviation and the same largest magnitude.
        saturated: Share of the values that became the largest one although they are larger.
        underflow: Share of the values that are not 0 and became 0.
        subnormal: Share of the values that kept fewer bits, because they are subnormal.
        scales: Smallest and largest scale; with scales in two levels their products.
    """

    sqnr_db: float
    normal_sqnr_db: float
    saturated: float
    underflow: float
    subnormal: float
    scales: tuple[float, float]


def measure(x: torch.Tensor, made: QuantizedTensor) -> RoundingError:
    """Compare a tensor with what was made of it.

    Args:
        x: `[rows, cols]`, any float type, not empty.
        made: The same values quantized.
    """
    values, finite = x.double(), x.isfinite()
    values = torch.where(finite, values, 0)
    count = max(1, int(finite.sum()))
    grid_values = made.to_fp8().hold()
    inverse = grid_values.expanded_scale_inv().double().expand_as(values) * _above(made)
    # A block whose own scale underflowed has the inverse 0, and all its values became 0.
    scaled = torch.where(inverse > 0, values / inverse, 0).abs()
    codes = grid_values.data.double().abs()
    back = torch.where(finite, codes.copysign(values) * inverse, 0)
    fmt = made.fmt

    def share(which: torch.Tensor) -> float:
        return int((which & finite).sum()) / count

    tiny = codes < fmt.min_normal
    return RoundingError(
        sqnr_db=decibels(values.square().sum().item(), (back - values).square().sum().item()),
        normal_sqnr_db=_expected(values, grid_values),
        saturated=share(scaled > fmt.max * (1 + 2.0**-20)),  # a scale is rounded itself
        underflow=share((codes == 0) & (values != 0)),
        subnormal=share(tiny & (codes != 0)),
        scales=_range_of(made),
    )


def _above(made: QuantizedTensor) -> float:
    """The inverse scale above those of the blocks; 1 without."""
    return 1.0 if made.tensor_inv is None else made.tensor_inv.item()


def _range_of(made: QuantizedTensor) -> tuple[float, float]:
    inverse = made.scale_inv.double() * _above(made)
    positive = inverse[inverse > 0]
    if not positive.numel():
        return math.inf, math.inf
    return 1 / positive.max().item(), 1 / positive.min().item()


def _expected(values: torch.Tensor, made: QuantizedTensor) -> float:
    """The closed form, block by block.

    The largest magnitude of a block decides about its scale, so its own error is that of one known
    number. The others are normal values up to there.
    """
    high, wide = made.block or (values.shape[0], values.shape[1])
    pad = (0, -values.shape[1] % wide, 0, -values.shape[0] % high)
    down, across = (values.shape[0] + pad[3]) // high, (values.shape[1] + pad[1]) // wide
    sizes, counts = (
        torch.nn.functional.pad(t, pad).view(down, high, across, wide)
        for t in (values.abs(), torch.ones_like(values))
    )
    largest = sizes.amax((1, 3)).flatten()
    others = sizes.square().sum((1, 3)).flatten() - largest.square()
    deviation = (others.clamp(min=0) / (counts.sum((1, 3)).flatten() - 1).clamp(min=1)).sqrt()
    scale = (made.scale_inv.double().flatten() * _above(made)).reciprocal()
    lost = scale.isinf()  # all became 0
    grid = grid_of(made.fmt)
    error = torch.where(lost, largest, _error_of(grid, largest * scale) / scale).square()
    some = (others > 1e-20 * largest.square()) & ~lost
    signal, noise = normal_moments(grid, (deviation * scale)[some], (largest * scale)[some])
    error[some] += others[some] * noise / signal
    error[lost] += others[lost]
    return decibels((largest.square() + others).sum().item(), error.sum().item())


def _error_of(grid: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """How far magnitudes are from the nearest value of a grid."""
    above = torch.searchsorted(grid, sizes).clamp(1, grid.numel() - 1)
    return torch.minimum((sizes - grid[above - 1]).abs(), (grid[above] - sizes).abs())
