"""Do ranks that share scales have the same ones? Asked now and then, one small reduction each time.

They do by construction. A rank that does not (broken memory, a faulty link, code that changed
a scale on one rank only) quantizes what others gather with a scale of its own, and nothing but the
loss would tell.
"""

from __future__ import annotations

import torch

from megatron.core.comm_log import AMAX
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.amax import AmaxBook
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce_, gather_objects


def _bits(x: torch.Tensor) -> torch.Tensor:
    """fp32 as the integers of its bits: NaN equals NaN, and every difference shows."""
    return x.contiguous().view(torch.int32).long()


def _fingerprint(book: AmaxBook) -> torch.Tensor:
    """`[2, N]`, int64: the scale of each column, and a sum over its history that knows the rows."""
    history = _bits(book.history)
    weights = torch.arange(1, history.shape[0] + 1, device=history.device)
    return torch.stack([_bits(book.scale), (history * weights.unsqueeze(1)).sum(0)])


def check_agreement(book: AmaxBook, axis: Axis, label: str) -> None:
    """Compare scales and histories bit by bit. Collective over `axis`.

    Args:
        book: This rank's.
        axis: Ranks that share its scales.
        label: This rank's name.

    Raises:
        PrecisionError: They differ; names the first such tensor, and the ranks with their scales.
            On every rank of the axis.
    """
    if axis.size == 1 or not book.recipe.reduce_amax or not book.scale.numel():
        return
    own = _fingerprint(book)
    # Smallest and largest value in one reduction: the minimum is the negated maximum.
    ends = all_reduce_(torch.stack([own, -own]), axis, "max", AMAX)
    wrong = (ends[0] != -ends[1]).any(0)
    if wrong.is_meta or not bool(wrong.any()):
        return
    column = int(wrong.nonzero()[0])
    scales = gather_objects((label, float(book.scale[column])), axis)
    listed = ", ".join(f"[{name}] {scale:.9g}" for name, scale in scales)
    raise PrecisionError(
        complaint(
            f"FP8 scale of {book.names()[column]}",
            listed,
            f"These ranks share it, and {int(wrong.sum())} of {wrong.numel()} tensors differ in"
            " scale or history",
            "Look for faulty hardware or for code that changes scales on one rank; resume from the"
            " last checkpoint",
        )
    )
