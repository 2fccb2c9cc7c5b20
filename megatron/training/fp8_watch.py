"""What a run measures about its FP8 casts, and what it says about them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from megatron.config.fp8 import recipe_of
from megatron.core.errors import TrainingError, complaint
from megatron.core.fp8 import Fp8State
from megatron.core.fp8.agreement import check_agreement
from megatron.core.fp8.stats import StatsCollector
from megatron.observe.events import Event, Fp8Figures, Fp8Stats, Incident, Message
from megatron.training.fp8_alerts import Alerts, Figures, Limits, like
from megatron.training.initialize import Runtime

_EXPERT = re.compile(r"(?<=\.experts\.).+")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def collector(runtime: Runtime) -> StatsCollector | None:
    """Return what measures the casts of a run; None where it is not to."""
    cfg, mesh = runtime.config, runtime.mesh
    if recipe_of(cfg) is None or not cfg.fp8_stats_interval:
        return None
    return StatsCollector(
        cfg.fp8_stats_interval, cfg.fp8_stats_samples, mesh.tp_cp_dp, mesh.pp, runtime.device
    )


class Fp8Watch:
    """Tells about the casts of the steps that are due, and checks that ranks share their scales.

    Every rank has one watch, and all take part.

    Args:
        runtime: Configuration, mesh and device.
        fp8: The model's FP8 state, with its collector.
        emit: Takes events.
        iteration: Where the run starts.

    Raises:
        TrainingError: ``--fp8-debug-dump`` cannot be written.
    """

    def __init__(
        self, runtime: Runtime, fp8: Fp8State, emit: Callable[[Event], None], iteration: int = 0
    ) -> None:
        cfg, self._mesh = runtime.config, runtime.mesh
        self._fp8, self._emit = fp8, emit
        self._stats = fp8.stats
        self._native = runtime.backend.name == "native"
        limits = Limits(
            cfg.fp8_alert_amax_ratio,
            cfg.fp8_alert_saturation,
            cfg.fp8_alert_underflow,
            gradients_may_overflow=cfg.fp16,
        )
        self._alerts = Alerts(limits, self._where)
        self._dump: Path | None = None
        if cfg.fp8_debug_dump and self._stats is not None and self._mesh.rank == 0:
            self._dump = _start_dump(cfg.fp8_debug_dump, fresh=not iteration)
        if self._stats is not None and not self._native:
            emit(Message(f"NOTE: {_note_on_library(runtime.backend.name)}"))

    def after_step(self) -> None:
        """Report a step, if it was due. Collective.

        Raises:
            PrecisionError: Ranks that share a scale do not have the same one.
        """
        stats = self._stats
        if stats is None or not stats.due:
            return
        for book in self._fp8.books:
            is_expert = book is self._fp8.expert_book
            axis = self._mesh.expert_amax if is_expert else self._mesh.amax
            check_agreement(book, axis, self._mesh.label())
        iteration = stats.latest_iteration
        figures = dict(sorted(stats.figures.items(), key=lambda item: _layer_number(item[0])))
        self._emit(Fp8Stats(iteration, _figures(stats)))
        # An expert may have no tokens, and a library casts where nobody sees it.
        uncast = [p for p in stats.uncast if self._native and not _EXPERT.search(p)]
        for alert in self._alerts.look(iteration, figures, uncast):
            self._emit(alert)
        self._write_dump(iteration, figures)

    def _where(self, path: str) -> str:
        if self._stats is None or self._mesh.pp.size == 1:
            return ""
        return f"pp{self._stats.stage(path)}"

    def _write_dump(self, iteration: int, figures: Figures) -> None:
        if self._dump is None:
            return
        lines = [
            json.dumps(
                {
                    "iteration": iteration,
                    "module": path,
                    "tensor": role.value,
                    "amax": _number(one.amax),
                    "scale": _number(one.scale),
                }
            )
            for path, roles in figures.items()
            for role, one in roles.items()
        ]
        try:
            with self._dump.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            self._emit(Incident(f"{error}. The dump stops here.", where="--fp8-debug-dump"))
            self._dump = None


def _layer_number(path: str) -> int:
    found = _LAYER.search(path)
    return int(found[1]) if found else -1


def _start_dump(path: str, fresh: bool) -> Path:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("w" if fresh else "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        why, fix = f"It cannot be written: {error}", "Name a file in a folder that can be written"
        raise TrainingError(complaint("--fp8-debug-dump", path, why, fix)) from error


def _note_on_library(name: str) -> str:
    return (
        f"FP8 statistics: {name} casts inside its kernels, so saturation, underflow and SNR are not"
        " measured; magnitudes and scales are known with delayed scaling only"
    )


def _together(path: str) -> str:
    """Under which name a layer is reported: the experts of a layer as one."""
    return _EXPERT.sub(lambda found: like(f".{found[0]}")[1:], path)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _figures(stats: StatsCollector) -> tuple[Fp8Figures, ...]:
    """Figures for a report: of each layer and role, in the order of the layers."""
    groups = sorted(stats.grouped(_together).items(), key=lambda item: _layer_number(item[0]))
    return tuple(
        Fp8Figures(
            path=path,
            role=role.value,
            amax=one.amax,
            scale=one.scale,
            saturated=one.saturated if one.elements else None,
            underflow=one.underflow if one.elements else None,
            snr_db=_number(one.snr_db) if one.elements else None,
            elements=one.elements,
            nonfinite=one.nonfinite,
        )
        for path, roles in groups
        for role, one in roles.items()
    )
