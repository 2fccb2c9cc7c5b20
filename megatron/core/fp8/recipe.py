"""FP8 recipes: how the scale of each tensor is found.

A scale multiplies when a tensor is quantized (`q = round(x * scale)`); its inverse multiplies when
the tensor is read back. Only the inverse leaves a quantizer.

Source: the formulas follow NVIDIA Transformer Engine's delayed and per-tensor current scaling.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import InitVar, dataclass, fields
from enum import Enum
from typing import Any

import torch

from megatron.core.errors import complaint
from megatron.core.fp8.formats import Format, Fp8Format
from megatron.core.fp8.scales import FLT_MAX, BlockScaling, ScaleRule, current_scale

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
    #: Beginning of the names of its products in tables.
    family = "fp8"

    @property
    def exact_in_bf16(self) -> bool:
        """Whether the `fast` emulation may multiply in bf16."""
        return True

    @property
    def format_name(self) -> str:
        """Name of the format in flags and checkpoints."""
        return self.fp8_format.name.lower()

    @property
    def is_random(self) -> bool:
        """Whether it rounds any tensor at random."""
        return False

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

    def _require(self, field: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a value of a field that is none of the allowed ones."""
        value = getattr(self, field)
        if value not in allowed:
            fix = f"Use {' or '.join(str(choice) for choice in allowed)}"
            raise ValueError(complaint(f"{type(self).__name__}({field}=)", value, why, fix))


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


class BlockRecipe(Recipe, ABC):
    """Base of the recipes with a scale for each block of a tensor, found as it is cast."""

    @abstractmethod
    def blocks_of(self, role: Role) -> BlockScaling:
        """How tensors of `role` are divided."""


@dataclass(frozen=True)
class Float8BlockScaling(BlockRecipe):
    """A scale for each 128 elements of a row, and for each 128 x 128 of a weight.

    Attributes:
        use_f32_scales: Keep scales as they are, instead of rounding them down to powers of two.
            Products then run in fp32 where they are emulated.
        fp8_format: E4M3 for all tensors, or HYBRID (E5M2 gradients).
        x_block_scaling_dim: Dimensions of an input's blocks; 1.
        w_block_scaling_dim: Dimensions of a weight's blocks; 1 or 2.
        grad_block_scaling_dim: Dimensions of an output gradient's blocks; 1.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    name = "blockwise"
    length = 128

    def __post_init__(self) -> None:
        self._check_format()
        why = "Inputs and gradients have blocks along rows, in either direction"
        self._require("x_block_scaling_dim", (1,), why)
        self._require("grad_block_scaling_dim", (1,), why)
        self._require("w_block_scaling_dim", (1, 2), "A block is part of a row, or a square")

    @property
    def exact_in_bf16(self) -> bool:
        """See the base class."""
        return not self.use_f32_scales

    def blocks_of(self, role: Role) -> BlockScaling:
        """See the base class."""
        square = role is Role.WEIGHT and self.w_block_scaling_dim == 2
        rule = ScaleRule.FP32 if self.use_f32_scales else ScaleRule.POWER_OF_TWO
        return BlockScaling(self.length, square, rule)


@dataclass(frozen=True)
class MXFP8BlockScaling(BlockRecipe):
    """A power-of-two scale (E8M0) for each 32 elements of a row, weights included.

    Attributes:
        margin: There is none; 0.
        fp8_format: E4M3 for all tensors, or HYBRID (E5M2 gradients).
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3

    name = "mxfp8"
    length = 32

    def __post_init__(self) -> None:
        self._check_format()
        self._require("margin", (0,), "Scales are the smallest that let nothing saturate")

    def blocks_of(self, role: Role) -> BlockScaling:
        """See the base class."""
        del role
        return BlockScaling(self.length, False, ScaleRule.E8M0)
