"""Layers that FP8 does harm to run in high precision for a while: decided, applied, told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.config import RunConfig
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.attention import COLUMN_NAMES
from megatron.core.fp8.fallback import Fallback, Figures, Limits
from megatron.core.fp8.recipe import DelayedScaling, Role
from megatron.core.fp8.stats import RoleStats, StatsCollector
from megatron.observe.bus import Bus
from megatron.training import precision
from megatron.training.initialize import Runtime
from megatron.training.progress import Progress
from megatron.training.providers import Parts
from megatron.training.step import StepOutcome

_FIRST_SCALE = 1.0  # of delayed scaling: it says nothing about the tensor
_OF_ATTENTION = frozenset(COLUMN_NAMES.values())


def unit_of(path: str) -> str:
    """Return what a layer is switched together with: an expert with all others of its matrix."""
    group, _, last = path.rpartition(".")
    return group if last.isdigit() else path


class AutoFallback:
    """Decides from the figures of FP8 casts which layers run in FP8.

    Figures are those of the whole model on every rank, and so are the decisions.

    Args:
        cfg: The configuration.
        runtime: Mesh and backend.
        parts: What is trained.
        progress: The run's counters.
        bus: Receives the decisions.

    Raises:
        PrecisionError: Nobody measures the casts.
    """

    def __init__(
        self, cfg: RunConfig, runtime: Runtime, parts: Parts, progress: Progress, bus: Bus
    ) -> None:
        self._cfg, self._runtime, self._parts = cfg, runtime, parts
        self._progress, self._bus = progress, bus
        self._stats = _collector(runtime, parts)
        self._is_delayed: dict[str, bool] = {}
        self._logic = Fallback(
            Limits(
                amax_ratio=cfg.fp8_auto_fallback_amax_ratio,
                saturation=cfg.fp8_auto_fallback_saturation,
                underflow=cfg.fp8_auto_fallback_underflow,
                grad_norm_ratio=cfg.fp8_auto_fallback_grad_norm_ratio,
                patience=cfg.fp8_auto_fallback_patience,
                probe_interval=cfg.fp8_auto_fallback_probe_interval,
            )
        )

    def after_step(self, outcome: StepOutcome) -> None:
        """Decide after an iteration that the counters have counted. Collective if it changes much.

        Args:
            outcome: What the iteration did.
        """
        fp8, iteration = self._parts.fp8, self._progress.iteration
        if not fp8.enabled or fp8.held:
            return
        norm: float | None = outcome.update.grad_norm
        if self._cfg.fp16 and norm is not None and not math.isfinite(norm):
            norm = None  # part of the search for a loss scale
        figures = None
        if outcome.update.success and self._stats.due:
            figures = self._figures()
        changes = self._logic.step(iteration, norm, figures)
        if changes:
            self._apply()
            for one in changes:
                self._bus.emit(one)
            rows = self._parts.model.named_precision_rows()
            table = precision.of_all_stages(rows, self._runtime.mesh.pp)
            self._bus.emit(precision.summarize(table, changed=True))
        self._stats.request(self._logic.wants_figures)

    def _figures(self) -> Figures:
        """The step's figures by unit, without those of scales that were never set.

        Nor are there those of attention, which is not switched.
        """
        told: dict[str, Mapping[Role, RoleStats]] = {}
        for unit, roles in self._stats.grouped(unit_of).items():
            if unit.rpartition(".")[2] in _OF_ATTENTION:
                continue
            if unit not in self._is_delayed:
                recipe = self._parts.fp8.policy.decide(unit).recipe
                self._is_delayed[unit] = isinstance(recipe, DelayedScaling)
            unset = _FIRST_SCALE if self._is_delayed[unit] else None
            told[unit] = {role: one for role, one in roles.items() if one.scale != unset}
        return told

    def _apply(self) -> None:
        fallen = self._logic.fallen
        layers = {path: unit_of(path) for path in self._parts.fp8.layers}
        self._parts.fp8.suspend({p: fallen[unit] for p, unit in layers.items() if unit in fallen})

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, as plain values."""
        return self._logic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`: the same layers are held back."""
        self._logic.load_state_dict(state)
        self._apply()
        self._stats.request(self._logic.wants_figures)


def _collector(runtime: Runtime, parts: Parts) -> StatsCollector:
    """Return what measures the casts.

    Raises:
        PrecisionError: There is none.
    """
    if parts.fp8.stats is not None and runtime.backend.name == "native":
        return parts.fp8.stats
    raise PrecisionError(
        complaint(
            "--fp8-auto-fallback",
            f"layers of {runtime.backend.name}",
            "Its casts take place inside the library, where nobody can measure them",
            "Remove --fp8-auto-fallback, or use --transformer-impl native",
        )
    )
