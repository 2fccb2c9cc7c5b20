"""A norm and the cast of its result in one kernel, as one node of the graph.

Nothing but the FP8 bytes of the norm's result is ever written. What goes on to the linear layer is
a stand-in: a tensor of the result's shape without memory, to which gradients belong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.kernels import Normed
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.quantizers import Quantizer
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.norm_functions import has_norm_grad, norm_grad


@dataclass(frozen=True)
class NormedInput:
    """The input of a linear layer after its norm.

    Attributes:
        stand_in: `[..., h]` without values.
        row: The values, quantized along `h`, `[rows, h]`.
    """

    stand_in: torch.Tensor
    row: QuantizedTensor


def norm_and_cast(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool,
    precision: LinearPrecision,
    axis: Axis | None = None,
) -> NormedInput | None:
    """Norm and cast `x` in one pass where layer, recipe and device allow it.

    Args:
        x: `[..., h]`.
        weight: `[h]`.
        shift: `[h]` for a layer norm, None for an RMS norm.
        eps: Added to the variance or mean square.
        zero_centered: Whether `weight` holds the scale minus one.
        precision: Of the linear layer that follows.
        axis: Ranks whose rows that layer gathers.

    Returns:
        None where norm and cast have to be two steps.
    """
    if not precision.active or not precision.decision.wgrad:
        return None  # without an FP8 weight gradient the layer needs the values themselves
    quantizer = precision.quantizer(Role.INPUT)
    able = quantizer.hardware and quantizer.casts_norms and kernels.can_norm(x)
    if not able or not has_norm_grad(x.device, shift is not None):
        return None
    made = _norm_and_cast(x, weight, shift, eps, zero_centered, quantizer, axis)
    return NormedInput(made[0], QuantizedTensor(made[1], made[2], quantizer.fmt))


class _NormAndCast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor | None,
        eps: float,
        zero_centered: bool,
        quantizer: Quantizer,
        axis: Axis | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        normed: list[Normed] = []

        def norm(scale: torch.Tensor | None) -> Normed:
            centered, fmt = shift is not None, quantizer.fmt
            kinds = {"centered": centered, "zero_centered": zero_centered}
            normed.append(kernels.norm(rows, weight, shift, eps, scale=scale, fmt=fmt, **kinds))
            return normed[0]

        row = quantizer.cast_norm(norm, axis=axis)
        ctx.save_for_backward(x, weight, shift, normed[0].mean, normed[0].inverse)
        ctx.zero_centered = zero_centered
        ctx.mark_non_differentiable(row.data, row.scale_inv)
        return x.new_zeros(()).expand(x.shape), row.data, row.scale_inv

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, shift, mean, inverse = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dx, dweight, dshift = norm_grad(
            grads[0].reshape(rows.shape),
            rows,
            weight,
            shift,
            mean,
            inverse,
            zero_centered=ctx.zero_centered,
        )
        return dx.view(x.shape), dweight, dshift, None, None, None, None


_norm_and_cast: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _NormAndCast.apply
