"""GPTQ: rounding column by column, where later columns make up for the error of earlier ones.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022). For a layer ``y = W x`` with calibration inputs ``X`` the error of its
output is ``(W - Q) H (W - Q)^T`` with ``H = X X^T``. Arithmetic is in fp64: the inverse of ``H`` is
badly conditioned, and the work is small beside the calibration itself.

Shape legend: o output features, i input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.errors import MegatronError, complaint
from megatron.training.quantization.grid import Grid, Quantized

_BLOCK = 128  # columns whose errors reach the columns behind them in one product


class InputProducts:
    """Sum of ``x x^T`` over the inputs of a layer.

    Args:
        width: Number of input features.
        device: Where the sum lives.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """Start with no input."""
        self.total = torch.zeros((width, width), dtype=torch.float32, device=device)
        self.count = 0

    def add(self, inputs: Tensor) -> None:
        """Add inputs ``[..., i]``."""
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        self.total.addmm_(rows.t(), rows)
        self.count += rows.shape[0]

    def mean(self) -> Tensor:
        """Return the average of ``x x^T`` as fp64 ``[i, i]``."""
        return self.total.double() / max(self.count, 1)


@dataclass(frozen=True)
class Gptq:
    """How GPTQ is to be done.

    Attributes:
        grid: Where the weights may lie.
        damping: Share of the mean diagonal of ``H`` that is added to it.
        act_order: Whether columns with large inputs are rounded first. Groups stay where they are
            in the weight, so that the files are the same as without.
    """

    grid: Grid
    damping: float = 0.01
    act_order: bool = False

    def quantize(self, weight: Tensor, products: Tensor, name: str) -> Quantized:
        """Quantize one weight.

        Inputs that were always zero have no influence, and their columns are rounded to nearest.

        Args:
            weight: ``[o, i]``.
            products: ``[i, i]``, the mean of ``x x^T``.
            name: The weight's, for messages.

        Raises:
            MegatronError: The inputs are not finite, or too few or too alike for this damping.
        """
        values = weight.double()
        order = torch.arange(values.shape[1], device=values.device)
        if self.act_order:
            order = products.diagonal().argsort(descending=True, stable=True)
        factor = self._factor(products, order, name)
        scales, rounded = self._columns(values[:, order], factor, order, self._fixed(values))
        undone = torch.empty_like(rounded)
        undone[:, order] = rounded
        return Quantized(undone, scales)

    def _factor(self, products: Tensor, order: Tensor, name: str) -> Tensor:
        """Upper triangular ``U`` with ``U^T U`` the inverse of the damped ``H``."""
        if not bool(products.isfinite().all()):
            raise MegatronError(
                complaint(
                    name,
                    "inputs that are not finite",
                    "The calibration text drives the model into infinity or NaN",
                    "Check that the model predicts this text at all (tools/evaluate.py)",
                )
            )
        damped = products.double()[order][:, order]
        diagonal = damped.diagonal()
        mean = diagonal.mean()
        dead = diagonal == 0
        diagonal[dead] = 1.0  # a view: the columns stand apart from all others
        diagonal += self.damping * mean
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if int(failed):
            raise MegatronError(
                complaint(
                    "--damping",
                    self.damping,
                    f"The products of the inputs of {name} are not positive definite (column "
                    f"{int(failed)} of {len(order)}): too little calibration text, or inputs that "
                    "depend on each other",
                    "Give a larger --damping, or more calibration text",
                )
            )
        upper: Tensor = factor
        return upper

    def _fixed(self, weight: Tensor) -> Tensor | None:
        """Scales that are chosen before the first column is rounded, if they are."""
        if self.act_order or self.grid.group_size is None:
            return self.grid.all_scales(weight)
        return None

    def _columns(
        self, weight: Tensor, factor: Tensor, order: Tensor, fixed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Round ``weight``, whose columns are in ``order`` already, and return scales and values.

        Without fixed scales those of a group are chosen when its first column is reached, with the
        errors of all columns before it made up for.
        """
        width = self.grid.width(weight.shape[1])
        block = width * max(1, _BLOCK // width) if fixed is None else _BLOCK
        chosen: list[Tensor] = []
        rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        groups = (order // width).tolist()
        scale = torch.empty(0)
        for first in range(0, weight.shape[1], block):
            last = min(first + block, weight.shape[1])
            errors = torch.empty_like(weight[:, first:last])
            for i in range(first, last):
                if fixed is not None:
                    scale = fixed[:, groups[i]].unsqueeze(1)
                elif i % width == 0:
                    scale = self.grid.scales(weight[:, i : i + width])
                    chosen.append(scale)
                column = weight[:, i : i + 1]
                nearest = self.grid.round(column, scale)
                rounded[:, i] = nearest[:, 0].to(torch.int8)
                error = (column - nearest * scale.double()) / factor[i, i]
                weight[:, i + 1 : last] -= error * factor[i, i + 1 : last]
                errors[:, i - first] = error[:, 0]
            weight[:, last:] -= errors @ factor[first:last, last:]
        return torch.cat(chosen, dim=1) if fixed is None else fixed, rounded


def output_error(weight: Tensor, quantized: Quantized, products: Tensor) -> float:
    """Return the error of a layer's output over the output, both as mean squares.

    Args:
        weight: ``[o, i]``.
        quantized: What replaces it.
        products: ``[i, i]``, the mean of ``x x^T``.
    """
    exact = weight.double()
    error = exact - quantized.dequantize().double()
    whole = float(((exact @ products) * exact).sum())
    return float(((error @ products) * error).sum()) / whole if whole > 0 else 0.0


def weight_error(weight: Tensor, quantized: Quantized) -> float:
    """Return the error of a weight over the weight, both as mean squares."""
    exact = weight.double()
    whole = float(exact.square().sum())
    error = float((exact - quantized.dequantize().double()).square().sum())
    return error / whole if whole > 0 else 0.0
