"""What layers add to the loss beside the loss of the tokens, and what they count on the way.

A layer computes a term, attaches it to an activation with `attach`, and reports its value with
`add_loss`. The gradient of a term enters backward where it is attached, multiplied by
`gradient_scale`: backward runs on sums of token losses, which are divided by the number of tokens
of the whole batch at the very end, so a term that shall count with weight 1 needs that number here.

Sums live for one step. A recomputed forward reports nothing a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Auxiliary:
    """Loss terms and loads of one model, over one step.

    Attributes:
        gradient_scale: Factor on the gradient of every attached term.
        recording: Whether values are added up. Off while a forward is recomputed.
    """

    def __init__(self) -> None:
        self.gradient_scale = 1.0
        self.recording = True
        self._losses: dict[tuple[str, int], torch.Tensor] = {}
        self._loads: dict[int, torch.Tensor] = {}
        self._running: dict[int, tuple[torch.Tensor, int]] = {}
        self._means: dict[tuple[int, int], torch.Tensor] = {}

    def start(self, gradient_scale: float) -> None:
        """Begin a step: forget all sums."""
        self.gradient_scale = gradient_scale
        for kept in (self._losses, self._loads, self._running, self._means):
            kept.clear()

    def attach(self, activation: torch.Tensor, term: torch.Tensor | None) -> torch.Tensor:
        """Return `activation`; its backward also runs that of the scalar `term`."""
        return activation if term is None else _attach(activation, term, self)

    def add_loss(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Add this rank's part of a term, without its weight.

        Args:
            name: Name of the term in the log.
            layer: Number of the layer in the whole model.
            value: Scalar.
        """
        if self.recording:
            key, value = (name, layer), value.detach().double()
            self._losses[key] = self._losses[key] + value if key in self._losses else value

    def add_load(self, layer: int, tokens: torch.Tensor) -> None:
        """Add how many of this rank's tokens each expert of a layer was chosen by, `[E]`."""
        if self.recording:
            tokens = tokens.double()
            self._loads[layer] = self._loads[layer] + tokens if layer in self._loads else tokens

    def running_mean(self, layer: int, microbatch: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean of `tokens [E]` over the microbatches of this step so far.

        A recomputed forward gets what the first one got.
        """
        if self.recording:
            total, count = self._running.get(layer, (torch.zeros_like(tokens), 0))
            self._running[layer] = (total + tokens, count + 1)
            self._means[layer, microbatch] = (total + tokens) / (count + 1)
        return self._means[layer, microbatch]

    def losses(self, names: Sequence[str], num_layers: int, device: torch.device) -> torch.Tensor:
        """Return this rank's sums, fp64 `[names, layers]`; 0 where nothing was added."""
        table = torch.zeros(len(names), num_layers, dtype=torch.float64, device=device)
        for (name, layer), value in self._losses.items():
            if name in names:
                table[names.index(name), layer] = value
        return table

    def loads(self, num_layers: int, num_experts: int, device: torch.device) -> torch.Tensor:
        """Return this rank's counts, fp64 `[layers, experts]`; 0 where nothing was added."""
        table = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        for layer, tokens in self._loads.items():
            table[layer] = tokens
        return table

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for a forward and for its recomputation."""
        return nullcontext(), self._silent()

    @contextmanager
    def _silent(self) -> Iterator[None]:
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: torch.Tensor, term: torch.Tensor, owner: Auxiliary
    ) -> torch.Tensor:
        ctx.owner, ctx.dtype, ctx.device = owner, term.dtype, term.device
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # Filled on the device: copying a number there would wait for it.
        scale = torch.full((), ctx.owner.gradient_scale, dtype=ctx.dtype, device=ctx.device)
        return grad, scale, None


_attach: Callable[..., torch.Tensor] = _Attach.apply
