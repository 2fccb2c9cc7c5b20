"""A linear layer at any tensor-parallel size, on the whole layer's tensors."""

from __future__ import annotations

import torch

from megatron.core.shards import gather_full
from megatron.core.tensor_parallel.mappings import all_gather, split


def run_whole(layer, tp, tensors, *, by_row, sequence_parallel, frozen=False):
    """One forward and backward.

    Args:
        layer: This rank's part, without a bias.
        tp: The tensor-parallel axis.
        tensors: Input `[s, 1, in]`, weight and output gradient of the whole layer.
        by_row: Whether the layer's input is split.
        sequence_parallel: Whether tokens are split outside of it.
        frozen: Whether the weight has no gradient.

    Returns:
        Output, input gradient and weight gradient of the whole layer; frozen, the second again.
    """
    x, weight, d_y = tensors
    layer.weight.requires_grad_(not frozen)
    with torch.no_grad():
        layer.weight.copy_(split(weight, tp, dim=1 if by_row else 0))
    shards = sequence_parallel and tp.size > 1
    local = split(x, tp, dim=-1) if by_row else split(x, tp) if shards else x
    local = local.clone().requires_grad_()
    y, _ = layer(local)
    y.backward(split(d_y, tp, dim=-1) if not by_row else split(d_y, tp) if shards else d_y)
    y, d_x = y.detach(), local.grad
    if by_row:
        d_x = all_gather(d_x, tp, dim=-1)
        y = all_gather(y, tp) if shards else y
    else:
        d_x = all_gather(d_x, tp) if shards else d_x
        y = all_gather(y, tp, dim=-1)
    return y, d_x, d_x if frozen else gather_full(layer.weight.grad, layer.weight, tp)
