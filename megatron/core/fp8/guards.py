"""Judgements about the health of a run, from plain numbers: no tensors, no ranks.

Whoever feeds the same numbers gets the same answers, so ranks that see the same figures agree, and
a run that resumes with the saved state decides as if it had never stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

# A median of fewer figures says little.
_ENOUGH = 16


@dataclass(frozen=True)
class Spike:
    """A figure that is out of line.

    Attributes:
        value: The figure.
        limit: What it should not have exceeded; infinite if it is no number.
        middle: Median of the figures before; NaN without.
        deviation: Median distance of those from their median; NaN without.
        count: How many there were.
    """

    value: float
    limit: float
    middle: float
    deviation: float
    count: int

    def describe(self, name: str) -> str:
        """Say in words what is wrong.

        Args:
            name: What the figure is, e.g. `loss`.
        """
        if not math.isfinite(self.value):
            return f"{name} {self.value} is not finite"
        return (
            f"{name} {self.value:.6E} is above {self.limit:.6E} (median {self.middle:.6E} and"
            f" median deviation {self.deviation:.2E} of the last {self.count})"
        )


class Watch:
    """Compares a figure with its own recent past.

    A spike is not finite, or above both `median + deviations * MAD` and `ratio * median` of the
    last `window` figures. MAD is the median distance from the median: neither it nor the median
    moves because of a few outliers. The second bound is for figures that hardly scatter.

    Args:
        window: Figures to compare with. Before there are 16 (or a whole window), only a figure that
            is not finite is a spike.
        deviations: Factor of the MAD.
        ratio: Factor of the median.
    """

    def __init__(self, window: int, deviations: float, ratio: float) -> None:
        self._deviations, self._ratio = deviations, ratio
        self._enough = min(window, _ENOUGH)
        self._past: deque[float] = deque(maxlen=window)

    def judge(self, value: float) -> Spike | None:
        """Return what is wrong with a figure, None if nothing is. It is not added."""
        count, middle, deviation, limit = len(self._past), math.nan, math.nan, math.inf
        if count >= self._enough:
            middle = median(self._past)
            deviation = median(abs(one - middle) for one in self._past)
            limit = max(middle + self._deviations * deviation, self._ratio * middle)
        if math.isfinite(value) and value <= limit:
            return None
        return Spike(value, limit, middle, deviation, count)

    def accept(self, value: float) -> None:
        """Add a figure to the past; one that is not finite is left out."""
        if math.isfinite(value):
            self._past.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the past as plain values."""
        return {"past": list(self._past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; a shorter window keeps the newest figures."""
        self._past.clear()
        self._past.extend(float(one) for one in state.get("past", ()))
