"""AdamW whose moments rest in 16 bits and are fp32 only while they are updated.

A moment in bf16 has the range of fp32. One in fp16 has three more bits and less range, so it is
stored with a scale: a power of two that puts the tensor's largest magnitude near the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
_TOP_EXPONENT = 15  # of 2 to 16: the largest magnitude lands in 2^14 .. 2^15
_LOWEST_EXPONENT = -100  # an all but zero tensor needs no finer scale
_ROUNDS_UP = 1.0 + 2.0**-11  # fp16 has 11 significant bits


def scale_of(values: torch.Tensor) -> torch.Tensor:
    """Return the power of two by which an fp32 tensor is divided before it becomes fp16.

    The scale of stored values is never larger than the scale they were stored with, so that
    storing them again, after a checkpoint say, changes nothing.
    """
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    exponent = torch.frexp(amax * _ROUNDS_UP).exponent.clamp(min=_LOWEST_EXPONENT)
    return torch.ldexp(torch.ones_like(amax), exponent - _TOP_EXPONENT)


class CompactAdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay and moments of chosen types.

    Args:
        groups: Parameter groups of fp32 tensors.
        lr: Learning rate.
        betas: Decay of the mean of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        dtypes: Type of each moment: fp32, bf16 or fp16.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        dtypes: dict[str, torch.dtype],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(param, dtype=dtypes[kind])
                    if dtypes[kind] == torch.float16:
                        state[kind + _SCALE] = torch.ones((), device=param.device)

    def is_scaled(self, param: torch.Tensor, kind: str) -> bool:
        """Whether the stored moment is to be multiplied with a scale."""
        return kind + _SCALE in self.state[param]

    def moment(self, param: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a moment in fp32; the stored tensor itself if that is its type."""
        state = self.state[param]
        values: torch.Tensor = state[kind].float()
        return values * state[kind + _SCALE] if self.is_scaled(param, kind) else values

    def set_moment(self, param: torch.Tensor, kind: str, values: torch.Tensor) -> None:
        """Store a moment.

        A square that is too small for fp16 becomes the smallest number there is instead of zero,
        because it is divided by: rounding may make an update smaller, not huge.
        """
        state = self.state[param]
        if self.is_scaled(param, kind):
            scale = scale_of(values)
            values = values / scale
            if kind == "exp_avg_sq":
                tiny = torch.finfo(torch.float16).smallest_normal * 2.0**-10
                values = torch.where(values > 0, values.clamp(min=tiny), values)
            state[kind + _SCALE].copy_(scale)
        if values is not state[kind]:
            state[kind].copy_(values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, one after the other, so that few moments are fp32 at a time."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        mean, square = (self.moment(param, kind) for kind in MOMENTS)
        adamw(
            [param],
            [param.grad],  # type: ignore[list-item]
            [mean],
            [square],
            [],
            [self.state[param]["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        self.set_moment(param, "exp_avg", mean)
        self.set_moment(param, "exp_avg_sq", square)
