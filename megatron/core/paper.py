"""Tensors on paper: the `meta` device, on which everything has a shape and nothing has a value.

A dry run sends them through the code of a real step. On paper a kernel does what it does on an
accelerator; the few places that look at a value ask here.
"""

from __future__ import annotations

import torch


def number(x: torch.Tensor) -> float:
    """The value of a one-element tensor; 1 on paper."""
    return 1.0 if x.is_meta else float(x)


def numbers(x: torch.Tensor) -> list[float]:
    """The values of a vector; ones on paper."""
    return [1.0] * x.numel() if x.is_meta else [float(value) for value in x.tolist()]


def counts(x: torch.Tensor, total: int) -> list[int]:
    """The values of a vector of counts; on paper about equal parts of `total`."""
    if not x.is_meta:
        return [int(value) for value in x.tolist()]
    share, rest = divmod(total, x.numel())
    return [share + (index < rest) for index in range(x.numel())]
