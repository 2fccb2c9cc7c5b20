"""`Build`: everything a module constructor may ask for, passed explicitly.

A module never looks up a global. It receives one `Build`, hands `build.at("child")` to each child,
and uses `build.path` as its checkpoint key, FP8 slot, random stream and error label.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from megatron.core.auxiliary import Auxiliary
from megatron.core.fp8 import Fp8State
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.random import RngStreams

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.backends.contract import Backend


@dataclass(frozen=True)
class Build:
    """What a module is built from.

    Attributes:
        config: The finalized configuration.
        mesh: The process mesh.
        backend: Supplies the leaf layer classes.
        fp8: Decides the precision of every linear layer.
        rng: Random streams for dropout.
        device: Where parameters live.
        path: Dotted name of the module under construction, from the model's root.
        weight_grads: Where linear layers may put off their weight gradients; None for never.
        auxiliary: Terms that layers add to the loss of the tokens.
    """

    config: RunConfig
    mesh: ParallelState
    backend: Backend
    fp8: Fp8State
    rng: RngStreams
    device: torch.device
    path: str = ""
    weight_grads: WeightGradQueue | None = None
    auxiliary: Auxiliary = field(default_factory=Auxiliary)

    @classmethod
    def root(
        cls,
        config: RunConfig,
        mesh: ParallelState,
        backend: Backend,
        device: torch.device,
        path: str = "",
    ) -> Build:
        """The build of a whole model, with FP8 state and random streams of its own."""
        fp8, rng = Fp8State.from_config(config, device), RngStreams(config.seed, mesh, device)
        fp8.rng = rng
        return cls(config, mesh, backend, fp8, rng, device, path)

    def at(self, name: str) -> Build:
        """The build of the child called `name`."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    @property
    def params_dtype(self) -> torch.dtype:
        """Data type in which parameters and activations live."""
        dtype: torch.dtype = getattr(torch, self.config.params_dtype)
        return dtype
