"""Data parallelism: gradients accumulate in fp32 buffers and are summed once per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.buffers import GradBuffer
from megatron.core.mesh import Axis


class DistributedDataParallel(nn.Module):
    """A module whose gradients accumulate in `param.main_grad`.

    Layers may add to `main_grad` themselves and give autograd nothing; an ordinary gradient is
    added when autograd has accumulated it, and freed. A tied parameter occurs once. Nothing is
    averaged here: `finalize_gradients` divides by the number of tokens.

    Args:
        module: The model; its parameters exist and stay the same objects.
        dp_axis: Ranks that hold copies of the dense parameters and see other tokens: data- and
            context-parallel ones.
        expert_dp_axis: The same for expert parameters (attribute `allreduce` false).
        reduce_dtype: Type of gradients on the wire.
    """

    def __init__(
        self,
        module: nn.Module,
        dp_axis: Axis,
        *,
        expert_dp_axis: Axis | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.module = module
        trained = [p for p in module.parameters() if p.requires_grad]
        dense = [p for p in trained if getattr(p, "allreduce", True)]
        expert = [p for p in trained if not getattr(p, "allreduce", True)]
        self.buffers_by_axis = [GradBuffer(dense, dp_axis, reduce_dtype)]
        if expert:
            axis = expert_dp_axis or dp_axis
            self.buffers_by_axis.append(GradBuffer(expert, axis, reduce_dtype))
        for param in trained:
            hooked: Any = param
            hooked.register_post_accumulate_grad_hook(_into_main_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    @property
    def trained_params(self) -> list[nn.Parameter]:
        """Parameters with a `main_grad`, each once."""
        return [p for buffer in self.buffers_by_axis for p in buffer.params]

    def zero_grad_buffer(self) -> None:
        """Forget all gradients; call it before the first microbatch of a step."""
        for buffer in self.buffers_by_axis:
            buffer.zero()
        for param in self.trained_params:
            param.grad = None
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def finish_grad_sync(self) -> None:
        """Sum gradients over the data-parallel ranks; call it after the last microbatch."""
        for buffer in self.buffers_by_axis:
            buffer.all_reduce()

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply all gradients."""
        for buffer in self.buffers_by_axis:
            buffer.scale(factor)


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without the data-parallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def as_chunks(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
) -> list[DistributedDataParallel]:
    """A model's chunks, whether it came as one or as several."""
    return [model] if isinstance(model, DistributedDataParallel) else list(model)


def _into_main_grad(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
