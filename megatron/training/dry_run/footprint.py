"""What a rank keeps between steps, in bytes: exact, for real ranks and for those on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron.config import RunConfig
from megatron.core.mesh import ParallelState
from megatron.core.optimizer import MixedPrecisionOptimizer, build_optimizer
from megatron.core.optimizer.moments import BLOCK
from megatron.training.providers import Parts


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank.

    Attributes:
        weights: Parameters, with the padding of the buffer they may live in; FP8 weights with their
            scales.
        gradients: The fp32 buffers, and what FP8 reductions keep beside them.
        optimizer: Masters, moments and what else the optimizer keeps.
        fp8: Scales and histories of magnitudes.
    """

    weights: int
    gradients: int
    optimizer: int
    fp8: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.fp8


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    found = (tensor.untyped_storage() for tensor in tensors)
    return {id(storage): storage for storage in found}


def _bytes(tensors: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> int:
    others = _storages(but)
    own = _storages(tensors)
    return sum(storage.nbytes() for key, storage in own.items() if key not in others)


def _optimizer_tensors(optimizer: MixedPrecisionOptimizer) -> Iterator[torch.Tensor]:
    for slot in optimizer.slots:
        yield slot.master
        state = optimizer.inner.state[slot.master]
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _fp8_tensors(parts: Parts) -> list[torch.Tensor]:
    return [tensor for book in parts.fp8.books for tensor in (book.history, book.scale)]


def _weight_tensors(parts: Parts) -> list[torch.Tensor]:
    return [*parts.model.parameters(), *parts.ddp.fp8_tensors()]


def _gradient_tensors(parts: Parts) -> list[torch.Tensor]:
    return [
        *(buffer.flat for buffer in parts.ddp.buffers_by_axis),
        *parts.ddp.residual_tensors(),
    ]


def kept_tensors(parts: Parts) -> list[torch.Tensor]:
    """Return every tensor that `footprint` counts, and the model's buffers."""
    return [
        *_weight_tensors(parts),
        *parts.model.buffers(),
        *_gradient_tensors(parts),
        *_optimizer_tensors(parts.optimizer),
        *_fp8_tensors(parts),
    ]


def footprint(parts: Parts) -> Footprint:
    """Measure what a rank keeps."""
    weights = _weight_tensors(parts)
    return Footprint(
        weights=_bytes(weights),
        gradients=_bytes(_gradient_tensors(parts)),
        optimizer=_bytes(_optimizer_tensors(parts.optimizer), but=weights),
        fp8=_bytes(_fp8_tensors(parts)),
    )


def optimizer_bytes(parts: Parts, cfg: RunConfig) -> list[dict[int, int]]:
    """Return what the optimizers of all ranks keep that differ in what they own.

    Args:
        parts: Those of one of these ranks.
        cfg: The configuration.

    Returns:
        For each gradient buffer: rank along its axis -> bytes of optimizer state of its
        parameters. Where every rank updates everything there is one entry, for rank 0.
    """
    costs: dict[torch.dtype, _Cost] = {}
    found = []
    for buffer in parts.ddp.buffers_by_axis:
        own: dict[int, int] = {}
        for rank in range(buffer.axis.size) if buffer.sharded else (0,):
            own[rank] = 0
            for param, span in buffer.ranges_of(rank).items():
                if param.dtype not in costs:
                    costs[param.dtype] = _Cost.of(cfg, param.dtype)
                own[rank] += costs[param.dtype](span.size)
        found.append(own)
    return found


@dataclass(frozen=True)
class _Cost:
    """Optimizer bytes of a parameter.

    Attributes:
        element: For each element that a rank updates.
        block: For each block of `moments.BLOCK` elements that is begun.
        once: Beside that, unless it updates none.
    """

    element: int
    block: int
    once: int

    def __call__(self, elements: int) -> int:
        if not elements:
            return 0
        return elements * self.element - (-elements // BLOCK) * self.block + self.once

    @classmethod
    def of(cls, cfg: RunConfig, dtype: torch.dtype) -> _Cost:
        """Find it out with parameters of three sizes."""
        one, full, begun = (_probe(cfg, dtype, n) for n in (1, BLOCK, BLOCK + 1))
        element = (full - one) // (BLOCK - 1)
        block = begun - full - element
        return cls(element, block, one - element - block)


def _probe(cfg: RunConfig, dtype: torch.dtype, elements: int) -> int:
    """Build an optimizer of one parameter and return what it keeps."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(elements, dtype=dtype, device="meta"))
    optimizer = build_optimizer(cfg, model, ParallelState.single())
    return _bytes(_optimizer_tensors(optimizer), but=[model.weight])
