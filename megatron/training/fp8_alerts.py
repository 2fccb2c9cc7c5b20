"""Which figures of FP8 casts a user should look at.

A layer is reported once for a kind of trouble; if it stays in trouble, again after 8 looks, then
after 16 more, and so on. What several layers show at the same step is one alert, under the name of
the one that shows it most.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron.core.fp8.recipe import Role
from megatron.core.fp8.stats import RoleStats
from megatron.observe.events import Fp8Alert

FIRST_PAUSE = 8
_REMEMBERED = 16
_ENOUGH = 4  # values of which a median means something
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LARGEST_SCALE = 1e38
# With a scale that was never set, magnitudes are far below what the formats hold.
_FAR_BELOW = 100.0

Figures = Mapping[str, Mapping[Role, RoleStats]]


@dataclass(frozen=True)
class Limits:
    """From where figures are reported; 0 never.

    Attributes:
        amax_ratio: Magnitude over its recent median, and over the median of like layers.
        saturation: Share of elements beyond the format's largest value.
        underflow: Share of elements that became zero.
        gradients_may_overflow: Whether infinite gradients are part of a search for a loss scale.
    """

    amax_ratio: float
    saturation: float
    underflow: float
    gradients_may_overflow: bool = False


@dataclass(frozen=True)
class _Hit:
    path: str
    role: Role
    value: float
    what: str


def like(path: str) -> str:
    """The name that layers with other numbers share."""
    return _NUMBER.sub("*", path)


def _is_unset(stats: RoleStats) -> bool:
    """Whether the scale is the one that delayed scaling starts with."""
    return stats.scale == 1.0 and 0.0 < stats.amax < _FAR_BELOW


class Alerts:
    """Looks at figures, remembers what it needs and what it said.

    Args:
        limits: From where figures are reported.
        where: Names the ranks that hold a layer.
    """

    def __init__(self, limits: Limits, where: Callable[[str], str] = lambda path: "") -> None:
        self._limits, self._where = limits, where
        self._looks = 0
        self._history: dict[tuple[str, Role], deque[float]] = {}
        self._unset: set[tuple[str, Role]] = set()
        # (kind, path): the look from which it may be reported again, and the pause after that.
        self._quiet: dict[tuple[str, str], tuple[int, int]] = {}

    def look(self, iteration: int, figures: Figures, uncast: Sequence[str] = ()) -> list[Fp8Alert]:
        """Return what to report of one step.

        Args:
            iteration: The step.
            figures: Of every layer, in the order in which they run.
            uncast: Layers that were to run in FP8 and cast nothing.
        """
        self._looks += 1
        ratio = self._limits.amax_ratio
        kinds: tuple[tuple[str, float, Iterator[_Hit]], ...] = (
            ("not cast", 0.0, _not_cast(uncast)),
            ("not finite", 0.0, self._not_finite(figures)),
            ("degenerate scale", 0.0, self._degenerate(figures)),
            ("saturation", self._limits.saturation, self._shares(figures, "saturated")),
            ("underflow", self._limits.underflow, self._shares(figures, "underflow")),
            ("amax jump", ratio, self._jumps(figures)),
            ("outlier", ratio, self._outliers(figures)),
        )
        alerts = []
        for kind, limit, hits in kinds:
            told = [hit for hit in hits if self._may_tell(kind, hit.path)]
            if told:
                alerts.append(self._alert(iteration, kind, limit, told))
        self._remember(figures)
        return alerts

    def _alert(self, iteration: int, kind: str, limit: float, hits: list[_Hit]) -> Fp8Alert:
        for path in {hit.path for hit in hits}:
            pause = self._quiet.get((kind, path), (0, FIRST_PAUSE))[1]
            self._quiet[kind, path] = (self._looks + pause, 2 * pause)
        # The first module that is not finite is the one to look at, elsewhere the worst one.
        first = hits[0] if kind.startswith("not ") else max(hits, key=lambda hit: hit.value)
        others = tuple(f"{hit.path} {hit.role.value}" for hit in hits if hit is not first)
        return Fp8Alert(
            iteration, kind, first.path, first.role.value, first.value, limit, first.what, others,
            self._where(first.path),
        )  # fmt: skip

    def _may_tell(self, kind: str, path: str) -> bool:
        return self._looks >= self._quiet.get((kind, path), (0, 0))[0]

    def _remember(self, figures: Figures) -> None:
        self._unset.clear()
        for path, role, stats in _each(figures):
            if math.isfinite(stats.amax):
                past = self._history.setdefault((path, role), deque(maxlen=_REMEMBERED))
                past.append(stats.amax)
            if _is_unset(stats):
                self._unset.add((path, role))

    # -- kinds ----------------------------------------------------------------------------------

    def _not_finite(self, figures: Figures) -> Iterator[_Hit]:
        """In the order in which tensors come into being: forward, then backward."""
        forward = [x for x in _each(figures) if x[1] is not Role.GRAD_OUTPUT]
        backward = [x for x in _each(figures) if x[1] is Role.GRAD_OUTPUT][::-1]
        if self._limits.gradients_may_overflow:
            backward = []
        for path, role, stats in forward + backward:
            if stats.nonfinite:
                what = f"{stats.nonfinite:,} elements are NaN or infinite"
                yield _Hit(path, role, float(stats.nonfinite), what)

    def _degenerate(self, figures: Figures) -> Iterator[_Hit]:
        for path, role, stats in _each(figures):
            if stats.amax == 0.0:
                continue
            if not 0.0 < stats.scale < _LARGEST_SCALE:
                why = f"the scale {stats.scale:g} is not usable (amax {stats.amax:g})"
                yield _Hit(path, role, stats.scale, why)
            elif _is_unset(stats) and (path, role) in self._unset:
                why = f"the scale is still 1, as at the start (amax {stats.amax:g})"
                yield _Hit(path, role, stats.scale, why)

    def _shares(self, figures: Figures, name: str) -> Iterator[_Hit]:
        saturated = name == "saturated"
        limit = self._limits.saturation if saturated else self._limits.underflow
        became = "are beyond the format's largest value" if saturated else "became zero"
        for path, role, stats in _each(figures):
            share = getattr(stats, name)
            # The first step of delayed scaling casts with scale 1; that says nothing yet.
            if limit and share > limit and not _is_unset(stats):
                what = f"{share:.1%} of the elements {became} (limit {limit:.3g})"
                yield _Hit(path, role, share, what)

    def _jumps(self, figures: Figures) -> Iterator[_Hit]:
        limit = self._limits.amax_ratio
        for path, role, stats in _each(figures):
            past = self._history.get((path, role), ())
            usual = median(past) if len(past) >= _ENOUGH else 0.0
            if limit and usual and math.isfinite(stats.amax) and stats.amax > limit * usual:
                times = stats.amax / usual
                what = f"amax {stats.amax:.4g} is {times:.0f} times its recent median {usual:.4g}"
                yield _Hit(path, role, times, what)

    def _outliers(self, figures: Figures) -> Iterator[_Hit]:
        limit = self._limits.amax_ratio
        groups: dict[tuple[str, Role], list[float]] = {}
        for path, role, stats in _each(figures):
            if 0.0 < stats.amax < math.inf:
                groups.setdefault((like(path), role), []).append(stats.amax)
        for path, role, stats in _each(figures):
            known = groups.get((like(path), role), [])
            usual = median(known) if len(known) >= _ENOUGH else 0.0
            if limit and usual and limit * usual < stats.amax < math.inf:
                times = stats.amax / usual
                what = (
                    f"amax {stats.amax:.4g} is {times:.0f} times the median {usual:.4g} of"
                    f" {len(known)} like layers"
                )
                yield _Hit(path, role, times, what)


def _not_cast(uncast: Sequence[str]) -> Iterator[_Hit]:
    for path in uncast:
        yield _Hit(path, Role.INPUT, 0.0, "the layer should run in FP8, and nothing was cast")


def _each(figures: Figures) -> Iterator[tuple[str, Role, RoleStats]]:
    for path, roles in figures.items():
        for role, stats in roles.items():
            yield path, role, stats
