"""The optimizer: fp32 master weights behind parameters of any precision.

A step takes the fp32 gradients out of `param.main_grad`, takes the loss scale out of them, skips
when they are not finite, clips, updates the masters and writes them into the parameters. FP32
parameters are their own masters, so nothing is copied for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.mesh import ParallelState
from megatron.core.optimizer.clip import clip_by_norm_, count_zeros, counted, global_norm
from megatron.core.optimizer.loss_scale import LossScale

# Per-parameter optimizer state that has the parameter's shape.
_TENSOR_STATE = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step.

    Attributes:
        success: False when the step was skipped.
        grad_norm: Global gradient norm before clipping.
        num_zeros: Zero elements of the gradients after clipping, None when not counted.
    """

    success: bool
    grad_norm: float
    num_zeros: int | None


@dataclass(frozen=True)
class Slot:
    """One parameter, its name and its fp32 master (the parameter itself when it is fp32)."""

    name: str
    param: torch.nn.Parameter
    master: torch.Tensor


class MixedPrecisionOptimizer:
    """Updates a model's parameters through fp32 masters.

    Args:
        slots: Every trainable parameter of this rank, in model order.
        inner: A `torch.optim` style optimizer over the masters.
        mesh: The process mesh.
        loss_scale: Factor on the loss that a step takes out of the gradients.
        loss_divisor: Constant divisor of the loss scale (see `backward_scale`).
        clip_grad: Bound on the global gradient norm, 0 for none.
        count_zeros: Whether a step counts zero gradient elements.
        skip_non_finite: Whether non-finite gradients skip the update.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        inner: torch.optim.Optimizer,
        *,
        mesh: ParallelState,
        loss_scale: LossScale,
        loss_divisor: float = 1.0,
        clip_grad: float = 1.0,
        count_zeros: bool = False,
        skip_non_finite: bool = True,
    ) -> None:
        self.slots = list(slots)
        self.inner = inner
        self.loss_scale = loss_scale
        self._loss_divisor = loss_divisor
        self._mesh = mesh
        self._clip_grad = clip_grad
        self._count_zeros = count_zeros
        self._skip_non_finite = skip_non_finite
        counted_ids = {id(p) for p in counted((s.param for s in self.slots), mesh)}
        self._counted = [s for s in self.slots if id(s.param) in counted_ids]
        self._copied = [s for s in self.slots if s.master is not s.param]
        self._device = self.slots[0].param.device if self.slots else torch.device("cpu")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups whose `lr` and `weight_decay` a scheduler writes."""
        return self.inner.param_groups

    @property
    def backward_scale(self) -> float:
        """Factor with which backward starts, so that FP16 gradients stay in range.

        Losses are summed over tokens; the divisor turns the sum into about a mean, which is what
        usual loss scales are made for.
        """
        return self.loss_scale.value / self._loss_divisor

    @torch.no_grad()
    def measure(self) -> float:
        """Take the loss scale out of the gradients and return their global norm. Collective.

        The norm is reduced over every rank that holds part of the model, and replicas hold equal
        gradients: a non-finite element anywhere makes it non-finite on every rank.
        """
        scale = self.backward_scale
        if scale != 1.0 and self.slots:
            torch._foreach_mul_([_main_grad(s) for s in self.slots], 1.0 / scale)
        grads = [_main_grad(s) for s in self._counted]
        return float(global_norm(grads, self._mesh, self._device))

    @torch.no_grad()
    def step(self, norm: float | None = None, *, skip: bool = False) -> StepResult:
        """Update the parameters from their `main_grad`.

        Args:
            norm: What `measure` returned for these gradients; None to call it here.
            skip: Leave the parameters alone whatever the gradients are. Every rank must pass the
                same value.
        """
        if norm is None:
            norm = self.measure()
        overflow = not math.isfinite(norm)
        self.loss_scale.update(overflow)
        if skip or (overflow and self._skip_non_finite):
            return StepResult(False, norm, None)
        grads = [_main_grad(s) for s in self.slots]
        clip_by_norm_(grads, norm, self._clip_grad)
        zeros = None
        if self._count_zeros:
            counted_grads = [_main_grad(s) for s in self._counted]
            zeros = int(count_zeros(counted_grads, self._mesh, self._device))
        self._update(grads)
        return StepResult(True, norm, zeros)

    def _update(self, grads: Sequence[torch.Tensor]) -> None:
        """Run the inner optimizer and write the masters into the parameters."""
        for slot, grad in zip(self.slots, grads, strict=True):
            slot.master.grad = grad
        self.inner.step()
        for slot in self.slots:
            slot.master.grad = None
        # Fused kernels write without bumping the version, by which caches of a weight's quantized
        # form notice a change.
        for slot in self.slots:
            if slot.master is slot.param:
                torch.autograd.graph.increment_version(slot.param)
        self.write_model_params()

    @torch.no_grad()
    def write_model_params(self) -> None:
        """Write the masters into the parameters, rounding to the parameters' precision."""
        if self._copied:
            torch._foreach_copy_([s.param for s in self._copied], [s.master for s in self._copied])

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Take the masters from the parameters, e.g. after weights were loaded without masters."""
        if self._copied:
            torch._foreach_copy_([s.master for s in self._copied], [s.param for s in self._copied])

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the global norm of the masters."""
        return float(global_norm((s.master for s in self._counted), self._mesh, self._device))

    def named_state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield every parameter's name with its live fp32 tensors.

        ``param`` is the master; the others (``exp_avg``, ``exp_avg_sq`` or ``momentum_buffer``)
        have the same local shape. Writing into them is how a checkpoint is loaded; call
        `write_model_params` afterwards.
        """
        for slot in self.slots:
            state = self.inner.state[slot.master]
            tensors = {key: state[key] for key in _TENSOR_STATE if key in state}
            yield slot.name, {"param": slot.master.detach(), **tensors}

    def scalars(self) -> dict[str, Any]:
        """Return the step count and the loss scale's state as plain values."""
        return {"step": self._step_count(), **self.loss_scale.state_dict()}

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """Continue from what `scalars` returned."""
        self.loss_scale.load_state_dict(values)
        steps = int(values["step"])
        for slot in self.slots:
            state = self.inner.state[slot.master]
            if "step" in state:
                state["step"].fill_(float(steps))
        for group in self.param_groups:
            if "step" in group:
                group["step"] = steps

    def _step_count(self) -> int:
        """Return how many updates the inner optimizer made, as far as it counts them."""
        for group in self.param_groups:
            if "step" in group:
                return int(group["step"])
        for slot in self.slots:
            if "step" in self.inner.state[slot.master]:
                return int(self.inner.state[slot.master]["step"])
        return 0


def _main_grad(slot: Slot) -> torch.Tensor:
    grad: torch.Tensor = slot.param.main_grad  # type: ignore[attr-defined]
    return grad
