"""Where a loss or a gradient that is not finite comes from, found after the fact.

The step is over and its gradients are still there; the weights were not touched. The batch is a
function of the samples read so far, so its forward can run once more with an eye on every module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.core.pipeline_parallel.layout import checked_schedule
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.tensor_parallel.mappings import gather_objects
from megatron.training.initialize import Runtime
from megatron.training.providers import Parts
from megatron.training.step import Batches, BatchSource, pipes_of, run_stage


class _Seen(NamedTuple):
    """A module whose output is not finite although its input is; ordered by when it ran."""

    microbatch: int
    stage: int
    order: int
    path: str
    amax: float
    rank: str


@torch.no_grad()
def trace(
    cfg: RunConfig, runtime: Runtime, parts: Parts, source: BatchSource, consumed_samples: int
) -> str:
    """Return where the step's numbers went wrong first, in one sentence. Collective.

    Args:
        cfg: The configuration.
        runtime: Mesh and device.
        parts: The model after the step, its gradients still in their buffers.
        source: Training batches.
        consumed_samples: Samples read before the step.
    """
    world = runtime.mesh.world
    weights = _union(
        gather_objects([n for n, w in parts.named_weights() if not torch.isfinite(w).all()], world)
    )
    if weights:
        return f"weights that are not finite: {_some(weights)}"
    forward = _Forward(runtime, parts, source, consumed_samples)
    with ExitStack() as stack:
        stack.enter_context(forward.watching())
        stack.enter_context(parts.fp8.not_recording())
        actions = checked_schedule(cfg, training=False)[runtime.mesh.pp.rank]
        Runner(forward, transport=pipes_of(cfg, runtime)).run(actions)
    seen = [one for one in gather_objects(forward.first, world) if one is not None]
    if seen:
        first = min(seen)
        return (
            f"first output that is not finite: {first.path}, microbatch {first.microbatch}, "
            f"rank {first.rank}; its input's largest magnitude is {first.amax:.4g}"
        )
    gradients = _union(gather_objects(list(_bad_gradients(parts.model)), world))
    if gradients:
        return (
            "every output of the forward pass is finite; gradients that are not, those nearest to "
            f"the loss first: {_some(gradients[::-1])}"
        )
    return "nothing that is not finite was found when the batch ran again"


def _bad_gradients(model: nn.Module) -> Iterator[str]:
    """Names of parameters whose gradient is not finite, in the order of the model."""
    for name, parameter in model.named_parameters():
        grad = getattr(parameter, "main_grad", None)
        if grad is not None and not torch.isfinite(grad).all():
            yield name


def _union(parts: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _some(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


class _Forward:
    """The step's forward passes, for the schedule's runner; dropout is off.

    Attributes:
        first: The first module of this rank that turned finite numbers into others.
    """

    def __init__(
        self, runtime: Runtime, parts: Parts, source: BatchSource, consumed_samples: int
    ) -> None:
        self._parts, self._rank = parts, runtime.mesh.label()
        self._batches = Batches(source, runtime)
        self._batches.start(consumed_samples)
        self._sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)
        self._place, self._order = (0, 0), 0
        self.first: _Seen | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every module's output inside the block."""
        model = self._parts.model
        handles = [
            m.register_forward_hook(self._hook(n or "the loss")) for n, m in model.named_modules()
        ]
        self._parts.ddp.eval()
        try:
            yield
        finally:
            self._parts.ddp.train()
            for handle in handles:
                handle.remove()

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            del module
            self._order += 1
            if self.first is not None or _is_finite(output):
                return
            # A module around the guilty one finishes later, one behind it has a bad input.
            if _is_finite(inputs):
                amax = max((float(x.abs().max()) for x in _floats(inputs)), default=0.0)
                self.first = _Seen(*self._place, self._order, path, amax, self._rank)

        return look

    def forward(self, stage: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        self._place = (microbatch, stage)
        return run_stage(self._parts, self._batches, self._sums, stage, microbatch, received)

    def sync_gradients(self) -> None:
        """There are none."""

    def sync_amax(self) -> None:
        """Nothing is recorded."""


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """Floating-point tensors with elements in a nest of tuples."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floats(item)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in _floats(value))
