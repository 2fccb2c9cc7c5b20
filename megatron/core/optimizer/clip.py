"""Global norms, zero counts and clipping of gradients that are spread over many ranks.

Every element of the model is counted by exactly one rank of the world: of a parameter that several
ranks hold alike, the first of them counts; of one that is split, each counts its part. One sum
over the world then gives the total, whatever mixture of axes the parameters lie on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.core.comm_log import OPTIMIZER
from megatron.core.mesh import Axis, ParallelState
from megatron.core.shards import is_counted_here, shard_axis
from megatron.core.tensor_parallel.mappings import all_reduce_


def counts(param: torch.Tensor, mesh: ParallelState, copies: Axis) -> bool:
    """Return whether this rank counts what it updates of `param` in global sums.

    Args:
        param: The parameter.
        mesh: The process mesh.
        copies: Ranks that see other tokens and update the same elements of the parameter.
    """
    return copies.is_first and is_counted_here(param, shard_axis(param, mesh))


def global_norm(tensors: Iterable[torch.Tensor], world: Axis, device: torch.device) -> torch.Tensor:
    """Return the L2 norm over the whole model as an fp32 scalar on `device`. Collective.

    Args:
        tensors: This rank's tensors, each element of the model on one rank only (see `counts`).
        world: All ranks.
        device: Where to compute when this rank has no tensor.
    """
    local = list(tensors)
    total = torch.zeros((), device=device)
    if local:
        total = torch.stack(torch._foreach_norm(local, dtype=torch.float32)).square().sum()
    return all_reduce_(total, world, part=OPTIMIZER).sqrt()


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


def count_zeros(tensors: Iterable[torch.Tensor], world: Axis, device: torch.device) -> torch.Tensor:
    """Return how many elements of the whole model are exactly zero, as an int64 scalar.

    Args:
        tensors: This rank's tensors, each element of the model on one rank only (see `counts`).
        world: All ranks.
        device: Where to count when this rank has no tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total += tensor.numel() - torch.count_nonzero(tensor)
    return all_reduce_(total, world, part=OPTIMIZER)
