"""Global norms, zero counts and clipping of sharded gradients.

Every element of the global model counts once: a parameter that all tensor-parallel ranks hold in
full is counted by the first of them only, and the sums are then reduced over the model-parallel
axes. Gradients are summed over data-parallel ranks before they come here; with the distributed
optimizer each of these ranks holds a part of the sums, and the parts are added up first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.core.comm_log import OPTIMIZER
from megatron.core.mesh import Axis, ParallelState
from megatron.core.shards import is_counted_here
from megatron.core.tensor_parallel.mappings import all_reduce_

Sharded = Iterable[tuple[Axis, Iterable[torch.Tensor]]]


def _sum(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    return all_reduce_(value, axis, part=OPTIMIZER)


def _sum_over_model(value: torch.Tensor, mesh: ParallelState) -> torch.Tensor:
    """Sum `value` in place over the ranks that hold different parts of the model."""
    return _sum(_sum(value, mesh.tp), mesh.pp)


def counted(params: Iterable[torch.Tensor], mesh: ParallelState) -> list[torch.Tensor]:
    """Return the parameters that this rank counts in global sums."""
    return [p for p in params if is_counted_here(p, mesh.tp)]


def global_norm(
    tensors: Iterable[torch.Tensor],
    mesh: ParallelState,
    device: torch.device,
    sharded: Sharded = (),
) -> torch.Tensor:
    """Return the L2 norm over the whole model as an fp32 scalar on `device`.

    Args:
        tensors: This rank's tensors, each element of the model on one rank only (see `counted`).
        mesh: The process mesh.
        device: Where to compute when this rank has no tensor.
        sharded: Further tensors, of which the ranks of an axis hold disjoint parts. Every rank
            names the same axes in the same order.
    """
    total = _sum_of_squares(tensors, device)
    for axis, parts in sharded:
        total = total + _sum(_sum_of_squares(parts, device), axis)
    return _sum_over_model(total, mesh).sqrt()


def _sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    local = list(tensors)
    if not local:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(local, dtype=torch.float32)).square().sum()


def clip_by_norm_(tensors: Iterable[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale `tensors` in place so that their global norm is at most `max_norm`.

    Args:
        tensors: Any iterable of gradients, a generator included.
        norm: Their global norm.
        max_norm: The bound; 0 or less leaves the gradients alone.
    """
    coefficient = max_norm / (norm + 1e-6)
    local = list(tensors)
    if local and max_norm > 0.0 and coefficient < 1.0:
        torch._foreach_mul_(local, coefficient)


def count_zeros(
    tensors: Iterable[torch.Tensor],
    mesh: ParallelState,
    device: torch.device,
    sharded: Sharded = (),
) -> torch.Tensor:
    """Return how many elements of the whole model are exactly zero, as an int64 scalar.

    Args:
        tensors: This rank's tensors, each element of the model on one rank only (see `counted`).
        mesh: The process mesh.
        device: Where to count when this rank has no tensor.
        sharded: As for `global_norm`.
    """
    total = _zeros(tensors, device)
    for axis, parts in sharded:
        total = total + _sum(_zeros(parts, device), axis)
    return _sum_over_model(total, mesh)


def _zeros(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total += tensor.numel() - torch.count_nonzero(tensor)
    return total
