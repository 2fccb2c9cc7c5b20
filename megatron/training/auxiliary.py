"""Layers with experts over a training step: weight and values of their losses, their loads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron.config import RunConfig
from megatron.config.moe import auxiliary_losses, moe_layers
from megatron.core.comm_log import LOSS
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.paper import number
from megatron.core.tensor_parallel.mappings import all_reduce_
from megatron.core.transformer.moe.losses import LOG_NAMES
from megatron.core.transformer.moe.router import Router
from megatron.training.initialize import Runtime


@dataclass(frozen=True)
class MoeReport:
    """What the layers with experts did in a step, the same on every rank.

    Attributes:
        losses: Balancing losses by name, without their weights: the mean over layers, microbatches
            and replicas.
        figures: More of them, for logs: the entropy of the experts' loads (1 when they are even),
            and everything by layer if asked for.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


class MoeStep:
    """Does for the layers with experts what has to be done once a step.

    Args:
        cfg: The configuration.
        runtime: Mesh and device.
        model: The model.
    """

    def __init__(self, cfg: RunConfig, runtime: Runtime, model: GPTModel) -> None:
        self._cfg, self._mesh, self._device = cfg, runtime.mesh, runtime.device
        self._state = model.auxiliary
        self._routers = [m for m in model.modules() if isinstance(m, Router)]
        self._layers = [i for i, has_experts in enumerate(moe_layers(cfg)) if has_experts]
        kinds = [*auxiliary_losses(cfg), *(["z_loss"] if cfg.moe_z_loss_coeff else [])]
        self._names = [LOG_NAMES[kind] for kind in kinds]
        self._microbatches = 0  # of all replicas, in the current step

    @property
    def needs_tokens(self) -> bool:
        """Whether `start` has to know the tokens of the step beforehand."""
        return bool(self._names)

    def start(
        self, local_tokens: torch.Tensor | None, backward_scale: float, num_microbatches: int
    ) -> None:
        """Begin a step. Collective if there are losses.

        Gradients are sums over tokens until the end of the step, where they are divided by the
        number of unmasked tokens; a loss that counts once a microbatch needs that number as its
        weight from the start.

        Args:
            local_tokens: Unmasked tokens of this rank's microbatches; None if not needed.
            backward_scale: Factor on every gradient (the loss scale).
            num_microbatches: Microbatches of one replica in this step.
        """
        scale = backward_scale
        self._microbatches = num_microbatches * self._mesh.dp.size
        if local_tokens is not None:
            tokens = all_reduce_(local_tokens.double().reshape(1), self._mesh.dp_cp, part=LOSS)
            scale *= max(number(tokens), 1.0) / self._microbatches
        self._state.start(scale)

    def finish(self, taken: bool) -> MoeReport:
        """Sum values and loads over all ranks, and move the routers' biases. Collective.

        Args:
            taken: Whether the optimizer took the step; if not, the biases stay as they are.
        """
        cfg = self._cfg
        losses = self._state.losses(self._names, cfg.num_layers, self._device)
        loads = self._state.loads(cfg.num_layers, cfg.num_experts, self._device)
        both = all_reduce_(
            torch.cat([losses.flatten(), loads.flatten()]), self._mesh.world, part=LOSS
        )
        losses = both[: losses.numel()].view(losses.shape)
        loads = both[losses.numel() :].view(loads.shape)
        if taken:
            for router in self._routers:
                router.move_bias(loads[router.layer])
        return MoeReport() if both.is_meta else self._report(losses.cpu(), loads.cpu())

    def _report(self, losses: torch.Tensor, loads: torch.Tensor) -> MoeReport:
        each = losses[:, self._layers] / self._microbatches
        shares = loads[self._layers] / loads[self._layers].sum(-1, keepdim=True).clamp(min=1.0)
        entropy = torch.special.entr(shares).sum(-1) / max(math.log(loads.shape[1]), 1e-12)
        figures = {"moe/load_entropy": float(entropy.mean())}
        if self._cfg.moe_per_layer_logging:
            by_layer = [*zip(self._names, each, strict=True), ("load_entropy", entropy)]
            for name, values in by_layer:
                for layer, value in zip(self._layers, values.tolist(), strict=True):
                    figures[f"moe/{name}_layer_{layer}"] = value
        means = {name: float(row.mean()) for name, row in zip(self._names, each, strict=True)}
        return MoeReport(means, figures)
