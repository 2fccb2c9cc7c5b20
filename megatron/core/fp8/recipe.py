"""FP8 recipes: how the scale of each tensor is found.

A scale multiplies when a tensor is quantized (`q = round(x * scale)`); its inverse multiplies when
the tensor is read back. Only the inverse leaves a quantizer.

Source: the formulas follow NVIDIA Transformer Engine's delayed and per-tensor current scaling.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import InitVar, dataclass, fields
from enum import Enum
from typing import Any

import torch

from megatron.core.errors import complaint
from megatron.core.fp8.formats import Format, Fp8Format

FLT_MAX = torch.finfo(torch.float32).max
AMAX_ALGORITHMS = ("max", "most_recent")


class Role(Enum):
    """What a tensor is to a linear layer."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Recipe:
    """Base of all recipes: an immutable value, compared by its fields.

    Raises:
        ValueError: At construction, for an unknown keyword or a value out of range.
    """

    fp8_format: Format
    #: Name in `--fp8-recipe`, in tables and in checkpoints.
    name: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Recipe:  # noqa: D102
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        known += getattr(cls, "_aliases", ())
        for key in kwargs:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                fix = f"Did you mean {close[0]}" if close else f"Use {', '.join(known)}"
                raise ValueError(
                    complaint(f"{cls.__name__}({key}=)", kwargs[key], "No such field", fix)
                )
        return super().__new__(cls)

    def format_of(self, role: Role) -> Fp8Format:
        """Format in which tensors of `role` are stored."""
        return self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward

    def _check_format(self) -> None:
        fmt: object = self.fp8_format
        if isinstance(fmt, str):
            fmt = {"e4m3": Format.E4M3, "hybrid": Format.HYBRID}.get(fmt.lower(), fmt)
            object.__setattr__(self, "fp8_format", fmt)
        if fmt not in (Format.E4M3, Format.HYBRID):
            raise ValueError(
                complaint(
                    f"{type(self).__name__}(fp8_format=)",
                    fmt,
                    "Forward tensors need the precision of E4M3",
                    "Use Format.E4M3, or Format.HYBRID for E5M2 gradients",
                )
            )


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor scales from the largest magnitudes of earlier steps.

    Attributes:
        margin: Powers of two left free above the largest magnitude.
        fp8_format: E4M3 for all tensors, or HYBRID (E5M2 gradients).
        amax_history_len: Number of remembered magnitudes.
        amax_compute_algo: `max` of the history, the `most_recent` one, or a function from the
            history `[L, N]` to `[N]`.
        scaling_factor_compute_algo: Optional function `(amax, old_scale, fp8_max, recipe)` that
            returns the scale, all `[N]`.
        reduce_amax: Whether ranks agree on magnitudes before a scale is computed.

    With either function the history advances at every update, even where nothing was recorded.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True

    name = "delayed"

    def __post_init__(self) -> None:
        self._check_format()
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(
                complaint(
                    "DelayedScaling(amax_history_len=)",
                    self.amax_history_len,
                    "A scale needs at least one remembered magnitude",
                    "Use 1 or more",
                )
            )
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in AMAX_ALGORITHMS:
            raise ValueError(
                complaint(
                    "DelayedScaling(amax_compute_algo=)",
                    self.amax_compute_algo,
                    "Unknown way to reduce a history",
                    f"Use {' or '.join(AMAX_ALGORITHMS)}, or a function",
                )
            )

    @property
    def fused(self) -> bool:
        """Whether the update follows the fused rule: no roll where nothing was recorded."""
        return not callable(self.amax_compute_algo) and self.scaling_factor_compute_algo is None

    def update_scale(
        self, amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor
    ) -> torch.Tensor:
        """New scales from magnitudes.

        Args:
            amax: fp32 `[N]`.
            scale: Scales in use, fp32 `[N]`; kept where `amax` is 0, infinite or NaN.
            fp8_max: Largest value of each tensor's format, fp32 `[N]`.

        Returns:
            fp32 `[N]`: `fp8_max / 2**margin / amax`, capped at the largest fp32.
        """
        if self.scaling_factor_compute_algo is not None:
            return self.scaling_factor_compute_algo(amax, scale, fp8_max, self)
        fresh = (fp8_max * 2.0**-self.margin / amax).clamp(max=FLT_MAX)
        return torch.where((amax > 0) & torch.isfinite(amax), fresh, scale)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor that is being cast.

    Attributes:
        fp8_format: E4M3 for all tensors, or HYBRID (E5M2 gradients).
        power_2_scale: Round scales down to powers of two.
        amax_epsilon: Lower bound of the magnitude.
        use_power_2_scales: Other spelling of `power_2_scale`.
    """

    fp8_format: Format = Format.HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    use_power_2_scales: InitVar[bool | None] = None

    name = "tensorwise"
    _aliases = ("use_power_2_scales",)

    def __post_init__(self, use_power_2_scales: bool | None) -> None:
        self._check_format()
        if use_power_2_scales is not None:
            object.__setattr__(self, "power_2_scale", use_power_2_scales)
        if not 0.0 <= self.amax_epsilon < float("inf"):
            raise ValueError(
                complaint(
                    "Float8CurrentScaling(amax_epsilon=)",
                    self.amax_epsilon,
                    "It is a lower bound of magnitudes",
                    "Use 0 or a small positive number",
                )
            )

    def scale(self, amax: torch.Tensor, fp8_max: float) -> torch.Tensor:
        """Scale of a tensor from its magnitude."""
        return current_scale(amax, fp8_max, self.power_2_scale, self.amax_epsilon)


def current_scale(
    amax: torch.Tensor, fp8_max: float, power_2_scale: bool = False, epsilon: float = 0.0
) -> torch.Tensor:
    """Scale from the magnitude of the tensor itself.

    Args:
        amax: fp32, any shape.
        fp8_max: Largest value of the format.
        power_2_scale: Round down to a power of two.
        epsilon: Lower bound of `amax`.

    Returns:
        fp32 like `amax`. 1 where `amax` is 0, infinite or NaN; at most the largest fp32.
    """
    if amax.device.type == "cpu" and amax.numel() == 1:
        return _scale_of_one(amax, fp8_max, power_2_scale, epsilon)
    bounded = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    # Not `fp8_max / bounded`: torch computes that as a reciprocal and a product, rounding twice.
    scale = (torch.full_like(bounded, fp8_max) / bounded).clamp(max=FLT_MAX)
    if power_2_scale:
        scale = _floor_to_power_of_two(scale)
    return torch.where((bounded > 0) & torch.isfinite(bounded), scale, torch.ones_like(scale))


def _floor_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def _scale_of_one(
    amax: torch.Tensor, fp8_max: float, power_2_scale: bool, epsilon: float
) -> torch.Tensor:
    """`current_scale` of one number on the CPU, where a number is cheaper than six tensors.

    Dividing in fp64 and rounding to fp32 gives the fp32 quotient: 53 bits are more than twice 24.
    """
    value = amax.item()
    if value < epsilon:
        value = torch.full_like(amax, epsilon).item()
    if value != value or value in (0.0, float("inf")):
        return torch.ones_like(amax)
    scale = torch.full_like(amax, min(fp8_max / value, FLT_MAX))
    return _floor_to_power_of_two(scale) if power_2_scale else scale
