"""What a rank keeps between steps, in bytes: exact, for real ranks and for those on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron.core.optimizer.mixed import Slot
from megatron.training.providers import Parts


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank.

    Attributes:
        weights: Parameters, with the padding of the buffer they may live in.
        gradients: The fp32 buffers.
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


def _optimizer_tensors(parts: Parts) -> Iterator[torch.Tensor]:
    for slot in parts.optimizer.slots:
        yield slot.master
        yield from _state(parts, slot)


def _state(parts: Parts, slot: Slot) -> list[torch.Tensor]:
    state = parts.optimizer.inner.state[slot.master]
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _fp8_tensors(parts: Parts) -> list[torch.Tensor]:
    book = parts.fp8.book
    return [] if book is None else [book.history, book.scale]


def kept_tensors(parts: Parts) -> list[torch.Tensor]:
    """Return every tensor that `footprint` counts, and the model's buffers."""
    return [
        *parts.model.parameters(),
        *parts.model.buffers(),
        *(buffer.flat for buffer in parts.ddp.buffers_by_axis),
        *_optimizer_tensors(parts),
        *_fp8_tensors(parts),
    ]


def footprint(parts: Parts) -> Footprint:
    """Measure what a rank keeps."""
    weights = list(parts.model.parameters())
    return Footprint(
        weights=_bytes(weights),
        gradients=_bytes(buffer.flat for buffer in parts.ddp.buffers_by_axis),
        optimizer=_bytes(_optimizer_tensors(parts), but=weights),
        fp8=_bytes(_fp8_tensors(parts)),
    )


@dataclass(frozen=True)
class _SlotCost:
    """Optimizer bytes of a parameter: for each element that a rank updates, and once."""

    element: int
    once: int


def _cost(parts: Parts, slot: Slot) -> _SlotCost:
    state = _state(parts, slot)
    shaped = [t for t in state if t.shape == slot.master.shape]
    once = sum(t.nbytes for t in state if t.shape != slot.master.shape)
    master = 0 if slot.is_own_master else slot.master.element_size()
    return _SlotCost(master + sum(t.element_size() for t in shaped), once)


def optimizer_bytes(parts: Parts) -> list[dict[int, int]]:
    """Return what the optimizers of all ranks keep that differ in what they own.

    Returns:
        For each gradient buffer: rank along its axis -> bytes of optimizer state of its
        parameters. Where every rank updates everything there is one entry, for rank 0.
    """
    costs = {slot.param.dtype: _cost(parts, slot) for slot in parts.optimizer.slots}
    found = []
    for buffer in parts.ddp.buffers_by_axis:
        ranks = range(buffer.axis.size) if buffer.sharded else (0,)
        own: dict[int, int] = {}
        for rank in ranks:
            sizes = [(p, span.size) for p, span in buffer.ranges_of(rank).items() if span.size]
            own[rank] = sum(
                size * costs[p.dtype].element + costs[p.dtype].once for p, size in sizes
            )
        found.append(own)
    return found
