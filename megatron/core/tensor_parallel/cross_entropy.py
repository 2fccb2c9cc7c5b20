"""Cross entropy of logits whose vocabulary is split over tensor-parallel ranks.

Works in fp32 on blocks of rows that stay in cache, and keeps the logits and one number a row for
backward, instead of an fp32 softmax of the whole batch.

Shape legend: s sequence, b microbatch, v global padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core.comm_log import LOSS
from megatron.core.errors import DataError, complaint
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce_

_BLOCK_ELEMENTS = 1 << 18  # fp32 elements of one row block: 1 MiB


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    reuse_logits: bool = False,
) -> torch.Tensor:
    """Negative log-probability of each label.

    Columns at and above `vocab_size` exist only to make the vocabulary divisible. They take no part
    in the softmax and get no gradient, so the loss does not depend on how much padding there is.

    Args:
        logits: `[s, b, v / t]`, this rank's columns, in any floating type.
        labels: `[s, b]` integers in `[0, vocab_size)`, the same on every rank of `axis`.
        axis: The axis that splits the columns.
        vocab_size: Number of real tokens.
        reuse_logits: Let backward write the gradient over `logits`, if nothing else reads them.

    Returns:
        `[s, b]` in fp32. On an accelerator a label out of range yields NaN, since looking at it
        would stall the device.

    Raises:
        DataError: If a label is out of range, or shapes do not match.
    """
    if labels.shape != logits.shape[:-1]:
        raise DataError(
            complaint(
                "labels",
                f"shape {tuple(labels.shape)}",
                f"The logits have shape {tuple(logits.shape)}, one label for each row",
                "Pass labels in the layout of the logits, [s, b]",
            )
        )
    if labels.device.type == "cpu" and labels.numel():
        low, high = (int(bound) for bound in torch.aminmax(labels))
        if low < 0 or high >= vocab_size:
            raise DataError(
                complaint(
                    "labels",
                    f"token ids from {low} to {high}",
                    f"The vocabulary has ids 0 to {vocab_size - 1}",
                    "Check that the data was tokenized with this run's tokenizer",
                )
            )
    return _cross_entropy(logits, labels, axis, vocab_size, reuse_logits)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        axis: Axis,
        vocab_size: int,
        reuse_logits: bool,
    ) -> torch.Tensor:
        local_v = logits.shape[-1]
        first = axis.rank * local_v
        real = max(0, min(local_v, vocab_size - first))
        rows = logits.reshape(-1, local_v)[:, :real]
        targets = labels.reshape(-1) - first
        here = (targets >= 0) & (targets < real)
        columns = targets.clamp(0, max(real - 1, 0)).unsqueeze(1)

        # Rows: sum of exponentials, the label's logit if it is here, whether it is here.
        packed = torch.zeros((3, rows.shape[0]), dtype=torch.float32, device=logits.device)
        peak = torch.full_like(packed[0], -torch.inf)
        if real:
            _row_statistics(rows, columns, peak, packed)
            packed[1].masked_fill_(~here, 0.0)
            packed[2].copy_(here)
        if axis.size > 1:
            local_peak = peak.clone()
            all_reduce_(peak, axis, "max", part=LOSS)
            packed[0] *= torch.exp(local_peak - peak)
            all_reduce_(packed, axis, part=LOSS)
        log_sum = packed[0].log_().add_(peak)
        loss = log_sum - packed[1]
        if logits.device.type != "cpu":
            loss = loss.masked_fill_(packed[2] == 0, torch.nan)
        ctx.save_for_backward(logits, columns, here, log_sum)
        ctx.real, ctx.reuse = real, reuse_logits and logits.is_contiguous()
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, columns, here, log_sum = ctx.saved_tensors
        real: int = ctx.real
        source = logits.reshape(-1, logits.shape[-1])
        # Overwriting bumps the version of `logits`: autograd refuses any later use of the values.
        out = source if ctx.reuse else torch.empty_like(source)
        upstream = grad.reshape(-1, 1).float()
        at_label = torch.where(here.unsqueeze(1), -upstream, 0.0)
        if real:
            for block, wide in _row_blocks(source[:, :real]):
                wide.sub_(log_sum[block].unsqueeze(1)).exp_().mul_(upstream[block])
                wide.scatter_add_(1, columns[block], at_label[block])
                out[block, :real] = wide
        out[:, real:] = 0
        return out.view(logits.shape), None, None, None, None


_cross_entropy: Callable[..., torch.Tensor] = _CrossEntropy.apply


def _row_blocks(rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of rows as fp32 copies in one reused buffer; a single block on an accelerator."""
    count, width = rows.shape
    step = max(1, _BLOCK_ELEMENTS // width) if rows.device.type == "cpu" else max(count, 1)
    buffer = torch.empty((min(step, count), width), dtype=torch.float32, device=rows.device)
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        yield block, buffer[: block.stop - start].copy_(rows[block])


def _row_statistics(
    rows: torch.Tensor, columns: torch.Tensor, peak: torch.Tensor, packed: torch.Tensor
) -> None:
    """Fill `peak` (largest logit of each row) and rows 0 and 1 of `packed`."""
    for block, wide in _row_blocks(rows):
        torch.gather(wide, 1, columns[block], out=packed[1][block].unsqueeze(1))
        torch.amax(wide, dim=1, out=peak[block])
        wide.sub_(peak[block].unsqueeze(1)).exp_()
        torch.sum(wide, dim=1, out=packed[0][block])
