"""Transfers of activations and their gradients between pipeline stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from megatron.core import wire
from megatron.core.mesh import Axis, ParallelState
from megatron.core.pipeline_parallel.schedule import Action, transfer_of

Arrival = Callable[[], torch.Tensor]


class Pipes:
    """The channels of one rank to its neighbours.

    Every tensor has the same shape and type, so nothing but the tensor itself is sent. The order of
    transfers on a channel is that of the schedule, on both sides. Nothing here blocks but the
    function that waits for a tensor, and `finish`: tensors travel while the rank computes.

    Args:
        mesh: The process mesh.
        shape: Of what stages exchange: `[s or s/tp, b, h]`.
        dtype: Its type.
        device: Where it lives.
    """

    def __init__(
        self,
        mesh: ParallelState,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pp = mesh.pp
        self._channels: dict[str, Axis] = {
            "forward": mesh.pipe_forward,
            "backward": mesh.pipe_backward,
            "forward_odd": mesh.pipe_forward_odd,
            "backward_odd": mesh.pipe_backward_odd,
            "forward_wrap": mesh.pipe_forward_wrap,
            "backward_wrap": mesh.pipe_backward_wrap,
        }
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        # What is being sent has to stay alive until it is.
        self._sending: deque[tuple[wire.Pending, torch.Tensor]] = deque()
        self._receiving = 0

    @property
    def pending(self) -> int:
        """Transfers that were started and that nobody has waited for."""
        return len(self._sending) + self._receiving

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send; returns at once.

        Args:
            action: A SEND action.
            tensor: What it sends.

        Raises:
            ValueError: The tensor is not of the agreed shape and type; sent, it would be taken for
                something else or end the receiver.
        """
        if tuple(tensor.shape) != self._shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"{action}: {tuple(tensor.shape)} {tensor.dtype} is to be sent where "
                f"{self._shape} {self._dtype} is expected."
            )
        transfer = transfer_of(action, self._pp.size)
        tensor = tensor.contiguous()
        channel = self._channels[transfer.channel]
        work = wire.send(tensor, channel, self._pp.ranks[transfer.receiver])
        self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, action: Action) -> Arrival:
        """Start to receive.

        Args:
            action: A RECV action.

        Returns:
            A function that waits for the tensor and returns it.
        """
        transfer = transfer_of(action, self._pp.size)
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        channel = self._channels[transfer.channel]
        work = wire.receive(tensor, channel, self._pp.ranks[transfer.sender])
        self._receiving += 1

        def arrival() -> torch.Tensor:
            work.wait()
            self._receiving -= 1
            return tensor

        return arrival

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            work, _ = self._sending.popleft()
            work.wait()
