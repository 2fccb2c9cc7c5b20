"""A copy in memory of everything that training changes, to go back to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron.training import random_state
from megatron.training.providers import Parts


def changing_tensors(parts: Parts) -> Iterator[torch.Tensor]:
    """Yield this rank's tensors that training changes, in an order that does not change.

    Parameters are rounded masters and are not among them, unless they are their own masters.
    """
    for slot in parts.optimizer.slots:
        yield slot.master.detach()
        state = parts.optimizer.inner.state[slot.master]
        yield from (state[key] for key in state if isinstance(state[key], torch.Tensor))
    yield from parts.model.buffers()
    for book in parts.fp8.books:
        yield from (book.history, book.scale)


class Snapshot:
    """Room for one copy of a rank's state: masters, moments, schedule, scales, random state.

    With the distributed optimizer every rank copies its own range, and going back gathers the
    parameters as an update does.

    Args:
        parts: What is trained.
        on_device: Whether the copy lies next to the model instead of in host memory.

    Attributes:
        num_bytes: What the copy of this rank takes.
    """

    def __init__(self, parts: Parts, *, on_device: bool) -> None:
        self._parts = parts
        self._copies = [_room_for(one, on_device) for one in changing_tensors(parts)]
        # What FP8 gradient reductions still owe, by parameter.
        self._residuals: dict[nn.Parameter, torch.Tensor] = {}
        self._on_device, self._residual_scale = on_device, 1.0
        self._plain: dict[str, Any] = {}
        self.num_bytes = sum(one.nbytes for one in self._copies)
        if parts.ddp.keeps_residual:
            self.num_bytes += sum(4 * one.numel() for one in parts.ddp.trained_params)

    @torch.no_grad()
    def take(self, extra: Mapping[str, Any]) -> None:
        """Copy the state of now.

        Copies to and from the device are ordered by its stream, so nobody waits for them.

        Args:
            extra: Plain values that belong to it.
        """
        parts = self._parts
        parts.ddp.finish_param_sync()
        for kept, live in zip(self._copies, changing_tensors(parts), strict=True):
            kept.copy_(live, non_blocking=True)
        if parts.ddp.keeps_residual:
            owed = parts.ddp.residuals()
            self._residuals = {
                param: self._residuals.get(param, _room_for(one, self._on_device))
                for param, one in owed.items()
            }
            for param, kept in self._residuals.items():
                kept.copy_(owed[param], non_blocking=True)
            self._residual_scale = parts.ddp.loss_scale
        self._plain = {
            "optimizer": parts.optimizer.scalars(),
            "scheduler": parts.scheduler.state_dict(),
            "suspended": parts.fp8.suspended(),
            "random": random_state.capture(),
            "extra": copy.deepcopy(dict(extra)),
        }

    @torch.no_grad()
    def restore(self) -> dict[str, Any]:
        """Bring that state back. Collective with the distributed optimizer.

        Returns:
            What `take` was given.
        """
        parts, plain = self._parts, self._plain
        parts.ddp.finish_param_sync()
        for kept, live in zip(self._copies, changing_tensors(parts), strict=True):
            live.copy_(kept, non_blocking=True)
        if parts.ddp.keeps_residual:
            owed = parts.ddp.residuals(fresh=True)
            for param, kept in self._residuals.items():
                owed[param].copy_(kept, non_blocking=True)
                owed[param].mul_(parts.ddp.loss_scale / self._residual_scale)
        parts.optimizer.load_scalars(plain["optimizer"])
        parts.scheduler.load_state_dict(plain["scheduler"])
        parts.optimizer.write_model_params()
        parts.fp8.suspend(plain["suspended"])
        parts.fp8.renew()
        random_state.restore(plain["random"])
        return copy.deepcopy(plain["extra"])


def _room_for(live: torch.Tensor, on_device: bool) -> torch.Tensor:
    device = live.device if on_device else torch.device("cpu")
    pinned = live.is_cuda and not on_device
    return torch.empty(live.shape, dtype=live.dtype, device=device, pin_memory=pinned)
