"""The one loop that executes a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron.core.pipeline_parallel.schedule import Action, Op


class StageWork(Protocol):
    """What a model chunk knows how to do; the training step implements it."""

    def forward(self, microbatch: int) -> torch.Tensor:
        """Run the forward pass and return the scalar from which backward starts."""

    def sync_gradients(self) -> None:
        """Make the gradients of all microbatches final on this rank."""

    def sync_amax(self) -> None:
        """Turn the recorded maxima of all microbatches into the scales of the next step."""


class Runner:
    """Executes the actions of one pipeline rank in the order in which they are listed.

    Args:
        work: The model chunk's operations.
        root_gradient: Called before each backward pass: the gradient of the scalar that `forward`
            returned (the loss scale), None for 1.
        before_backward: Called with the action before each backward pass.
    """

    def __init__(
        self,
        work: StageWork,
        root_gradient: Callable[[], torch.Tensor | None] = lambda: None,
        before_backward: Callable[[Action], None] = lambda _: None,
    ) -> None:
        self.work = work
        self._before_backward = before_backward
        self.current: Action | None = None
        self._root_gradient = root_gradient
        self._outputs: dict[int, torch.Tensor] = {}
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.GRAD_SYNC: lambda _: self.work.sync_gradients(),
            Op.AMAX_SYNC: lambda _: self.work.sync_amax(),
        }

    def run(self, actions: Sequence[Action]) -> None:
        """Execute `actions`; `current` names the one in progress, for messages about failures."""
        self._outputs.clear()
        for action in actions:
            self.current = action
            self._handlers[action.op](action)
        self.current = None
        self._outputs.clear()

    def _forward(self, action: Action) -> None:
        if action.microbatch is not None:
            self._outputs[action.microbatch] = self.work.forward(action.microbatch)

    def _backward(self, action: Action) -> None:
        if action.microbatch is not None:
            output = self._outputs.pop(action.microbatch)
            self._before_backward(action)
            torch.autograd.backward(output, self._root_gradient())
