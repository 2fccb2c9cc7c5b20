"""The one place where gradients of a step become final, in the one order that is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed.ddp import DistributedDataParallel, as_chunks
from megatron.core.mesh import Axis, ParallelState
from megatron.core.tensor_parallel.mappings import all_reduce, all_reduce_


def finalize_gradients(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
    mesh: ParallelState,
    num_tokens: torch.Tensor | int,
) -> torch.Tensor:
    """Turn sums of token losses' gradients into the gradient of the mean loss, on every rank.

    1. sum over data- and context-parallel ranks;
    2. sum over tensor-parallel ranks for replicated parameters that saw part of the sequence;
    3. sum over the pipeline stages that hold a copy of a tied embedding;
    4. divide by the number of tokens of the whole batch.

    Args:
        model: The model, or its pipeline chunks.
        mesh: The process mesh.
        num_tokens: Unmasked tokens that this rank saw in the step, over all its microbatches. A
            vector may carry further sums (of losses, say) behind the token count, which saves
            reductions of their own.

    Returns:
        Unmasked tokens of the whole batch, fp32, with the shape of `num_tokens`.
    """
    chunks = as_chunks(model)
    for chunk in chunks:
        chunk.finish_grad_sync()
    params = [p for chunk in chunks for p in chunk.trained_params]
    _sum_together([p for p in params if getattr(p, "sequence_parallel", False)], mesh.tp)
    _sum_together([p for p in params if getattr(p, "shared_embedding", False)], mesh.embedding)
    device = params[0].device if params else torch.device("cpu")
    local = torch.as_tensor(num_tokens, dtype=torch.float32, device=device)
    total = all_reduce(local.detach(), mesh.dp_cp)
    tokens = total if total.dim() == 0 else total[0]
    for chunk in chunks:
        chunk.scale_gradients(1.0 / tokens.clamp(min=1.0))
    return total


def _sum_together(params: list[nn.Parameter], axis: Axis) -> None:
    """All-reduce the gradients of many small parameters in one call."""
    if axis.size == 1 or not params:
        return
    gradients = [p.main_grad for p in params]  # type: ignore[attr-defined]
    flat = all_reduce_(torch.cat([g.reshape(-1) for g in gradients]), axis)
    parts = torch.split(flat, [g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))
