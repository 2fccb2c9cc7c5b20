"""Names of layers, with their precision, where profilers see them.

On CUDA each name is an NVTX range, which Nsight Systems shows; everywhere it is a record of
`torch.profiler`. A name is the module's path, what it does, and in which precision:
`decoder.layers.0.mlp.linear_fc1 forward [fp8 e4m3xe4m3 delayed]`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from megatron.core.fp8.precision import LinearPrecision


class Ranges:
    """Opens and closes named ranges.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvtx = torch.cuda.nvtx if device.type == "cuda" else None
        self._open = threading.local()  # a backward pass on CUDA has a thread of its own

    def push(self, name: str) -> None:
        """Open a range inside those that are open."""
        record: Any = record_function(name)
        record.__enter__()
        self._stack().append(record)
        if self._nvtx is not None:
            self._nvtx.range_push(name)

    def pop(self) -> None:
        """Close the range that was opened last."""
        if self._nvtx is not None:
            self._nvtx.range_pop()
        self._stack().pop().__exit__(None, None, None)

    def _stack(self) -> list[Any]:
        if not hasattr(self._open, "records"):
            self._open.records = []
        records: list[Any] = self._open.records
        return records

    def attach(self, model: nn.Module, precisions: Mapping[str, str]) -> None:
        """Name the forward of every module but lists.

        Args:
            model: Its modules' names are paths.
            precisions: Path to precision, of modules that have no `LinearPrecision`.
        """
        for path, module in model.named_modules():
            if path and not isinstance(module, nn.ModuleList):
                layer = _precision_of(module)
                self._name(module, path, layer, precisions.get(path, ""))

    def _name(
        self, module: nn.Module, path: str, layer: LinearPrecision | None, fixed: str
    ) -> None:
        def enter(*_: Any) -> None:
            precision = fixed if layer is None else layer.row("fprop").delivered
            self.push(f"{path} forward" + (f" [{precision}]" if precision else ""))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda *_: self.pop(), always_call=True)

    def backward(self, path: str, layer: LinearPrecision, y: torch.Tensor) -> None:
        """Name the backward of the product that made `y`."""
        node = y.grad_fn
        if node is None:
            return
        name = f"{path} backward [{layer.row('dgrad').delivered}]"
        node.register_prehook(lambda *_: self.push(name))
        node.register_hook(lambda *_: self.pop())


def _precision_of(module: nn.Module) -> LinearPrecision | None:
    """Precision of a linear layer, or of the first of a group that runs together."""
    own = getattr(module, "precision", None)
    group = getattr(module, "precisions", None)
    if own is None and isinstance(group, list) and group:
        own = group[0]
    return own if isinstance(own, LinearPrecision) else None
