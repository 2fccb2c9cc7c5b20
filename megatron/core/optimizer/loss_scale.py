"""Loss scales that keep FP16 gradients inside the format's range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class LossScale(Protocol):
    """A factor on the loss that the optimizer takes out of the gradients again."""

    value: float

    def update(self, overflow: bool) -> None:
        """Learn whether the last step's gradients overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""


class ConstantLossScale:
    """A loss scale that never changes; 1 for BF16 and FP32."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def update(self, overflow: bool) -> None:
        """Ignore the outcome."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the value belongs to the configuration."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore `state`."""


class DynamicLossScale:
    """A loss scale that halves after overflows and doubles after a window without one.

    The scale falls once `hysteresis` overflows have been seen since it last grew, and from then
    on with every further overflow.

    Args:
        initial: First value.
        minimum: The scale never falls below it.
        window: Steps without overflow after which the scale doubles.
        hysteresis: Overflows that are tolerated before the scale falls.
    """

    growth = 2.0
    backoff = 0.5

    def __init__(
        self,
        initial: float = 2.0**32,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        self.value = float(initial)
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self.good_steps = 0
        self.tolerance_left = hysteresis

    def update(self, overflow: bool) -> None:
        """Learn whether the last step's gradients overflowed."""
        if overflow:
            self.good_steps = 0
            self.tolerance_left -= 1
            if self.tolerance_left <= 0:
                self.value = max(self.value * self.backoff, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps = 0
            self.tolerance_left = self.hysteresis
            self.value *= self.growth

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "loss_scale": self.value,
            "good_steps": self.good_steps,
            "tolerance_left": self.tolerance_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; names that it lacks keep their value."""
        self.value = float(state.get("loss_scale", self.value))
        self.good_steps = int(state.get("good_steps", self.good_steps))
        self.tolerance_left = int(state.get("tolerance_left", self.tolerance_left))
