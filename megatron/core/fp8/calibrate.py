"""Magnitudes of a layer that is held in high precision, so that delayed scales stay up to date.

While such a layer is held back no cast sees its tensors, and the scales of the last FP8 step would
be those with which it starts again: what grew in the meantime would saturate. So its tensors are
measured where they would have been cast, and histories and scales go on as if they had been.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.recipe import Role


def calibrates(precision: LinearPrecision) -> bool:
    """Whether a layer is to be measured now."""
    held = precision.state.enabled and bool(precision.held_back)
    return held and precision.slots is not None


def measure(precision: LinearPrecision, role: Role, x: torch.Tensor) -> None:
    """Record the magnitude of a tensor of a layer that is held back; nothing of any other."""
    if not calibrates(precision) or not precision.state.recording or not x.numel():
        return
    if role is Role.WEIGHT:
        key = (x.data_ptr(), x._version, precision.state.generation)
        if precision.measured_weight == key:
            return
        precision.measured_weight = key
    if precision.slots is not None:
        precision.slots.of(role).record(kernels.amax(x.detach()))


def measure_forward(precision: LinearPrecision, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Record what a forward pass in FP8 would have recorded."""
    measure(precision, Role.INPUT, x)
    measure(precision, Role.WEIGHT, weight)


def measure_gradient(precision: LinearPrecision, y: torch.Tensor) -> None:
    """Record, in the backward pass, the gradient of a layer's output."""
    hooked: Any = y
    if calibrates(precision) and y.requires_grad:
        hooked.register_hook(lambda grad: measure(precision, Role.GRAD_OUTPUT, grad))
