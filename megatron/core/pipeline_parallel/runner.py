"""The one loop that executes a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.pipeline_parallel.schedule import Action, Op

Key = tuple[int, "int | None"]


class StageWork(Protocol):
    """What a rank's stages know how to do; the training step implements it."""

    def forward(self, stage: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run a stage forward.

        Returns:
            What the next stage needs; in the last stage the scalar from which backward starts.
        """

    def sync_gradients(self) -> None:
        """Make the gradients of all microbatches final on this rank."""

    def sync_amax(self) -> None:
        """Turn the recorded maxima of all microbatches into the scales of the next step."""


class Transport(Protocol):
    """Moves tensors between stages."""

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send."""

    def receive(self, action: Action) -> Callable[[], torch.Tensor]:
        """Start to receive; the result waits for the tensor."""

    def finish(self) -> None:
        """Wait until everything is sent."""


class Runner:
    """Executes the actions of one pipeline rank in the order in which they are listed.

    Args:
        work: The stages' operations.
        root_gradient: Called before each backward pass of the last stage: the gradient of the
            scalar that `forward` returned (the loss scale), None for 1.
        transport: Needed by schedules with transfers.
        before_backward: Called with the action before each backward pass.
        weight_grads: Needed by schedules with weight passes: takes what a backward pass puts off.
    """

    def __init__(
        self,
        work: StageWork,
        root_gradient: Callable[[], torch.Tensor | None] = lambda: None,
        transport: Transport | None = None,
        before_backward: Callable[[Action], None] = lambda _: None,
        weight_grads: WeightGradQueue | None = None,
    ) -> None:
        self.work = work
        self._before_backward = before_backward
        self.current: Action | None = None
        self._root_gradient = root_gradient
        self._transport = transport
        self._weight_grads = weight_grads
        self._split: set[Key] = set()  # passes whose weight gradients are actions of their own
        # By stage and microbatch: where backward starts, what came in, what is to be sent.
        self._roots: dict[Key, Any] = {}
        self._inputs: dict[Key, torch.Tensor] = {}
        self._outgoing: dict[tuple[Op, Key], torch.Tensor] = {}
        self._arriving: dict[tuple[Op, Key], Callable[[], torch.Tensor]] = {}
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.W: self._weights,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.GRAD_SYNC: lambda _: self.work.sync_gradients(),
            Op.AMAX_SYNC: lambda _: self.work.sync_amax(),
        }

    def run(self, actions: Sequence[Action]) -> None:
        """Execute `actions`; `current` names the one in progress, for messages about failures."""
        self._forget()
        self._split = {(a.stage, a.microbatch) for a in actions if a.op is Op.W}
        for action in actions:
            self.current = action
            if action.op is Op.GRAD_SYNC:
                self._finish()
            self._handlers[action.op](action)
        self._finish()
        self.current = None
        self._forget()

    def _finish(self) -> None:
        if self._transport is not None:
            self._transport.finish()

    def _forget(self) -> None:
        for kept in (self._roots, self._inputs, self._outgoing, self._arriving):
            kept.clear()
        if self._weight_grads is not None:
            self._weight_grads.clear()

    def _forward(self, action: Action) -> None:
        if action.microbatch is None:
            return
        key = (action.stage, action.microbatch)
        arrival = self._arriving.pop((Op.RECV_F, key), None)
        received = None if arrival is None else arrival()
        if received is not None and torch.is_grad_enabled():
            self._inputs[key] = received.requires_grad_()
        output = self.work.forward(action.stage, action.microbatch, received)
        self._outgoing[Op.SEND_F, key] = output.detach()
        if torch.is_grad_enabled():
            # The edge of the graph is enough for backward; the tensor is free once it is sent.
            self._roots[key] = torch.autograd.graph.get_gradient_edge(output)

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        arrival = self._arriving.pop((Op.RECV_B, key), None)
        gradient = self._root_gradient() if arrival is None else arrival()
        self._outgoing.pop((Op.SEND_F, key), None)
        root = self._roots.pop(key)
        self._before_backward(action)
        with self._putting_off(key):
            torch.autograd.backward(root, gradient)
        received = self._inputs.pop(key, None)
        if received is not None and received.grad is not None:
            self._outgoing[Op.SEND_B, key] = received.grad

    def _putting_off(self, key: Key) -> AbstractContextManager[None]:
        return self._queue.collect(key) if key in self._split else nullcontext()

    def _weights(self, action: Action) -> None:
        self._queue.run((action.stage, action.microbatch))

    def _send(self, action: Action) -> None:
        self._pipes.send(action, self._outgoing.pop((action.op, (action.stage, action.microbatch))))

    def _receive(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        self._arriving[action.op, key] = self._pipes.receive(action)

    @property
    def _queue(self) -> WeightGradQueue:
        if self._weight_grads is None:
            raise TypeError("Runner: a schedule with weight passes needs weight_grads.")
        return self._weight_grads

    @property
    def _pipes(self) -> Transport:
        if self._transport is None:
            raise TypeError("Runner: a schedule with transfers needs a transport.")
        return self._transport
