"""The one place where gradients of a step become final, in the one order that is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.comm_log import GRADIENT_SYNC, LOSS
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
    _sum_together(_summed(chunks, "sequence_parallel"), mesh.tp)
    _sum_together(_summed(chunks, "shared_embedding"), mesh.embedding)
    params = [p for chunk in chunks for p in chunk.trained_params]
    device = params[0].device if params else torch.device("cpu")
    local = torch.as_tensor(num_tokens, dtype=torch.float32, device=device)
    total = all_reduce(local.detach(), mesh.dp_cp, part=LOSS)
    tokens = total if total.dim() == 0 else total[0]
    for chunk in chunks:
        chunk.scale_gradients(1.0 / tokens.clamp(min=1.0))
    return total


def _summed(chunks: Sequence[DistributedDataParallel], mark: str) -> list[torch.Tensor]:
    """Return what this rank keeps of the gradients of all parameters with the attribute `mark`.

    Ranks that differ only in their tensor-parallel index keep the same elements, and so do the
    pipeline stages that hold a copy of an embedding.
    """
    return [
        chunk.summed_grad(param)
        for chunk in chunks
        for param in chunk.trained_params
        if getattr(param, mark, False)
    ]


def _sum_together(gradients: list[torch.Tensor], axis: Axis) -> None:
    """All-reduce many small gradients in one call."""
    if axis.size == 1 or not any(g.numel() for g in gradients):
        return
    flat = all_reduce_(torch.cat(gradients), axis, part=GRADIENT_SYNC)
    parts = torch.split(flat, [g.numel() for g in gradients])
    torch._foreach_copy_(gradients, list(parts))
