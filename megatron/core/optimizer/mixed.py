"""The optimizer: fp32 master weights behind parameters of any precision.

A step takes the fp32 gradients out of `param.main_grad`, takes the loss scale out of them, skips
when they are not finite, clips, updates the masters and writes them into the parameters. FP32
parameters are their own masters, so nothing is copied for them.

With the distributed optimizer a rank has masters and moments of its own elements of each parameter
only, as flat tensors, and fetches the rest of the parameters after the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.core.mesh import Axis, ParallelState
from megatron.core.optimizer.clip import clip_by_norm_, count_zeros, counts, global_norm
from megatron.core.optimizer.compact import MOMENTS, CompactAdamW
from megatron.core.optimizer.loss_scale import LossScale
from megatron.core.paper import number
from megatron.core.shards import FlatRange, replica_axis

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


class ParamShards(Protocol):
    """Which rank updates which elements, and how the parameters become whole again."""

    def owned_range(self, param: torch.nn.Parameter) -> FlatRange:
        """Return the elements that this rank updates, maybe none."""

    def copies_axis(self, param: torch.nn.Parameter) -> Axis:
        """Return the ranks that update the same elements as this one."""

    def gather_params(self) -> None:
        """Fetch what other ranks updated."""

    def is_in_fp8(self, param: torch.nn.Parameter) -> bool:
        """Whether a weight may rest in FP8, so that only `store_masters` can write it."""

    def store_masters(self, masters: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Make new FP8 weights of their masters. Collective."""

    @property
    def keeps_fp8_weights(self) -> bool:
        """Whether there are such weights."""

    @property
    def is_stale(self) -> bool:
        """Whether FP8 weights have to be made anew although no master has changed."""


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter, its name and its fp32 master (the parameter itself when it is fp32).

    Attributes:
        name: The parameter's name in the model.
        param: The parameter.
        master: fp32, shaped like the parameter, or flat like `owned`.
        owned: The elements this rank updates, None for all.
    """

    name: str
    param: torch.nn.Parameter
    master: torch.Tensor
    owned: FlatRange | None = None

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements, in the master's shape, of a tensor shaped like the parameter."""
        if self.owned is None:
            return tensor
        return tensor.view(-1)[self.owned.start : self.owned.stop]

    @property
    def grad(self) -> torch.Tensor:
        """The gradient of the master."""
        return self.part(self.param.main_grad)  # type: ignore[attr-defined]

    @property
    def value(self) -> torch.Tensor:
        """The elements of the parameter that the master stands for, to be written."""
        return self.part(self.param.detach())

    @property
    def is_own_master(self) -> bool:
        """Whether writing the master is writing the parameter."""
        return self.param.dtype == torch.float32  # no copy was made


def _copies(slot: Slot, shards: ParamShards | None, mesh: ParallelState) -> Axis:
    """Return the ranks that update the same elements of a slot's parameter."""
    return replica_axis(slot.param, mesh) if shards is None else shards.copies_axis(slot.param)


class MixedPrecisionOptimizer:
    """Updates a model's parameters through fp32 masters.

    Args:
        slots: Every trainable parameter of which this rank updates something, in model order.
        inner: A `torch.optim` style optimizer over the masters.
        mesh: The process mesh.
        loss_scale: Factor on the loss that a step takes out of the gradients.
        loss_divisor: Constant divisor of the loss scale (see `backward_scale`).
        clip_grad: Bound on the global gradient norm, 0 for none.
        count_zeros: Whether a step counts zero gradient elements.
        skip_non_finite: Whether non-finite gradients skip the update.
        shards: How parameters are shared between ranks; None when every rank updates all.
        device: Where the parameters are, for a rank that updates none.
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
        shards: ParamShards | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.slots = list(slots)
        self.inner = inner
        self._compact = inner if isinstance(inner, CompactAdamW) else None
        self._loading: dict[tuple[Slot, str], torch.Tensor] = {}
        self.loss_scale = loss_scale
        self._loss_divisor = loss_divisor
        self._world = mesh.world
        self._clip_grad = clip_grad
        self._count_zeros = count_zeros
        self._skip_non_finite = skip_non_finite
        self._counted = [s for s in self.slots if counts(s.param, mesh, _copies(s, shards, mesh))]
        self._in_fp8 = [s for s in self.slots if shards is not None and shards.is_in_fp8(s.param)]
        elsewhere = {s for s in self.slots if s.is_own_master} | set(self._in_fp8)
        self._copied = [s for s in self.slots if s not in elsewhere]
        self._shards = shards
        first = self.slots[0].param.device if self.slots else torch.device("cpu")
        self._device = device or first

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

        Each element of the model enters the norm on one rank, and all ranks get the sum: a
        non-finite element anywhere makes it non-finite everywhere.
        """
        scale = self.backward_scale
        if scale != 1.0 and self.slots:
            torch._foreach_mul_([s.grad for s in self.slots], 1.0 / scale)
        grads = [s.grad for s in self._counted]
        return number(global_norm(grads, self._world, self._device))

    @torch.no_grad()
    def step(self, norm: float | None = None, *, skip: bool = False) -> StepResult:
        """Update the parameters from their `main_grad`.

        Args:
            norm: What `measure` returned for these gradients; None to call it here.
            skip: Leave the parameters alone whatever the gradients are. Every rank must pass the
                same value. Of the loss scale such a step says nothing unless it overflowed.
        """
        if norm is None:
            norm = self.measure()
        overflow = not math.isfinite(norm)
        if overflow or not skip:
            self.loss_scale.update(overflow)
        if skip or (overflow and self._skip_non_finite):
            return StepResult(False, norm, None)
        grads = [s.grad for s in self.slots]
        clip_by_norm_(grads, norm, self._clip_grad)
        zeros = None
        if self._count_zeros:
            counted = [s.grad for s in self._counted]
            zeros = int(number(count_zeros(counted, self._world, self._device)))
        self._update(grads)
        return StepResult(True, norm, zeros)

    def _update(self, grads: Sequence[torch.Tensor]) -> None:
        """Run the inner optimizer and write the masters into the parameters."""
        for slot, grad in zip(self.slots, grads, strict=True):
            slot.master.grad = grad
        if self.slots:
            self.inner.step()
        for slot in self.slots:
            slot.master.grad = None
        # Fused kernels write without bumping the version, by which caches of a weight's quantized
        # form notice a change.
        for slot in self.slots:
            if slot.is_own_master:
                torch.autograd.graph.increment_version(slot.param)
        self.write_model_params()

    @torch.no_grad()
    def write_model_params(self) -> None:
        """Write the masters into the parameters, rounding to the parameters' precision.

        Collective with the distributed optimizer: other ranks' elements are fetched.
        """
        if self._copied:
            torch._foreach_copy_([s.value for s in self._copied], [s.master for s in self._copied])
        if self._shards is not None:
            self._shards.store_masters({s.param: s.master for s in self._in_fp8})
            self._shards.gather_params()

    def refresh_model_params(self) -> None:
        """Make FP8 weights anew if scales or precisions have changed since. Collective.

        Before a forward pass that may see such a change; after an update it is not needed.
        """
        if self._shards is not None and self._shards.is_stale:
            self.write_model_params()

    @torch.no_grad()
    def reload_model_params(
        self, fp8_values: Mapping[str, tuple[torch.Tensor, FlatRange]] | None = None
    ) -> None:
        """Take the masters from the parameters, e.g. after weights were loaded without masters.

        Collective with weights that rest in FP8: they are made anew.

        Args:
            fp8_values: What `fp8_values` returned, since these parameters have no numbers.
        """
        if self._copied:
            torch._foreach_copy_([s.master for s in self._copied], [s.value for s in self._copied])
        for slot in self._in_fp8:
            slot.master.copy_((fp8_values or {})[slot.name][0])
        if self._shards is not None and self._shards.keeps_fp8_weights:
            self.write_model_params()

    @torch.no_grad()
    def fp8_values(self) -> dict[str, tuple[torch.Tensor, FlatRange]]:
        """Return the weights that rest in FP8, as far as this rank owns them, by name.

        Flat, rounded to the parameters' type: copies, which `reload_model_params` takes over.
        """
        return {
            s.name: (s.master.to(s.param.dtype), s.owned)
            for s in self._in_fp8
            if s.owned is not None
        }

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the global norm of the masters."""
        masters = [s.master for s in self._counted]
        return number(global_norm(masters, self._world, self._device))

    @property
    def owned_ranges(self) -> dict[str, FlatRange]:
        """Which elements the tensors of `named_state` are, by name, where they are not all."""
        return {s.name: s.owned for s in self.slots if s.owned is not None}

    def named_state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield every parameter's name with its tensors, to be read.

        ``param`` is the fp32 master; the others (``exp_avg``, ``exp_avg_sq`` or
        ``momentum_buffer``) have the same local shape, which is flat for names in `owned_ranges`.
        They are live, except that moments stored with a scale are fp32 copies.
        """
        for slot in self.slots:
            yield slot.name, self._tensors(slot)

    @property
    def lends_copies(self) -> bool:
        """Whether some tensors of `named_state` are not live."""
        return self._compact is not None and any(self._scaled_kinds(slot) for slot in self.slots)

    def loadable_state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield what `named_state` does, to be written into; call `finish_load` afterwards."""
        self._loading = {}
        for slot in self.slots:
            tensors = self._tensors(slot)
            self._loading.update({(slot, k): tensors[k] for k in self._scaled_kinds(slot)})
            yield slot.name, tensors

    def finish_load(self) -> None:
        """Take over what was written into `loadable_state`, the model's parameters included."""
        for (slot, kind), tensor in self._loading.items():
            if self._compact is not None:
                self._compact.set_moment(slot.master, kind, tensor)
        self._loading = {}
        self.write_model_params()

    def _tensors(self, slot: Slot) -> dict[str, torch.Tensor]:
        state = self.inner.state[slot.master]
        tensors = {key: state[key] for key in _TENSOR_STATE if key in state}
        for kind in self._scaled_kinds(slot):
            if self._compact is not None:
                tensors[kind] = self._compact.moment(slot.master, kind)
        return {"param": slot.master.detach(), **tensors}

    def _scaled_kinds(self, slot: Slot) -> list[str]:
        compact = self._compact
        return [k for k in MOMENTS if compact is not None and compact.is_scaled(slot.master, k)]

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
