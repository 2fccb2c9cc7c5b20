"""Which layers leave FP8 for a while, and when they try again: decisions from figures alone.

A *unit* is what is switched together: a linear layer, or one matrix of all experts of a layer. A
unit in FP8 that shows the same kind of trouble too often falls back to high precision. After some
time it is put on probation: it runs in FP8 and every step is measured. If it stays out of trouble
it remains, else it falls back for twice as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron.core.fp8.guards import Watch
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.stats import RoleStats
from megatron.observe.events import PrecisionChange

FP8, FALLEN, PROBATION = "fp8", "high precision", "fp8 on probation"
_REMEMBERED = 16  # magnitudes of which the median is the usual one
_ENOUGH = 4
_NORMS = 64  # gradient norms to compare with, and steps after which a spike is forgotten
_NORM_DEVIATIONS = 10.0
_MOST_DOUBLINGS = 16

Figures = Mapping[str, Mapping[Role, RoleStats]]


@dataclass(frozen=True)
class Limits:
    """From where a unit is in trouble; 0 switches a rule off.

    Attributes:
        amax_ratio: Largest magnitude over its recent median.
        saturation: Share of elements beyond the format's largest value.
        underflow: Share of elements that are not zero and became zero.
        grad_norm_ratio: Global gradient norm over its recent median.
        patience: How often trouble is seen, within twice as many looks, before a unit falls back;
            how many looks in a row without any end a probation; how many spikes of the gradient
            norm make the worst unit fall back.
        probe_interval: Steps until the first probation of a unit.
    """

    amax_ratio: float
    saturation: float
    underflow: float
    grad_norm_ratio: float
    patience: int
    probe_interval: int


@dataclass(frozen=True)
class _Trouble:
    """What is wrong with a unit at one look."""

    rule: str
    what: str
    figures: Mapping[str, float]


@dataclass
class _Unit:
    """What is remembered of a unit."""

    marks: deque[int]
    status: str = FP8
    reason: str = ""
    falls: int = 0
    probe_at: int = 0
    healthy: int = 0
    past: dict[str, list[float]] = field(default_factory=dict)

    def forget(self) -> None:
        """Begin to look anew: what was seen in another precision says nothing."""
        self.marks.clear()
        self.past.clear()
        self.healthy = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it is measured every step."""
        return self.status == PROBATION or (self.status == FP8 and any(self.marks))


class Fallback:
    """Decides for a whole model. Ranks that are told the same figures decide alike.

    Args:
        limits: The rules.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._units: dict[str, _Unit] = {}
        self._norms = Watch(_NORMS, _NORM_DEVIATIONS, limits.grad_norm_ratio)
        self._spikes: list[int] = []

    @property
    def wants_figures(self) -> bool:
        """Whether the next step is to be measured, whatever the interval is."""
        return self._norm_is_spiking or any(u.is_suspect for u in self._units.values())

    @property
    def fallen(self) -> dict[str, str]:
        """Units that are to run in high precision, with the reason."""
        return {name: u.reason for name, u in self._units.items() if u.status == FALLEN}

    def step(
        self, iteration: int, grad_norm: float | None, figures: Figures | None
    ) -> list[PrecisionChange]:
        """Decide after a step in FP8.

        Args:
            iteration: Its number.
            grad_norm: Global gradient norm; None if it says nothing.
            figures: What was measured in this step, by unit; None if nothing was.

        Returns:
            The decisions, which hold from the next step on.
        """
        changes: list[PrecisionChange] = []
        if figures is not None:
            for name, roles in figures.items():
                changes += self._look(iteration, name, roles)
            changes += self._blame_worst(iteration, figures)
        self._note_norm(iteration, grad_norm)
        changes += self._probes(iteration)
        return changes

    # -- one unit -------------------------------------------------------------------------------

    def _unit(self, name: str) -> _Unit:
        if name not in self._units:
            self._units[name] = _Unit(deque(maxlen=2 * self._limits.patience))
        return self._units[name]

    def _look(
        self, iteration: int, name: str, roles: Mapping[Role, RoleStats]
    ) -> Iterator[PrecisionChange]:
        unit = self._unit(name)
        if unit.status == FALLEN:
            return
        trouble = next(self._troubles(unit, roles), None)
        self._remember(unit, roles)
        unit.marks.append(int(trouble is not None))
        if trouble is not None:
            if unit.status == PROBATION or sum(unit.marks) >= self._limits.patience:
                yield self._fall(iteration, name, trouble)
        elif unit.status == PROBATION:
            unit.healthy += 1
            if unit.healthy >= self._limits.patience:
                unit.status, unit.reason = FP8, ""
                what = f"{unit.healthy} steps in FP8 without trouble"
                yield PrecisionChange(
                    iteration, name, PROBATION, FP8, "healthy", what, {"steps": unit.healthy}
                )

    def _troubles(self, unit: _Unit, roles: Mapping[Role, RoleStats]) -> Iterator[_Trouble]:
        limits = self._limits
        for role, stats in roles.items():
            if stats.amax == 0.0:
                continue
            for rule, share, limit in (
                ("saturation", stats.saturated, limits.saturation),
                ("underflow", stats.underflow, limits.underflow),
            ):
                if limit and share > limit:
                    what = f"{rule} of {share:.2%} of {role.value} (limit {limit:.2%})"
                    yield _Trouble(rule, what, {"share": share, "limit": limit})
            past = unit.past.get(role.value, [])
            usual = median(past) if len(past) >= _ENOUGH else 0.0
            if limits.amax_ratio and usual and stats.amax > limits.amax_ratio * usual:
                what = f"amax {stats.amax:.4g} of {role.value}, usually {usual:.4g}"
                shown = {"amax": stats.amax, "median": usual, "limit": limits.amax_ratio}
                yield _Trouble("amax variation", what, shown)

    def _remember(self, unit: _Unit, roles: Mapping[Role, RoleStats]) -> None:
        for role, stats in roles.items():
            if math.isfinite(stats.amax) and stats.amax > 0.0:
                past = [*unit.past.get(role.value, []), stats.amax]
                unit.past[role.value] = past[-_REMEMBERED:]

    def _fall(self, iteration: int, name: str, trouble: _Trouble) -> PrecisionChange:
        unit = self._unit(name)
        before, unit.status = unit.status, FALLEN
        unit.falls += 1
        doublings = min(unit.falls - 1, _MOST_DOUBLINGS)
        unit.probe_at = iteration + self._limits.probe_interval * 2**doublings
        unit.reason = f"fell back at iteration {iteration}: {trouble.what}"
        unit.forget()
        rule, what, figures = trouble.rule, trouble.what, trouble.figures
        return PrecisionChange(iteration, name, before, FALLEN, rule, what, figures, unit.probe_at)

    def _probes(self, iteration: int) -> Iterator[PrecisionChange]:
        for name, unit in self._units.items():
            if unit.status == FALLEN and iteration >= unit.probe_at:
                unit.status = PROBATION
                what = f"tries FP8 again after fall {unit.falls}"
                yield PrecisionChange(
                    iteration, name, FALLEN, PROBATION, "probe", what, {"falls": unit.falls}
                )

    # -- the gradient norm ----------------------------------------------------------------------

    @property
    def _norm_is_spiking(self) -> bool:
        return len(self._spikes) >= self._limits.patience

    def _note_norm(self, iteration: int, grad_norm: float | None) -> None:
        """Remember a spike for a while. The norm of a spike counts for the median as any other."""
        if grad_norm is None or not self._limits.grad_norm_ratio:
            return
        spike = self._norms.judge(grad_norm)
        self._norms.accept(grad_norm)
        self._spikes = [at for at in self._spikes if at > iteration - _NORMS]
        if spike is not None:
            self._spikes.append(iteration)

    def _blame_worst(self, iteration: int, figures: Figures) -> Iterator[PrecisionChange]:
        """After several spikes, let the unit fall back whose tensors suffer most."""
        if not self._norm_is_spiking:
            return
        spikes, self._spikes = self._spikes, []
        noise = [
            (stats.snr_db, name, role)
            for name, roles in figures.items()
            for role, stats in roles.items()
            if self._unit(name).status == FP8 and stats.elements and not math.isnan(stats.snr_db)
        ]
        if not noise:
            return
        snr, name, role = min(noise, key=lambda one: one[:2])
        what = (
            f"{len(spikes)} spikes of the gradient norm, and the lowest SNR: {snr:.1f} dB of"
            f" {role.value}"
        )
        shown = {"spikes": float(len(spikes)), "snr_db": snr}
        yield self._fall(iteration, name, _Trouble("gradient norm", what, shown))

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything later decisions depend on, as plain values."""
        units = {
            name: {
                "marks": list(u.marks),
                "status": u.status,
                "reason": u.reason,
                "falls": u.falls,
                "probe_at": u.probe_at,
                "healthy": u.healthy,
                "past": {role: list(past) for role, past in u.past.items()},
            }
            for name, u in self._units.items()
        }
        return {"units": units, "norms": self._norms.state_dict(), "spikes": list(self._spikes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._units = {}
        for name, saved in (state.get("units") or {}).items():
            unit = self._unit(name)
            unit.marks.extend(int(one) for one in saved["marks"])
            unit.status, unit.reason = str(saved["status"]), str(saved["reason"])
            unit.falls, unit.probe_at = int(saved["falls"]), int(saved["probe_at"])
            unit.healthy = int(saved["healthy"])
            unit.past = {role: [float(x) for x in past] for role, past in saved["past"].items()}
        self._norms.load_state_dict(state.get("norms") or {})
        self._spikes = [int(one) for one in state.get("spikes") or ()]
