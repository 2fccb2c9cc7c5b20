"""AdamW whose moments rest in few bits and are fp32 only while they are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from megatron.core.optimizer.moments import FP8, fp8_storage, from_fp8, to_fp8, to_fp16
from megatron.core.tensor_parallel.random import derive_seed

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"


class CompactAdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay and moments of chosen types.

    Args:
        groups: Parameter groups of fp32 tensors.
        lr: Learning rate.
        betas: Decay of the mean of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        dtypes: Type of each moment: fp32, bf16, fp16 or fp8 (E4M3).
        names: Names of the parameters, the same wherever a copy of one is updated; needed for fp8.
        seed: What random rounding depends on besides the name and the step.
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
        names: Mapping[torch.Tensor, str] | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        self._names, self._seed = dict(names or {}), seed
        for group in self.param_groups:
            group["step"] = 0
            for param in group["params"]:
                state = self.state[param]
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                for kind in MOMENTS:
                    if dtypes[kind] == FP8:
                        state[kind], state[kind + _SCALE] = fp8_storage(param)
                        continue
                    state[kind] = torch.zeros_like(param, dtype=dtypes[kind])
                    if dtypes[kind] == torch.float16:
                        state[kind + _SCALE] = torch.ones((), device=param.device)

    def is_scaled(self, param: torch.Tensor, kind: str) -> bool:
        """Whether the stored moment is to be multiplied with a scale."""
        return kind + _SCALE in self.state[param]

    def moment(self, param: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a moment in fp32; the stored tensor itself if that is its type."""
        state = self.state[param]
        stored: torch.Tensor = state[kind]
        if stored.dtype == FP8:
            return from_fp8(stored, state[kind + _SCALE], param.shape, kind == "exp_avg_sq")
        values = stored.float()
        return values * state[kind + _SCALE] if self.is_scaled(param, kind) else values

    def set_moment(
        self,
        param: torch.Tensor,
        kind: str,
        values: torch.Tensor,
        noise: torch.Generator | None = None,
    ) -> None:
        """Store a moment.

        Args:
            param: The parameter.
            kind: One of `MOMENTS`.
            values: fp32, shaped like the parameter.
            noise: Source of random rounding, used for fp8; None for the nearest number.
        """
        state, squares = self.state[param], kind == "exp_avg_sq"
        stored: torch.Tensor = state[kind]
        if stored.dtype == FP8:
            to_fp8(values, stored, state[kind + _SCALE], squares, noise)
        elif stored.dtype == torch.float16:
            values, scale = to_fp16(values, squares)
            state[kind + _SCALE].copy_(scale)
            stored.copy_(values)
        elif values is not stored:
            stored.copy_(values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, one after the other, so that few moments are fp32 at a time."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] += 1
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
        for kind, values in zip(MOMENTS, (mean, square), strict=True):
            self.set_moment(param, kind, values, self._noise(param, kind, group["step"]))

    def _noise(self, param: torch.Tensor, kind: str, step: int) -> torch.Generator | None:
        if self.state[param][kind].dtype != FP8 or param.is_meta:
            return None
        seed = derive_seed("moment", self._seed, self._names[param], kind, step)
        return torch.Generator(param.device).manual_seed(seed)
